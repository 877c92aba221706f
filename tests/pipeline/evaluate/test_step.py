"""The evaluate step as one process, and as two under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from pipeline.contract.run import Run
from pipeline.contract.task import load_task
from pipeline.system.sources import SOURCE_ROOT
from tests.ports import free_port
from tests.weights import save_weights

from ...fork_server import launch
from ..records import write_run_file

DIGITS = SOURCE_ROOT / "examples" / "digits"


def evaluated(path: Path, processes: int) -> Path:
    """Return the results of an untrained model, of 360 samples in batches of 50: eight batches, the last one short."""
    run = Run(path)
    run.output("train").mkdir(parents=True)
    torch.manual_seed(0)
    save_weights(load_task("task.py:Digits", DIGITS).model().state_dict(), run.output("train") / "model.safetensors")
    evaluate = {"rule": "non-inferior", "batch_size": 50, "margin": 2.0}
    write_run_file(run, "evaluate", task="task.py:Digits", codec="codec.py:DigitsCodec", evaluate=evaluate)
    argv = ("-m", "pipeline.evaluate", str(run.path), "--root", str(DIGITS))
    done = launch(argv, path.parent, processes, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    assert done.returncode == 0, done.stderr
    return run.partial("evaluate")


def test_one_and_two_processes_score_every_sample_identically(tmp_path: Path) -> None:
    one, two = evaluated(tmp_path / "one", 1), evaluated(tmp_path / "two", 2)
    with np.load(one / "predictions.npz") as single, np.load(two / "predictions.npz") as shared:
        assert set(single.files) == set(shared.files) >= {"actual", "candidate.log_likelihood", "baseline.accuracy"}
        assert len(single["actual"]) == 360
        for name in single.files:
            np.testing.assert_array_equal(single[name], shared[name], err_msg=name)
    for name in ("metrics.json", "verdict.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert json.loads((one / "verdict.json").read_text())["verdict"] == "pass"
