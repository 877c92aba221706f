"""Boxes of tensors out of safetensors files: what is asked for is read, and counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.spec.errors import DataError
from train.pretrained.header import BITS, Entry
from train.pretrained.source import Box


class Reading:
    """Files stay open, and mapped, as long as this does."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self.bytes = 0  # asked of the files

    def __call__(self, entry: Entry, box: Box) -> Tensor:
        self.bytes += math.prod(stop - start for start, stop in box) * BITS[entry.dtype] // 8
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            if not box:
                return self._tensor(entry)
            found: Tensor = self._open[entry.file].get_slice(entry.name)[tuple(slice(*side) for side in box)]
        except (SafetensorError, OSError) as error:
            raise DataError(f"{entry.file}: {entry.name} cannot be read: {error}") from error
        return found

    def _tensor(self, entry: Entry) -> Tensor:
        found: Tensor = self._open[entry.file].get_tensor(entry.name)
        return found


def whole(shape: torch.Size | tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
