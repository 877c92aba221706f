"""A checkpoint that was found whole, and what can be taken from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from pipeline.spec.errors import StageError
from train.checkpoint.manifest import Manifest
from train.checkpoint.place import Place
from train.checkpoint.reader import Reader
from train.state import Progress, below


class Saved:
    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = Reader(place, manifest.progress.step, [file.name for file in manifest.files])

    @property
    def progress(self) -> Progress:
        return self._manifest.progress

    @property
    def scaler(self) -> Mapping[str, Any]:
        return self._manifest.scaler

    @property
    def world_size(self) -> int:
        return self._manifest.world_size

    def shapes(self, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Of the tensors whose names begin so, by the rest of the name."""
        found = {name: (entry.size, entry.properties.dtype) for name, entry in self._reader.tensors.items()}
        return below(prefix, found)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill them; of a distributed tensor each process reads its own piece."""
        stored = self.shapes("")
        for name, tensor in tensors.items():
            if name not in stored or stored[name][0] != tensor.shape:
                held = f"{tuple(stored[name][0])} of it" if name in stored else "nothing of it"
                raise StageError(
                    f"the checkpoint of step {self.progress.step} does not fit: {name} is {tuple(tensor.shape)} here, "
                    f"and it holds {held}; train anew with `pipe run --force train`"
                )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each reads by itself
            load(dict(tensors), storage_reader=self._reader, planner=planner, no_dist=True)

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, in this process's memory."""
        found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in self.shapes(prefix).items()}
        self.load({f"{prefix}{name}": tensor for name, tensor in found.items()})
        return found
