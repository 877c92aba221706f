"""Training on streams, padded batches, and orders that a task declares: prepared, killed, resumed and verified."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.chaos import CHAOS_VARIABLE, ChaosLog, Kill
from pipeline.contract.run import Run
from pipeline.verify import verify_run_ledger
from tests.fork_server import launch
from tests.quick import quick
from tests.train.distributed import Wave, run_distributed, trainer, weights
from train.batch_order import BatchOrder, Indices
from train.checkpoint.store import CheckpointStore
from train.ledger import Ledger, read_lines, verify_ledger
from train.process_group import ProcessGroup
from train.state import Progress
from train.validation import validate

from .conftest import Project, equal
from .conftest import weights as trained_weights

# Texts of 3 to 30 tokens, whose sum is to be learned; the padding has the id 0 and adds nothing.
TEXTS = """
import functools
import numpy as np
import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.head = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, ids):
        return self.head(self.embedding(ids).sum(dim=1))


class Tiny:
    inputs = ("ids",)
    outputs = ("y",)
    counts = {"train": 37, "validation": 11, "test": 5}

    def model(self):
        return Counter()

    def rows(self, split):
        draw = np.random.default_rng(len(split))
        return [draw.integers(1, 50, draw.integers(3, 30)) for _ in range(self.counts[split])]

    def sample(self, text):
        return {"ids": torch.from_numpy(text), "target": np.float32([text.sum() / 500])}

    def data(self, split):
        return [self.sample(text) for text in self.rows(split)]

    def collate(self, samples):
        ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
        return {"ids": ids, "target": torch.tensor(np.stack([sample["target"] for sample in samples]))}

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs, batch):
        return {"closeness": -(outputs - batch["target"]).abs()[:, 0]}
"""


# Shuffled anew in each epoch, and with noise that is drawn when a sample is loaded.
STREAM = """

class Texts(torch.utils.data.IterableDataset):
    def __init__(self, texts, sample):
        self.texts, self.sample, self.epoch = texts, sample, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        assert torch.utils.data.get_worker_info() is None
        for index in np.random.default_rng(self.epoch).permutation(len(self.texts)):
            yield functools.partial(self.load, index)

    def load(self, index):
        sample = self.sample(self.texts[index])
        return {**sample, "target": sample["target"] + np.random.normal(size=1).astype(np.float32) / 10}
"""


@pytest.fixture
def texts(tmp_path: Path) -> Project:
    (tmp_path / "task.py").write_text(TEXTS)
    (tmp_path / "runs").mkdir()
    return Project(tmp_path)


def prepared(project: Project, name: str, **train: Any) -> Run:
    """A run whose data were prepared by the step itself."""
    run = project.run(name, checkpoint_every=2, keep_checkpoints=9, **train)
    (run.output("prepare") / "data.json").unlink()
    run.output("prepare").rmdir()
    run.partial("prepare").mkdir()
    done = launch(("-m", "pipeline.steps.prepare", str(run.path)), project.root, 1, {"PIPE_PARENT_WATCH": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    run.partial("prepare").rename(run.output("prepare"))
    return run


def train_through_a_kill(project: Project, run: Run, processes: tuple[int, int]) -> None:
    folder = project.root / "chaos"
    ChaosLog(folder).write_schedule([Kill(place="step", step=7, rank=processes[0] - 1)])
    killed = project.train(run, processes[0], **{CHAOS_VARIABLE: str(folder)})
    assert killed.returncode == -9, killed.stderr
    done = project.train(run, processes[1])
    assert "resumed from the checkpoint of step" in done.stdout, done.stderr


def order_of(run: Run) -> str:
    return str(json.loads((run.output("prepare") / "data.json").read_text())["order"]["kind"])


def test_a_stream_resumes_to_the_same_bits_with_any_number_of_workers(texts: Project) -> None:
    texts.replace(
        "return [self.sample(text) for text in self.rows(split)]", "return Texts(self.rows(split), self.sample)"
    )
    path = texts.root / "task.py"
    path.write_text(path.read_text() + STREAM)
    whole, cut = prepared(texts, "whole", accumulate=2), prepared(texts, "cut", accumulate=2, workers=2)
    assert order_of(whole) == "stream"
    done = texts.train(whole, processes=2)
    assert done.returncode == 0, done.stderr
    train_through_a_kill(texts, cut, (2, 2))
    assert equal(trained_weights(whole), trained_weights(cut))
    assert "every one of 37 samples exactly once in each; 2 attempts" in next(verify_run_ledger(cut))


GROUPS = np.random.default_rng(3).integers(0, 30, 149)
VALUES: Mapping[str, Any] = {
    "groups": GROUPS,
    "weights": np.random.default_rng(4).random(149),
    "lengths": np.random.default_rng(5).integers(1, 99, 149),
}


class Smooth(Wave):
    """Computes the same for any number of processes: without batch norm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


class WaveStream:
    """The samples of Wave, in their order."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def __iter__(self) -> Any:
        return ({name: torch.from_numpy(column[i]) for name, column in self.columns.items()} for i in range(149))


class SpiedLedger(Ledger):
    batches: list[list[int]]

    def record(self, step: int, indices: Indices, checksums: Tensor | None = None) -> None:
        self.batches.append(indices.tolist())
        super().record(step, indices, checksums)


def trained_in_order(group: ProcessGroup, directory: Path, kind: Any) -> tuple[Any, list[list[int]], BatchOrder]:
    """Train two epochs; return the weights, and the samples of each micro-batch of this process."""
    order = BatchOrder(149, 40 if kind == "groups" else 15, 0, kind, VALUES.get(kind))
    task = Smooth()
    directory.mkdir(exist_ok=True)
    if kind == "stream":
        columns = task.data("train")
        task.data = lambda split: WaveStream(columns) if split == "train" else Wave().data(split)  # type: ignore[method-assign,assignment,return-value]
    made = trainer(group, task, epochs=2, accumulate=2, order=order, batch_size=order.batch_size)
    batches: list[list[int]] = []
    ledger = SpiedLedger(directory, group, order, 0, attempt=1)
    ledger.batches = batches
    made.fit(Progress(), CheckpointStore(directory / "checkpoints", 9, {}, group), None, ledger=ledger)
    return weights(made), batches, order


@pytest.mark.parametrize("kind", quick(["groups", "stream"], ["groups", "weights", "lengths", "stream"]))
def test_two_processes_train_in_the_order_of_one(tmp_path: Path, kind: str) -> None:
    (one,) = run_distributed(trained_in_order, 1, tmp_path / "one", kind)
    two = run_distributed(trained_in_order, 2, tmp_path / "two", kind)
    for folder, size in (("one", 1), ("two", 2)):
        proof = verify_ledger(read_lines(tmp_path / folder / "ledger.jsonl"), one[2], 2 * one[2].steps_per_epoch)
        assert (proof.fault, proof.lost, proof.repeated) == ("", 0, 0)
        assert (proof.processes, proof.drawn) == ((size, size), kind == "weights")
    for name, tensor in one[0].items():
        torch.testing.assert_close(two[0][0][name], tensor, rtol=1e-4, atol=1e-5)
    if kind == "groups":
        parts = [{*GROUPS[part].tolist()} for part in itertools.chain(two[0][1], two[1][1])]
        assert len(parts) == 2 * 2 * one[2].steps_per_epoch * 2  # epochs, processes, micro-batches
        assert sum(map(len, parts)) == 2 * len({*GROUPS.tolist()})  # no group is in two micro-batches of an epoch


class Listwise(Smooth):
    """Its loss compares each sample with the mean of its group, so that a divided group changes it."""

    def data(self, split: str) -> dict[str, Any]:
        columns = super().data(split)
        return {**columns, "query": np.random.default_rng(6).integers(0, 12, len(columns["x"]))}

    def sample_groups(self, data: Mapping[str, Any]) -> Any:
        return data["query"]

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        same = (batch["query"][:, None] == batch["query"][None]).float()
        centred = outputs - same @ outputs / same.sum(dim=1, keepdim=True)
        return nn.functional.mse_loss(centred, batch["target"])


def validated(group: ProcessGroup, whole: bool) -> list[dict[str, float]]:
    made = trainer(group, Listwise())
    if not whole:
        made._validation_cuts = range(len(made._validation) + 1)
    return [
        validate(made._task, made.strategy, made._validation, group, size, made._validation_cuts) for size in (9, 61)
    ]


@pytest.mark.long
def test_validation_keeps_groups_whole_for_any_number_of_processes() -> None:
    (one,), two = run_distributed(validated, 1, True), run_distributed(validated, 2, True)
    for found in (one[1], *two[0], *two[1]):
        assert found == pytest.approx(one[0], rel=1e-5)
    (divided,) = run_distributed(validated, 1, False)
    assert divided[0]["loss"] != pytest.approx(one[0]["loss"], rel=1e-3)


def test_missing_step_of_weighted_draws_is_detected(tmp_path: Path) -> None:
    (found,) = run_distributed(trained_in_order, 1, tmp_path, "weights")
    lines = read_lines(tmp_path / "ledger.jsonl")
    order: BatchOrder = found[2]
    proof = verify_ledger([line for line in lines if line.step != 4], order, len(lines))
    assert (proof.lost, proof.repeated) == (order.size(3), 0)
