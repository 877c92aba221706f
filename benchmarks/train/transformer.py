"""A decoder-only transformer in plain torch, as small or as large as a bench needs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Transformer(nn.Module):
    """The layout of GPT-2: learned places, norms before each part, the embedding used again as the head."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[_Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.hidden(x), self.token.weight)

    def hidden(self, x: Tensor) -> Tensor:
        states: Tensor = self.norm(self.blocks(self.token(x) + self.place))
        return states


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        mixed = self.mix(self.before(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(count, length, width))
        output: Tensor = x + self.think(self.between(x))
        return output
