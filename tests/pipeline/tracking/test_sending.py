"""What is sent to a tracker, by a tracker that records it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.run import Run, StepRecord
from pipeline.history import Project, write_record, write_run
from pipeline.system.files import write_json
from pipeline.tracking import __main__ as sending
from pipeline.tracking import contents
from pipeline.tracking.__main__ import MLflow, Sender, follow
from pipeline.tracking.contents import Ending, Point, read_ending
from pipeline.tracking.process import state_file
from tests.pipeline.conftest import NewRun


class Recorder(MLflow):
    """A tracker whose next calls may fail."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, str, float]]] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.endings: list[tuple[str, Ending]] = []
        self.params: dict[str, str] = {}
        self.results: dict[str, float] = {}
        self.files: dict[str, Path] = {}
        self.failures: dict[str, int] = {}
        self._id = ""

    def _may_fail(self, call: str) -> None:
        if self.failures.get(call, 0):
            self.failures[call] -= 1
            raise ConnectionError("the server is gone")

    def open(self, run_id: str) -> str:
        self._may_fail("open")
        self._id = run_id or f"run-{len(self.runs) + 1}"
        self.runs.setdefault(self._id, [])
        return self._id

    def describe(self) -> str:
        return self._id

    def set_params(self, params: Mapping[str, str]) -> None:
        self.params = dict(params)

    def log(self, points: Sequence[Point]) -> None:
        self._may_fail("log")
        self.runs[self._id] += [(point.step, name, value) for point in points for name, value in point.values.items()]

    def summarize(self, results: Mapping[str, float], step: int) -> None:
        self.results |= results

    def tag(self, tags: Mapping[str, str]) -> None:
        self._may_fail("tag")
        self.tags[self._id] = {**self.tags.get(self._id, {}), **tags}

    def upload(self, results: Mapping[str, Path], bundle: Mapping[str, Path]) -> None:
        self.files = {**results, **bundle}

    def close(self, ending: Ending) -> None:
        self.endings.append((self._id, ending))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def run(new_run: NewRun) -> Run:
    """A run in training."""
    run = new_run()
    record(run, "prepare")
    record(run, "train", status="running")
    run.partial("train").mkdir()
    return run


def record(run: Run, step: str, **values: Any) -> None:
    write_record(run, StepRecord.model_validate({"step": step, "status": "done", "key": "k", "parts": {}, **values}))


def write_lines(run: Run, *steps: int, first_loss: float = 1.0) -> None:
    """Replace metrics.jsonl, as a resumed training does."""
    lines = [{"step": step, "epoch": 0, "loss": first_loss / step, "total_steps": 9} for step in steps]
    path = run.partial("train") / "metrics.jsonl"
    path.with_suffix(".new").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.with_suffix(".new").rename(path)


def losses(recorder: Recorder, run_id: str = "run-1") -> list[int]:
    return [step for step, name, _ in recorder.runs[run_id] if name == "train/loss"]


@pytest.fixture
def send(run: Run, recorder: Recorder, project: Project) -> Callable[..., None]:
    """Return a function that follows a training, which writes these lines meanwhile."""

    def once(*batches: tuple[int, ...]) -> None:
        written = iter(batches)

        def wait(_: float) -> bool:
            steps = next(written, None)
            if steps is not None:
                write_lines(run, *steps)
            return steps is None

        follow(Sender("mlflow", recorder, run, project.root), "mlflow", wait)

    return once


def test_curves_are_sent_while_training_runs_and_each_step_once(send: Callable[..., None], recorder: Recorder) -> None:
    send((1,), (1, 2, 3), (1, 2), (1, 2, 3, 4))  # killed, and resumed from the checkpoint of step 2
    assert losses(recorder) == [1, 2, 3, 4]
    assert {name for _, name, _ in recorder.runs["run-1"]} == {"train/loss"}
    assert recorder.endings == [("run-1", "killed")]


@pytest.mark.parametrize("accepted", [{}, {"key": "other", "checkpoints_key": "k"}])
def test_resumed_run_continues_its_run_in_the_tracker(
    accepted: dict[str, str], send: Callable[..., None], recorder: Recorder, run: Run
) -> None:
    send((1, 2))
    record(run, "train", status="running", **accepted)
    send((1, 2, 3))
    assert losses(recorder) == [1, 2, 3]
    record(run, "train", **accepted)
    run.partial("train").rename(run.output("train"))
    send()
    assert recorder.endings[-1] == ("run-1", "finished")


def test_training_from_the_start_gets_another_run(send: Callable[..., None], recorder: Recorder, run: Run) -> None:
    send((1, 2))
    record(run, "train", status="running", key="other")
    send((1, 2, 3))
    assert losses(recorder) == [1, 2]
    assert "replaced" in recorder.tags["run-1"]
    assert losses(recorder, "run-2") == [1, 2, 3]


@pytest.mark.parametrize("call", ["open", "log", "tag"])
def test_failing_tracker_is_reported_once_and_misses_nothing(
    call: str,
    send: Callable[..., None],
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sending, "_RETRY_SECONDS", 0.0)
    recorder.failures = {call: 2}
    send((1,), (1, 2), (1, 2, 3))
    output = capsys.readouterr().out
    assert output.count("warning: mlflow: ConnectionError: the server is gone") == 1
    assert "mlflow: has received everything again" in output
    assert losses(recorder) == [1, 2, 3]
    assert recorder.tags["run-1"]["step.train"] == "running"


def test_unavailable_tracker_raises_no_error(
    run: Run, recorder: Recorder, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.failures = {"open": 9}
    answers = iter([False, False, True])
    assert follow(Sender("mlflow", recorder, run, project.root), "mlflow", lambda _: next(answers)) == 1
    assert recorder.failures == {"open": 7}, "not tried again at once, and once more at the end"
    assert not state_file(run, "mlflow").exists()


def test_reused_training_is_not_logged_again(send: Callable[..., None], recorder: Recorder, run: Run) -> None:
    record(run, "train", reused_from="20260101-000000-abcd")
    write_lines(run, 1, 2)
    run.partial("train").rename(run.output("train"))
    write_json(run.output("train") / "summary.json", {"seconds": 3.0, "best_validation": {"loss": 0.5}})
    send()
    assert recorder.runs == {"run-1": []}
    assert recorder.tags["run-1"]["step.train"] == "done, reused from 20260101-000000-abcd"
    assert recorder.results == {"best/loss": 0.5}


def test_settings_are_params_and_the_trial_is_a_tag(send: Callable[..., None], recorder: Recorder, run: Run) -> None:
    write_run(run, run.read().model_copy(update={"study": "abc", "trial": 0}))
    send()
    assert (recorder.tags["run-1"]["study"], recorder.tags["run-1"]["trial"]) == ("abc", "0")
    assert recorder.params["train.lr"] == "0.001"
    assert recorder.params["evaluate.require"] == "{}"
    assert not [name for name in recorder.params if name.startswith(("deploy.", "cluster.", "serve."))]


def test_large_model_is_linked(
    send: Callable[..., None], recorder: Recorder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = run.output("export") / "bundle"
    bundle.mkdir(parents=True)
    write_json(bundle / "manifest.json", {})
    (bundle / "model.onnx").write_bytes(b"model")
    monkeypatch.setattr(contents, "MAX_UPLOAD_BYTES", 4)
    send()
    assert recorder.tags["run-1"]["model.path"] == str(bundle / "model.onnx")
    assert "report.html" in recorder.files
    assert not contents.is_uploaded(recorder.files["export/bundle/model.onnx"])


ENDINGS: list[tuple[dict[str, str], Ending]] = [
    ({"prepare": "done", "train": "done"}, "finished"),
    ({"prepare": "done", "train": "rejected"}, "finished"),
    ({"prepare": "done", "train": "failed"}, "failed"),
    ({"prepare": "done", "train": "interrupted"}, "killed"),
    ({"prepare": "done", "train": "running"}, "killed"),
    ({"prepare": "done"}, "unfinished"),
]


@pytest.mark.parametrize(("statuses", "ending"), ENDINGS)
def test_ending_is_that_of_the_steps(statuses: dict[str, str], ending: Ending, new_run: NewRun) -> None:
    run = new_run()
    for step, status in statuses.items():
        record(run, step, status=status)
    assert read_ending(run.read()) == ending
