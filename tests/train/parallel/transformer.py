"""A small transformer with the names of Llama, as a user would write it; tests copy this file as their task.py."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 4
        self.q_proj = nn.Linear(16, 16, bias=False)
        self.k_proj = nn.Linear(16, 8, bias=False)
        self.v_proj = nn.Linear(16, 8, bias=False)
        self.o_proj = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (part.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down_proj = nn.Linear(24, 16, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.attention, self.mlp = Attention(), Mlp()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        out: Tensor = x + self.drop(self.mlp(self.norm_2(x)))
        return out


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.place = nn.Parameter(torch.randn(1, 6, 16) * 0.1)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= 6
        x = self.embed(tokens) + self.place[:, : tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Tiny:
    inputs = ("tokens",)
    outputs = ("logits",)
    counts: ClassVar = {"train": 37, "validation": 11, "test": 5}

    def model(self) -> nn.Module:
        return Llama()

    def data(self, split: str) -> dict[str, Any]:
        tokens = np.random.default_rng(len(split)).integers(0, 11, size=(self.counts[split], 7))
        return {"tokens": tokens[:, :-1], "target": tokens[:, 1:], "index": np.arange(len(tokens))}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), batch["target"].flatten())

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"closeness": (outputs.argmax(2) == batch["target"]).float().mean(1)}
