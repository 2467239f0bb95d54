"""A small GPT and a small ResNet, each with its loss, for timing whole training steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.paper.models import BasicBlock, ResNet

CLASSES = 10  # of images


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class SmallGPT(nn.Module):
    """Predicts each token from those before it. The token embedding is the output layer too."""

    def __init__(self, vocabulary: int = 2048, context: int = 128, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads=width // 32) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def get_output_embeddings(self) -> nn.Module:
        """Tells `param_groups` which layer is the output layer, as models of transformers do."""
        return self.token_embedding

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """Random tokens, one more than the context, since each is also the target of the one before it."""
        vocabulary, context = self.token_embedding.num_embeddings, self.position_embedding.num_embeddings
        return torch.randint(vocabulary, (size, context + 1), generator=generator)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight
        return F.linear(self.norm(self.blocks(x)), self.token_embedding.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class SmallResNet(ResNet):
    """For images of CIFAR's size, 32 x 32. Its shortcuts have no norms."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__(3, CLASSES, (width, 2 * width, 4 * width), (blocks,) * 3)
        for block in self:
            if isinstance(block, BasicBlock) and isinstance(block.shortcut, nn.Sequential):
                block.shortcut = block.shortcut[0]

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise, with random labels."""
        images = torch.randn(size, 3, 32, 32, generator=generator)
        return images, torch.randint(CLASSES, (size,), generator=generator)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)
