"""A transformer of three blocks that predicts the next of 96 characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.transformer import Transformer

if TYPE_CHECKING:
    from pipeline import Batch, Outputs


SIZES = {"train": 1 << 14, "validation": 64, "test": 64}
LENGTH, VOCABULARY = 48, 96


class Language:
    inputs = ("x",)
    outputs = ("scores",)

    def model(self) -> nn.Module:
        return Transformer(VOCABULARY, width=96, heads=4, depth=3, length=LENGTH)

    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        text = torch.randint(VOCABULARY, (SIZES[split], LENGTH + 1), generator=generator)
        return {"x": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        return functional.cross_entropy(outputs.flatten(0, -2), batch["target"].flatten())

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        assert isinstance(outputs, Tensor)
        return {"accuracy": (outputs.argmax(dim=-1) == batch["target"]).float().mean(dim=1)}
