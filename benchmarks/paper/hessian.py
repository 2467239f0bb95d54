"""The largest eigenvalues of the Hessian of the training loss, by Lanczos with Hessian-vector products."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from benchmarks.paper.data.images import Batch

# Of the images that are differentiated at a time, which bounds the memory: 128 of CIFAR's, as in training.
MOST_PIXELS = 128 * 3 * 32 * 32


def top_eigenvalues(
    model: nn.Module, images: Tensor, labels: Tensor, count: int, seed: int, most_pixels: int = MOST_PIXELS
) -> list[float]:
    """Largest first, of the mean loss over these images, with BatchNorm's running statistics as in testing.

    scipy's eigsh is ARPACK's restarted Lanczos. 1% is far below the spread between seeds.
    """
    model.eval()
    params = [param for param in model.parameters() if param.requires_grad]
    at_once = max(1, most_pixels // images[0].numel())
    batches = list(zip(images.split(at_once), labels.split(at_once), strict=True))

    def product(vector: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(vector.reshape(-1)).to(params[0])
        total = np.zeros(size)
        for batch in batches:  # from the start each time: kept graphs would fill the memory
            share = len(batch[1]) / len(labels)
            total += hessian_vector_product(model, params, batch, share, direction).double().cpu().numpy()
        return total

    size = sum(param.numel() for param in params)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(seed).standard_normal(size)
    values = eigsh(operator, k=count, which="LA", v0=start, tol=0.01, return_eigenvectors=False)
    return [float(value) for value in sorted(values, reverse=True)]


def hessian_vector_product(
    model: nn.Module, params: list[nn.Parameter], batch: Batch, share: float, direction: Tensor
) -> Tensor:
    """Of `share` times the batch's mean loss."""
    images, labels = batch
    loss = F.cross_entropy(model(images), labels) * share
    grads = torch.autograd.grad(loss, params, create_graph=True)
    slope = torch.cat([grad.flatten() for grad in grads]) @ direction
    parts = torch.autograd.grad(slope, params, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])
