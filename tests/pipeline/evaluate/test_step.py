"""The evaluate step as one process, and as two under torchrun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.contract.data import forward, open_split
from pipeline.contract.run import Run, RunFile
from pipeline.contract.task import load_task, save_weights
from pipeline.system.errors import GateError, read_error
from pipeline.system.files import write_atomic, write_json
from pipeline.system.sources import SOURCE_ROOT
from tests.ports import free_port

from ...fork_server import launch

DIGITS = SOURCE_ROOT / "examples" / "digits"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return digits weights after a few training steps: better than chance, worse than the baseline."""
    torch.manual_seed(0)
    task = load_task("task.py:Digits", DIGITS)
    model, samples = task.model(), open_split(task, "train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for batch in samples.batches(range(512), 64):
        optimizer.zero_grad()
        task.loss(forward(model, task, batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_weights(model.state_dict(), path)
    return path


def make_run(path: Path, weights: Path, **evaluate: object) -> Run:
    run = Run(path)
    run.output("train").mkdir(parents=True)
    (run.output("train") / "model.safetensors").write_bytes(weights.read_bytes())
    config = {
        "name": "digits",
        "task": "task.py:Digits",
        "codec": "codec.py:DigitsCodec",
        "evaluate": {"rule": "non-inferior", **evaluate},
    }
    file = RunFile(id=run.id, created="2026-01-01T00:00:00+00:00", wanted=("evaluate",), config=config, environment={})
    write_atomic(run.path / "run.json", file.model_dump_json())
    return run


def start(run: Run, processes: int = 1) -> subprocess.CompletedProcess[str]:
    argv = ("-m", "pipeline.evaluate", str(run.path), "--root", str(DIGITS))
    return launch(argv, run.path.parent, processes, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})


def test_verdict_warns_that_the_best_checkpoint_was_lost(tmp_path: Path, weights: Path) -> None:
    run = make_run(tmp_path / "one", weights, margin=2.0)
    write_json(run.output("train") / "summary.json", {"best_step": 200, "lost_best": {"step": 48, "loss": 0.1}})
    sentence = "the model is of step 200, because the better checkpoint of step 48 was damaged"
    assert f"warning: {sentence}" in start(run).stdout
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    assert any(warning.startswith(sentence) for warning in verdict["warnings"])


def test_one_and_two_processes_score_every_sample_identically(tmp_path: Path, weights: Path) -> None:
    # 360 samples in batches of 50: eight batches, the last one short.
    one = make_run(tmp_path / "one", weights, batch_size=50, margin=2.0)
    two = make_run(tmp_path / "two", weights, batch_size=50, margin=2.0)
    for run, processes in ((one, 1), (two, 2)):
        done = start(run, processes)
        assert done.returncode == 0, done.stderr
    with (
        np.load(one.partial("evaluate") / "predictions.npz") as single,
        np.load(two.partial("evaluate") / "predictions.npz") as shared,
    ):
        assert set(single.files) == set(shared.files) >= {"actual", "candidate.log_likelihood", "baseline.accuracy"}
        assert len(single["actual"]) == 360
        for name in single.files:
            np.testing.assert_array_equal(single[name], shared[name], err_msg=name)
    for name in ("metrics.json", "verdict.json"):
        assert (one.partial("evaluate") / name).read_bytes() == (two.partial("evaluate") / name).read_bytes()
    assert json.loads((one.partial("evaluate") / "verdict.json").read_text())["verdict"] == "pass"


def test_rejected_candidate_exits_with_code_3(tmp_path: Path, weights: Path) -> None:
    run = make_run(tmp_path / "run", weights, require={"accuracy": 0.999})
    done = start(run)
    assert done.returncode == 3, done.stderr
    assert "below the required 0.999" in done.stderr
    assert isinstance(read_error(run.partial("evaluate")), GateError)
