"""The two-layer LSTM, much like the medium one of Zaremba et al. (2014)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Hidden = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Gives the logits of each next token, and the hidden state with which the following stretch of text begins."""

    def __init__(self, vocabulary: int, width: int, dropout: float, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.out.weight, -0.1, 0.1)
        nn.init.zeros_(self.out.bias)

    def no_hidden(self, batch: int, device: torch.device) -> Hidden:
        shape = (self.lstm.num_layers, batch, self.lstm.hidden_size)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def forward(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """`tokens` is (time, batch)."""
        output, hidden = self.lstm(self.dropout(self.embedding(tokens)), hidden)
        return self.out(self.dropout(output)), hidden


def lstm(vocabulary: int) -> LanguageModel:
    return LanguageModel(vocabulary, width=512, dropout=0.5)


def small_lstm(vocabulary: int) -> LanguageModel:
    return LanguageModel(vocabulary, width=64, dropout=0.2)


def medium_lstm(vocabulary: int) -> LanguageModel:
    return LanguageModel(vocabulary, width=128, dropout=0.2)
