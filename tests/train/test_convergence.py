"""Every way to exchange reaches the accuracy of the plain one on the digits example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contract.config import parse_config
from pipeline.contract.data import forward, open_split
from pipeline.contract.task import load_task
from tests.train.distributed import run_distributed
from train.checkpoint.store import CheckpointStore
from train.parameter_server import ParameterServerTrainer
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
PLAIN: dict[str, Any] = {"epochs": 25, "batch_size": 64, "lr": 0.004, "device": "cpu", "checkpoint_every": 0}
WAYS: list[dict[str, Any]] = [
    {"compress": "fp16"},
    {"compress": "bf16"},
    {"compress": "powersgd"},
    {"compress": "topk"},
    {"strategy": "local_sgd"},
    {"strategy": "local_sgd", "sync_overlap": True},
    {"strategy": "diloco"},
    {"strategy": "diloco", "sync_overlap": True},
    {"strategy": "parameter_server"},
    {"accumulate": 2},
]


@pytest.mark.long
def test_every_strategy_reaches_the_accuracy_of_one_process(tmp_path: Path) -> None:
    plain, *others = run_distributed(accuracies, 2, tmp_path, seconds=1200)[0]
    assert plain > 0.97
    assert {str(way): found for way, found in zip(WAYS, others, strict=True) if found < plain - 0.01} == {}, plain


def accuracies(group: ProcessGroup, directory: Path) -> list[float]:
    """On the validation and the test split together: 720 pictures."""
    task = load_task("task.py:Digits", DIGITS)
    train, validation, test = (open_split(task, name) for name in ("train", "validation", "test"))
    found = []
    for i, way in enumerate([{}, *WAYS]):
        words = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": {**PLAIN, **way}}
        kind = ParameterServerTrainer if "parameter_server" in way.values() else Trainer
        made = kind(task, parse_config(words, source="test"), group, train, validation, 64)
        store = CheckpointStore(directory / str(i), 1, {}, group)
        progress = made.fit(Progress(), store, None)
        model = task.model()
        model.load_state_dict(store.load(progress.best_step).read_all("weights."))
        model.eval()
        right = [
            task.metrics(forward(model, task, batch), batch)["accuracy"]
            for batch in (split.batch(range(len(split))) for split in (validation, test))
        ]
        found.append(float(torch.cat(right).mean()))
    return found
