"""Another project as the beginning: which of its runs is taken, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.pretrained import record
from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.hub import locate
from pipeline.spec.model import Model
from pipeline.spec.pretrained import SINGLE, open_pretrained
from pipeline.spec.run import Run, RunFile, StepRecord

CONFIG = {"name": "x", "task": "t.py:T", "codec": "c.py:C"}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    (folder / "runs").mkdir(parents=True)
    (folder / "pipe.yaml").write_text("name: other\n")
    return folder


@pytest.fixture
def root(tmp_path: Path, other: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


def walked(project: Path, second: int, verdict: str = "pass", **statuses: str) -> Run:
    run = Run(project / "runs" / f"20260131-2359{second:02d}-0a1b")
    (run.output("prepare") / "files").mkdir(parents=True)
    (run.output("prepare") / "files" / "config.json").write_text('{"model_type": "llama"}')
    for step in ("train", "evaluate"):
        run.output(step).mkdir()
    weights = f"of {run.id}".encode()
    (run.output("train") / SINGLE).write_bytes(weights)
    (run.output("evaluate") / "verdict.json").write_text(json.dumps({"verdict": verdict}))
    known: dict[str, Any] = {"prepare": "done", "train": "done", "evaluate": "done", **statuses}
    outputs = {"train": {SINGLE: digest_bytes(weights)}}
    steps = {
        step: StepRecord(step=step, status=status, key="k", parts={}, outputs=outputs.get(step, {}))
        for step, status in known.items()
        if status
    }
    body = RunFile(
        id=run.id, created="2026-01-31T23:59:00", wanted=("train",), config=CONFIG, environment={}, steps=steps
    )
    (run.path / "run.json").write_text(body.model_dump_json())
    return run


def found(root: Path, **taken: str) -> Path:
    return locate(Model(pretrained="../other"), root, **taken).resolve()


def test_the_newest_run_that_is_trained_and_passed_is_taken(root: Path, other: Path) -> None:
    walked(other, 1)
    good = walked(other, 2)
    walked(other, 3, verdict="forced")
    walked(other, 4, verdict="fail", evaluate="rejected")
    walked(other, 5, train="running", evaluate="")
    assert found(root) == good.path
    better = walked(other, 6, verdict="no-baseline")
    assert found(root) == better.path


def test_training_takes_the_run_that_prepare_took_though_a_newer_one_is_there(root: Path, other: Path) -> None:
    first, newer = walked(other, 1), walked(other, 2)
    assert found(root, run=first.id) == first.path
    assert found(root, run="20250101-000000-gone") == newer.path, "its digests tell whether it is as good"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "a project without runs, so there are no weights to begin with"),
        ({"train": "interrupted", "evaluate": ""}, "(the newest, 20260131-235901-0a1b: train interrupted)"),
        ({"evaluate": ""}, "(the newest, 20260131-235901-0a1b: evaluate never run)"),
        ({"verdict": "forced"}, "none of its 1 runs is trained and passed its gate"),
    ],
)
def test_without_such_a_run_it_says_how_to_make_one(
    root: Path, other: Path, state: dict[str, str] | None, said: str
) -> None:
    if state is not None:
        walked(other, 1, **state)
    with pytest.raises(ConfigError) as caught:
        found(root)
    assert said in str(caught.value)
    assert str(caught.value).endswith("; first `cd ../other && pipe run all`")


def test_a_verdict_that_is_gone_is_no_passed_one(root: Path, other: Path) -> None:
    run = walked(other, 1)
    (run.output("evaluate") / "verdict.json").unlink()
    with pytest.raises(DataError, match=r"verdict.json: damaged or gone"):
        found(root)


def test_prepare_records_the_run_and_refuses_weights_that_are_not_those_it_trained(root: Path, other: Path) -> None:
    run = walked(other, 1)
    record(open_pretrained(found(root)), root)
    told = json.loads((root / "pretrained.json").read_text())
    assert told["run"] == run.id
    assert told["files"][SINGLE]["sha256"] == run.read().steps["train"].outputs[SINGLE]
    (run.output("train") / SINGLE).write_bytes(b"others")
    with pytest.raises(DataError, match=rf"{SINGLE}: changed since it was trained; `pipe verify {run.id}`"):
        record(open_pretrained(found(root)), root)
