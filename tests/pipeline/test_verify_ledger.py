from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.contract.run import Run
from pipeline.system.errors import BundleError
from pipeline.system.files import write_json
from pipeline.verify import ledger_verification, verify_run_ledger
from train.batch_order import BatchOrder
from train.ledger import LedgerLine, batch_digest

from .conftest import NewRun

ORDER = BatchOrder(samples=150, batch_size=64, seed=0)  # three steps an epoch, as the configuration's defaults have it


def row(step: int) -> str:
    ids = ORDER.batch(step - 1)
    attempt = 1 if step < 5 else 3
    summary = LedgerLine(
        step=step,
        epoch=ORDER.epoch_of(step - 1),
        samples=len(ids),
        digest=batch_digest(ids),
        processes=2 * attempt,
        attempt=attempt,
    )
    return f"{summary.model_dump_json()}\n"


def write(directory: Path, rows: list[str]) -> None:
    (directory / "ledger.jsonl").write_text("".join(rows))


def model(directory: Path, step: int | None) -> None:
    metadata = None if step is None else {"step": str(step)}
    save_file({"w": np.ones(3, np.float32)}, directory / "model.safetensors", metadata)


@pytest.fixture
def run(new_run: NewRun) -> Run:
    """A run whose training of six steps is complete."""
    run = new_run()
    run.output("prepare").mkdir()
    write_json(run.output("prepare") / "data.json", {"splits": {"train": {"samples": 150}}})
    directory = run.output("train")
    directory.mkdir()
    write(directory, [row(step) for step in range(1, 7)])
    write_json(directory / "summary.json", {"steps": 6, "best_step": 3})
    model(directory, 3)
    return run


def test_a_whole_ledger_is_reported_in_one_sentence(run: Run) -> None:
    assert list(verify_run_ledger(run)) == [
        "ledger: 6 steps, 2 epochs, every one of 150 samples exactly once in each; 2 attempts, 2 to 6 processes"
    ]


def test_ledger_is_verified_against_the_limited_split(run: Run) -> None:
    write_json(run.output("prepare") / "data.json", {"splits": {"train": {"samples": 999}}})
    assert ledger_verification(Run(run.path)).lost
    body = json.loads((run.path / "run.json").read_text())
    body["config"]["train"]["max_samples"] = 150
    write_json(run.path / "run.json", body)
    assert ledger_verification(Run(run.path)).fault == ""


def test_ledger_is_verified_against_the_chosen_batch_size(run: Run) -> None:
    body = json.loads((run.path / "run.json").read_text())
    body["config"]["train"]["batch_size"] = "auto"
    write_json(run.path / "run.json", body)
    write_json(run.output("train") / "batch_size.json", {"batch_size": 64})
    assert ledger_verification(Run(run.path)).fault == ""
    write_json(run.output("train") / "batch_size.json", {"batch_size": 32})
    assert ledger_verification(Run(run.path)).fault != ""


def test_run_without_training_has_no_ledger(new_run: NewRun) -> None:
    run = new_run()
    assert list(verify_run_ledger(run)) == []
    with pytest.raises(BundleError, match="training has not begun"):
        ledger_verification(run)


def test_unfinished_training_is_verified_up_to_its_last_line(run: Run) -> None:
    run.output("train").rename(run.partial("train"))
    (run.partial("train") / "summary.json").unlink()
    write(run.partial("train"), [row(step) for step in range(1, 5)] + ['{"step": 5'])
    summary = (
        "4 steps, 1.33 epochs, every one of 150 samples exactly once in each complete epoch; 1 attempt, 2 processes"
    )
    assert list(verify_run_ledger(run)) == [f"ledger: training is unfinished, verified up to {summary}"]
    write(run.partial("train"), [])
    assert list(verify_run_ledger(run)) == []


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([1, 2, 4, 5, 6], r"line 3: the line of step 3 is missing.* \(50 samples lost, 0 repeated\)"),
        ([1, 2, 3, 3, 4, 5, 6], r"line 4: a second line of step 3 \(0 samples lost, 50 repeated\)"),
        ([1, 3, 2, 4, 5, 6], "line 2: out of order, it is of step 3$"),
    ],
)
def test_missing_repeated_or_unordered_line_is_an_error(
    run: Run, rows: list[int], sentence: str, unfinished: bool
) -> None:
    write(run.output("train"), [row(step) for step in rows])
    if unfinished:
        run.output("train").rename(run.partial("train"))
        (run.partial("train") / "summary.json").unlink()
    with pytest.raises(BundleError, match=rf"ledger.jsonl, {sentence}"):
        list(verify_run_ledger(run))


def test_forged_truncated_or_missing_ledger_is_an_error(run: Run) -> None:
    rows = [row(step) for step in range(1, 7)]
    forged = json.dumps({**json.loads(rows[3]), "digest": "0" * 64}) + "\n"
    write(run.output("train"), [*rows[:3], forged, *rows[4:]])
    with pytest.raises(BundleError, match="line 4: step 4 was trained on samples that no step has"):
        list(verify_run_ledger(run))
    write(run.output("train"), rows[:5])
    with pytest.raises(BundleError, match="the line of step 6 is missing, 6 steps were trained"):
        list(verify_run_ledger(run))
    (run.output("train") / "ledger.jsonl").unlink()
    with pytest.raises(BundleError, match="the samples used are unknown"):
        list(verify_run_ledger(run))


def test_training_may_end_within_an_epoch_only_at_its_limit(run: Run) -> None:
    write(run.output("train"), [row(step) for step in range(1, 6)])
    write_json(run.output("train") / "summary.json", {"steps": 5, "best_step": 3})
    with pytest.raises(BundleError, match="ends with step 5, in the middle of an epoch of 3"):
        list(verify_run_ledger(run))
    write_json(run.output("train") / "summary.json", {"steps": 5, "total_steps": 5, "best_step": 3})
    assert "5 steps, 1.67 epochs" in next(iter(verify_run_ledger(run)))


@pytest.mark.parametrize(("step", "best"), [(6, 3), (3, 6), (9, 9)])
def test_weights_of_another_step_than_the_best_are_an_error(run: Run, step: int, best: int) -> None:
    model(run.output("train"), step)
    write_json(run.output("train") / "summary.json", {"steps": 6, "best_step": best})
    with pytest.raises(BundleError, match=f"has the weights of step {step}, but the best of 6 steps was {best}"):
        list(verify_run_ledger(run))


@pytest.mark.parametrize("damage", ["no step", "no file", "no weights"])
def test_weights_that_do_not_name_their_step_are_an_error(run: Run, damage: str) -> None:
    path = run.output("train") / "model.safetensors"
    harm: dict[str, Any] = {
        "no step": lambda: model(path.parent, None),
        "no file": path.unlink,
        "no weights": lambda: path.write_bytes(b"weights"),
    }
    harm[damage]()
    with pytest.raises(BundleError, match="has no training step in its header"):
        list(verify_run_ledger(run))
