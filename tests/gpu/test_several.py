"""A model that is split over several GPUs has the weights of one process; skipped where there are fewer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.process_group import ProcessGroup
from train.state import Progress

from .conftest import Waves, make

pytestmark = pytest.mark.gpu
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"strategy": "fsdp"}),
    "copies": (2, {"strategy": "fsdp", "weight_copies": 2}),
    "sequence": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "stages": (2, {"pipeline_parallel": 2, "accumulate": 2}),
    "sequence and fsdp": (4, {"tensor_parallel": 2, "sequence_parallel": True, "strategy": "fsdp"}),
    "stages and fsdp": (4, {"pipeline_parallel": 2, "accumulate": 2, "strategy": "fsdp"}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.fc2(torch.tanh(self.fc1(self.norm(x))))
        return hidden


class Rows(Waves):
    """Waves of eight positions, for repeated blocks."""

    def model(self) -> nn.Module:
        blocks = nn.Sequential(*(Block() for _ in range(4)))
        return nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Linear(1, 16), blocks, nn.Flatten(), nn.Linear(128, 1))


def train(rank: int, size: int, device: str, settings: dict[str, Any], folder: Path) -> None:
    chosen = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}.meeting", rank=rank, world_size=size)
    model_size = settings.get("tensor_parallel", 1) * settings.get("pipeline_parallel", 1)
    group = replace(ProcessGroup(Rank(rank, rank, size), chosen), model_size=model_size)
    made = make(group, Rows(), device=device, epochs=1, **settings)
    made.fit(Progress(), CheckpointStore(folder, 99, {}, group), None)
    dist.destroy_process_group()


def compare(way: str, device: str, folder: Path) -> None:
    size, settings = WAYS[way]
    for name, count, words in (("whole", 1, {}), ("split", size, settings)):
        spawn(train, (count, device, words, folder / name), nprocs=count)  # type: ignore[no-untyped-call]
    stores = [CheckpointStore(folder / name, 99, {}) for name in ("whole", "split")]
    whole, split = (store.load(store.steps()[-1]).tensors("weights.") for store in stores)
    torch.testing.assert_close(dict(split), dict(whole), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_on_several_gpus_has_the_weights_of_one(way: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < WAYS[way][0]:
        pytest.skip(f"torch sees {torch.cuda.device_count()} of {WAYS[way][0]} CUDA devices")
    compare(way, "cuda", tmp_path)
