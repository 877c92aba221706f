"""The train step as `pipe` starts it: real processes that meet, share the work, fail and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.contract.restarts import attempt_files
from pipeline.contract.run import Run
from pipeline.system.errors import DataError
from pipeline.system.processes import Rank
from train.batch_order import BatchOrder
from train.checkpoint.format import decode_manifest
from train.checkpoint.load import open_checkpoint
from train.checkpoint.storage import LocalStorage
from train.process_group import ProcessGroup
from train.trainer import begin_attempt

from .conftest import Project, equal, failure, journal, weights


def test_two_processes_train_the_weights_that_one_does(project: Project) -> None:
    """Batches of 7 or 8 cut for two processes and three micro-batches each: nothing divides."""
    one, two = project.run("one", accumulate=3), project.run("two", accumulate=3)
    for run, processes in ((one, 1), (two, 2)):
        done = project.train(run, processes)
        assert done.returncode == 0, done.stderr
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-5, atol=1e-6)
    for left, right in zip(journal(one), journal(two), strict=True):
        kind = "validation" if "validation" in left else "loss"  # 11 samples are shared as 5 and 6
        assert right[kind] == pytest.approx(left[kind], rel=1e-5)
    assert json.loads((two.partial("train") / "summary.json").read_text())["world_size"] == 2


def test_resumed_run_ends_with_identical_weights(project: Project) -> None:
    """Cut in an epoch, with a newer checkpoint that is damaged. Three processes: from there on, order changes a sum."""
    project.replace("nn.Tanh()", "nn.Tanh(), nn.Dropout(0.2)")
    whole, cut = (project.run(name, checkpoint_every=7, keep_checkpoints=9) for name in ("whole", "cut"))
    assert project.train(whole, processes=3).returncode == 0
    shutil.copytree(whole.partial("train"), cut.partial("train"))
    (cut.partial("train") / "model.safetensors").unlink()
    checkpoints = cut.partial("train") / "checkpoints"
    for later in ("step-00000014", "step-00000015"):
        shutil.rmtree(checkpoints / later)
    damaged = checkpoints / "step-00000010" / "0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    done = project.train(cut, processes=3)
    assert "warning: checkpoint step-00000010 is damaged" in done.stderr
    assert "resumed from the checkpoint of step 7 of 15" in done.stdout
    assert equal(weights(cut), weights(whole))
    assert [line["step"] for line in journal(cut)] == [line["step"] for line in journal(whole)]


def test_the_best_weights_become_the_model(project: Project) -> None:
    """With this sign, training makes every validation worse than the one before."""
    project.replace('batch["target"])\n', 'batch["target"]) * (1 if torch.is_grad_enabled() else -1)\n')
    run = project.run(epochs=2)
    assert project.train(run).returncode == 0
    storage = LocalStorage(run.partial("train") / "checkpoints")
    first, last = (
        open_checkpoint(storage, step, decode_manifest(storage.manifest(step)).identity).tensors("weights.")
        for step in storage.steps()
    )
    assert equal(weights(run), first)
    assert not equal(first, last)


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (1, "ddp"),
        *(pytest.param(2, name, marks=pytest.mark.long) for name in ("ddp", "fsdp", "parameter_server", "local_sgd")),
    ],
)
def test_training_goes_on_when_the_best_checkpoint_is_damaged(project: Project, processes: int, strategy: str) -> None:
    """The best is that of step 5; cut at step 10, the newest. Then the weights of a later step become the model."""
    rising = 'batch["target"]) + (0.0 if torch.is_grad_enabled() else 9.0 * self.validations())'
    project.replace('batch["target"])\n', f"{rising}\n")
    counter = "    count = 0\n\n    def validations(self):\n        self.count += 1\n        return self.count\n\n"
    project.replace("    def loss(", f"{counter}    def loss(")
    run = project.run(epochs=2, strategy=strategy)
    assert project.train(run, processes).returncode == 0
    (run.partial("train") / "model.safetensors").unlink()
    (run.partial("train") / "checkpoints" / "step-00000005" / "0.safetensors").write_bytes(b"")
    done = project.train(run, processes)
    assert done.returncode == 0, done.stderr
    assert "resumed from the checkpoint of step 10 of 10" in done.stdout
    assert "best at step 10 (that of step 5 was better, but its checkpoint was damaged)" in done.stdout
    summary = json.loads((run.partial("train") / "summary.json").read_text())
    assert (summary["best_step"], summary["lost_best"]["step"]) == (10, 5)
    assert (run.partial("train") / "checkpoints" / "step-00000005").is_dir(), "nothing is deleted"


@pytest.mark.parametrize("content", [b"", b"\xff\n1\n", None])
def test_damaged_records_of_training_cost_no_step(project: Project, content: bytes | None) -> None:
    """The ledger, the curves, the record of attempts and the chosen batch size, all at once."""
    run = project.run(epochs=2, batch_size="auto")
    assert project.train(run).returncode == 0
    train = run.partial("train")
    (train / "model.safetensors").unlink()
    (attempts,) = attempt_files(run.path)
    for path in (train / "ledger.jsonl", train / "metrics.jsonl", train / "batch_size.json", attempts):
        path.unlink() if content is None else path.write_bytes(content)
    done = project.train(run)
    assert done.returncode == 0, done.stderr
    assert "resumed from the checkpoint of step" in done.stdout
    for name in ("ledger.jsonl has 0 lines for the", "batch_size.json is damaged; the checkpoints have batches of"):
        assert f"warning: {name}" in done.stderr
    assert ("warning: metrics.jsonl is damaged" in done.stderr) == (content != b"")


def test_attempt_numbers_continue_although_their_record_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.partial("train").mkdir()
    (run.partial("train") / "ledger.jsonl").write_text('{"step": 1, "attempt": 3}\n{"step": 2, "att\n\0\0\n')
    assert begin_attempt(run, ProcessGroup(Rank(), torch.device("cpu")), 1).number == 4
    assert "warning: logs/attempts is damaged: it lacks attempt 3 of the ledger" in capsys.readouterr().err
    assert begin_attempt(run, ProcessGroup(Rank(), torch.device("cpu")), 1).number == 5
    assert capsys.readouterr().err == ""


def test_a_metric_that_is_not_a_number_is_left_to_the_gate(project: Project) -> None:
    project.replace('-(outputs - batch["target"]).abs()[:, 0]', '(outputs * float("nan"))[:, 0]')
    run = project.run()
    done = project.train(run)
    assert done.returncode == 0, done.stderr
    assert "warning: closeness is not finite" in done.stdout
    assert "NaN" not in (run.partial("train") / "metrics.jsonl").read_text()


def test_nan_loss_on_one_rank_stops_all_and_keeps_checkpoints(project: Project) -> None:
    project.replace(
        'batch["target"])\n',
        'batch["target"]) + (float("nan") if torch.is_grad_enabled() and (batch["index"] == 5).any() else 0.0)\n',
    )
    run = project.run(epochs=1, checkpoint_every=1)
    order = BatchOrder(37, 8, 0)
    step = next(i for i in range(5) if 5 in order.batch(i))
    rank = int(np.flatnonzero(order.batch(step) == 5)[0] >= len(order.batch(step)) // 2)
    done = project.train(run, processes=2)
    assert done.returncode != 0
    assert isinstance(failure(run), DataError)
    assert f"the loss is not finite at step {step + 1} on rank {rank};" in str(failure(run))
    kept = sorted(path.name for path in (run.partial("train") / "checkpoints").glob("step-*"))
    assert kept[-1] in {f"step-{step - 1:08d}", f"step-{step:08d}"}  # the last may still have been written


def test_a_bug_on_rank_1_is_reported_with_its_line(project: Project) -> None:
    project.replace(
        "    def loss(self, outputs, batch):\n",
        '    def loss(self, outputs, batch):\n        import os\n        assert os.environ["RANK"] == "0", "mine"\n',
    )
    run = project.run(epochs=1)
    assert project.train(run, processes=2).returncode != 0
    assert str(failure(run)).startswith("rank 1: AssertionError: mine (task.py, line")


def test_data_that_changed_since_prepare_are_refused(project: Project) -> None:
    run = project.run()
    project.replace("default_rng(len(split))", "default_rng(1 + len(split))")
    assert project.train(run).returncode == 2
    assert "differs from what prepare saw" in str(failure(run))


def test_resume_from_checkpoints_in_another_folder(project: Project, tmp_path: Path) -> None:
    whole, cut = (project.run(name, checkpoints=str(tmp_path / "kept")) for name in ("whole", "cut"))
    assert project.train(whole, processes=2).returncode == 0
    assert not (whole.partial("train") / "checkpoints").exists()
    shutil.copytree(tmp_path / "kept" / "whole", tmp_path / "kept" / "cut")
    shutil.rmtree(tmp_path / "kept" / "cut" / "step-00000015")
    done = project.train(cut)
    assert "resumed from the checkpoint of step 10 of 15" in done.stdout, done.stderr
