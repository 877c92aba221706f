from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.display import Display
from pipeline.history import Project, load_history
from pipeline.resume import latest_unfinished
from pipeline.run import run_pipeline
from pipeline.system.errors import ConfigError, DataError, PipelineError, Pruned, StageError
from pipeline.tune.__main__ import (
    MetricReader,
    TrialMonitor,
    describe_trial,
    nothing_was_measured,
    run_trial,
    run_worker,
)
from pipeline.tune.record import read_study
from pipeline.tune.search import Study, TrialResult
from pipeline.work import RunRequest

from .conftest import MakeConfig, begun, open_study


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def validation(epoch: int, **values: float) -> str:
    return json.dumps({"step": 10 * epoch + 10, "epoch": epoch, "validation": {"loss": 0.5, **values}}) + "\n"


def line(epoch: int, accuracy: float) -> str:
    return validation(epoch, accuracy=accuracy)


def test_each_epoch_is_read_once_as_the_file_grows(path: Path) -> None:
    curve = MetricReader("accuracy")
    assert list(curve.read(path)) == []
    path.write_text('{"step": 5, "epoch": 0, "loss": 1.0}\n' + line(0, 0.5))
    assert list(curve.read(path)) == [(1, 0.5)]
    assert list(curve.read(path)) == []
    with path.open("a") as file:
        file.write(line(1, 0.75) + line(2, 0.875)[:20])
    assert list(curve.read(path)) == [(2, 0.75)], "a half line is not there yet"
    with path.open("a") as file:
        file.write(line(2, 0.875)[20:])
    assert list(curve.read(path)) == [(3, 0.875)]


def test_rewritten_file_is_read_from_the_start(path: Path) -> None:
    curve = MetricReader("accuracy")
    path.write_text(line(0, 0.5) + line(1, 0.75))
    assert len(list(curve.read(path))) == 2
    anew = path.with_name("anew")
    anew.write_text(line(0, 0.5) + line(1, 0.75) + line(2, 0.875))
    os.replace(anew, path)
    assert list(curve.read(path)) == [(3, 0.875)]


def test_missing_metric_is_none(path: Path) -> None:
    path.write_text(validation(0))
    assert list(MetricReader("accuracy").read(path)) == [(1, None)]


REQUEST = RunRequest((), study="abc")


def prepared(project: Project, config: Config) -> None:
    run_pipeline(project, config, RunRequest(("prepare",), study="abc"), Display(live=False))


def run_one(study: Study, project: Project, config: Config) -> tuple[TrialResult, Run | None]:
    claim = study.claim()
    assert claim is not None
    ending, run = run_trial(claim, project, config, REQUEST)
    study.record_result(claim, ending)
    return ending, run


@pytest.mark.long
def test_worse_trial_is_pruned_and_its_run_records_it(
    tmp_path: Path, project: Project, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is blocked in the second epoch, steps 5 to 8, and stopped there."""
    monkeypatch.setattr("pipeline.tune.search.STARTUP_TRIALS", 1)
    config = make_config({"train.lr": {"choices": [0.02]}}, trials=2)
    study = open_study(tmp_path / "abc", config)
    good = study.claim()
    assert good is not None
    good.trial.report(2.0, 1)  # better than any accuracy
    study.record_result(good, TrialResult("done", 2.0))
    (project.root / "hold").write_text("5")
    prepared(project, config)
    ending, run = run_one(study, project, config)
    assert run is not None
    assert ending == TrialResult("pruned", reason="after validation 1")
    assert run.read().steps["train"].status == "pruned"
    assert list(study.trials[1].intermediate_values) == [1]
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if run.id in " ".join(p.info["cmdline"] or [])] == []
    with pytest.raises(ConfigError, match="nothing to resume"):
        latest_unfinished(project)


def test_equal_settings_reuse_the_training(tmp_path: Path, project: Project, make_config: MakeConfig) -> None:
    config = make_config({"train.lr": {"choices": [0.02]}}, trials=2)
    study = open_study(tmp_path / "abc", config)
    (first, run), (second, again) = run_one(study, project, config), run_one(study, project, config)
    assert run is not None and again is not None
    summary = json.loads((run.output("train") / "summary.json").read_text())
    assert first == second == TrialResult("done", summary["best_validation"]["accuracy"])
    assert again.read().steps["train"].reused_from == run.id
    assert [sorted(trial.intermediate_values) for trial in study.trials] == [[1, 2], [1, 2]]
    assert [(body.study, body.trial) for _, body in load_history(project.runs)] == [("abc", 1), ("abc", 0)]


@pytest.mark.parametrize(("error", "caused_by_settings"), [(ConfigError, True), (DataError, True), (StageError, False)])
def test_an_error_of_training_ends_the_trial(
    tmp_path: Path,
    project: Project,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    error: type[PipelineError],
    caused_by_settings: bool,
) -> None:
    def fail(*_: object) -> Run:
        raise error("train: it failed")

    monkeypatch.setattr("pipeline.tune.__main__.run_pipeline", fail)
    found, run = run_one(open_study(tmp_path / "abc", make_config(trials=1)), project, make_config(trials=1))
    assert found == TrialResult("failed", reason="train: it failed", caused_by_settings=caused_by_settings)
    assert run is None


def test_missing_metric_prunes_the_trial(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    (tmp_path / "metrics.jsonl").write_text(validation(0, loss=1.0))
    with pytest.raises(Pruned, match=r"no finite `accurracy` \(it has loss\)"):
        TrialMonitor(claim.trial, "accurracy").report_validations(tmp_path)
    study.record_result(claim, TrialResult("pruned"))


def test_values_of_an_earlier_worker_are_not_reported_again(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    claim.trial.report(0.5, 1)
    (tmp_path / "metrics.jsonl").write_text(validation(0, accuracy=0.5) + validation(1, accuracy=0.75))
    watch = TrialMonitor(claim.trial, "accuracy")
    assert watch.report_validations(tmp_path)
    assert not watch.report_validations(tmp_path)
    assert study.trials[0].intermediate_values == {1: 0.5, 2: 0.75}
    study.record_result(claim, TrialResult("pruned"))


def trial(state: str, **epochs: float) -> FrozenTrial:
    steps = {int(name.removeprefix("e")): value for name, value in epochs.items()}
    return create_trial(state=TrialState.PRUNED, user_attrs={"state": state}, intermediate_values=steps)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([trial("failed")] * 2, False),
        ([trial("failed")] * 3, True),
        ([trial("failed"), trial("pruned"), trial("failed")], True),
        ([*[trial("failed")] * 5, trial("pruned", e1=0.5)], False),
        ([*[trial("refused")] * 5, trial("failed")], False),
    ],
)
def test_search_without_any_measured_epoch_stops(trials: list[FrozenTrial], expected: bool) -> None:
    assert nothing_was_measured(trials) == expected


def test_an_error_that_every_trial_has_stops_the_search(
    project: Project, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Run:
        raise StageError("prepare: the task is broken")

    monkeypatch.setattr("pipeline.tune.__main__.run_pipeline", fail)
    config, lines = make_config(), list[str]()
    study = read_study(project.runs, begun(project, config))
    with pytest.raises(
        StageError, match="no trial reached its first validation in 3 trials: prepare: the task is broken"
    ):
        run_worker(study, project, lambda: config, 1, lines.append)
    assert [line.partition(" (")[0] for line in lines] == [f"trial {number}: failed" for number in range(3)]


def test_refused_trials_are_reported_and_counted(project: Project, make_config: MakeConfig) -> None:
    config = make_config(
        {"train.strategy": {"choices": ["diloco"]}, "train.precision": {"choices": ["fp16"]}}, trials=4
    )
    lines: list[str] = []
    run_worker(read_study(project.runs, begun(project, config)), project, lambda: config, 1, lines.append)
    assert len(lines) == 4
    assert lines[0].startswith("trial 0: refused") and "does not go with" in lines[0]
    assert list(project.runs.glob("2*")) == [], "no run was made"


def test_changed_source_stops_the_search(project: Project, make_config: MakeConfig) -> None:
    config = make_config()
    name = begun(project, config)
    (project.root / "points.py").write_text((project.root / "points.py").read_text() + "x = len('x')\n")
    with pytest.raises(ConfigError, match=rf"points\.py changed during the search; .* study {name}"):
        run_worker(read_study(project.runs, name), project, lambda: config, 1, lambda _: None)


def test_trial_line_shows_settings_as_overrides(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    study.record_result(claim, TrialResult("done", 0.9))
    line = describe_trial(claim, TrialResult("done", 0.9), None, 3.21, study.best())
    lr = float(f"{claim.values['train.lr']:.4g}")
    settings = f"train.lr={lr} train.batch_size={claim.values['train.batch_size']}"
    assert line == f"trial 0: done 0.9000, the best so far ({settings}; 3.2 s)"
    assert describe_trial(claim, TrialResult("failed", reason="no"), None, 1, None).endswith("1.0 s): no")
