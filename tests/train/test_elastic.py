"""Training that goes on with another number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.train.distributed import resumed, run_distributed, trained, weights
from train.process_group import ProcessGroup
from train.state import Progress

from .conftest import Project, equal
from .conftest import weights as model_of
from .parallel.conftest import losses
from .parallel.conftest import trained as trained_run

WORDS: dict[str, Any] = {"elastic_shards": 4, "epochs": 3, "batch_size": 30, "checkpoint_every": 3}  # 15 steps
Ended = tuple[dict[str, Tensor], Progress]


def test_elastic_shards_give_identical_bits_for_one_to_three_processes(tmp_path: Path) -> None:
    """Each continues from a checkpoint of the one before, none of them at the end of an epoch."""
    ((expected, expected_progress),) = run_distributed(run_alone, 1, tmp_path)
    for processes, after in ((2, 3), (3, 6)):
        for found, progress in run_distributed(continue_run, processes, tmp_path, after):
            assert equal(found, expected), f"{processes} processes from step {after} on"
            assert progress == expected_progress


def run_alone(group: ProcessGroup, directory: Path) -> Ended:
    made, progress = trained(group, directory, **WORDS)
    return weights(made), progress


def continue_run(group: ProcessGroup, directory: Path, after: int) -> Ended:
    made, progress = resumed(group, directory, after, **WORDS)
    return weights(made), progress


def test_elastic_train_step_has_the_bits_of_three_processes(project: Project) -> None:
    words = {"elastic_shards": 3, "precision": "bf16"}
    one, three = trained_run(project, "one", 1, **words), trained_run(project, "three", 3, **words)
    assert equal(model_of(one), model_of(three))
    assert losses(one) == losses(three)
