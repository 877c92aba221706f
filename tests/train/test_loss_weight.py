"""The loss is a mean over what `loss_weight` counts, such as tokens, however a global batch is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.contract.data import Samples
from pipeline.system.errors import DataError
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.process_group import ProcessGroup
from train.validation import check_loss_weight

from .distributed import run_distributed, trained
from .parallel.transformer import Tiny

ALONE = ProcessGroup(Rank(), torch.device("cpu"))
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "accumulate": {"accumulate": 3},
    "fsdp": {"strategy": "fsdp", "accumulate": 2},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2, "accumulate": 3},
    "elastic": {"elastic_shards": 4},
}


class Answers(Tiny):
    """Counts only the tokens of answers: from none to five in a row of six."""

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self._counted(batch).sum()

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(outputs[:, :-1].transpose(1, 2), batch["tokens"][:, 1:], reduction="none")
        counted = self._counted(batch)
        return (losses * counted).sum() / counted.sum().clamp(min=1)

    def _counted(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.arange(5) < (batch["tokens"][:, :1] - 4)


def run(group: ProcessGroup, folder: Path, **settings: Any) -> float | None:
    """Train, and return the best validation loss."""
    settings = {"epochs": 2, "batch_size": 9, "optimizer": "sgd", "clip_norm": 0, **settings}
    return trained(group, folder, task=Answers(), **settings)[1].best_loss


def run_all(group: ProcessGroup, folder: Path) -> dict[str, float | None]:
    losses = {name: run(group, folder / name, **settings) for name, settings in CASES.items()}
    run(group, folder / "local", strategy="local_sgd", sync_every=4)
    if group.rank.first:
        losses["alone"] = run(ALONE, folder / "alone")
        run(ALONE, folder / "elastic alone", elastic_shards=4)
    return losses


@pytest.mark.long
def test_two_processes_train_the_mean_over_all_tokens_of_the_batch(tmp_path: Path) -> None:
    losses, _ = run_distributed(run_all, 2, tmp_path)
    folders = [*CASES, "alone", "elastic alone", "local"]
    weights = {name: CheckpointStore(tmp_path / name, 99, {}).load(10).tensors("weights.") for name in folders}
    for name in CASES:
        torch.testing.assert_close(weights[name], weights["alone"], rtol=1e-4, atol=1e-6)
        assert losses[name] == pytest.approx(losses["alone"], rel=1e-5)
    torch.testing.assert_close(weights["elastic"], weights["elastic alone"], rtol=0, atol=0)
    with pytest.raises(AssertionError):  # its processes use the mean over their own tokens
        torch.testing.assert_close(weights["local"], weights["alone"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), torch.ones(2)])
def test_loss_weight_that_is_no_weight_is_refused_before_training(weight: Any) -> None:
    class Wrong(Answers):
        def loss_weight(self, batch: dict[str, Tensor]) -> Any:
            return weight

    task: Any = Wrong()
    with pytest.raises(DataError, match="loss_weight"):
        check_loss_weight(task, Samples("train", task.data("train")))
