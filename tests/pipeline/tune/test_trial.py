from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError, Pruned, StageError
from pipeline.contract.run import Run
from pipeline.display import Display
from pipeline.history import Project, load_history
from pipeline.runner import RunRequest, latest_unfinished, run_pipeline
from pipeline.tune.record import folder_of, identity, name_of, read_study, write_study
from pipeline.tune.study import Ending, Study
from pipeline.tune.trial import Curve, Watch, describe, hopeless, run_trial, work

from .conftest import MakeConfig, open_study


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def line(epoch: int, value: float | None) -> str:
    found = {"loss": 0.5} if value is None else {"loss": 0.5, "accuracy": value}
    return json.dumps({"step": 10 * epoch + 10, "epoch": epoch, "validation": found}) + "\n"


def test_each_epochs_value_is_read_once_as_the_file_grows(path: Path) -> None:
    curve = Curve("accuracy")
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


def test_a_file_that_a_resumed_training_wrote_anew_is_read_from_its_start(path: Path) -> None:
    curve = Curve("accuracy")
    path.write_text(line(0, 0.5) + line(1, 0.75))
    assert len(list(curve.read(path))) == 2
    anew = path.with_name("anew")
    anew.write_text(line(0, 0.5) + line(1, 0.75) + line(2, 0.875))
    os.replace(anew, path)
    assert list(curve.read(path)) == [(3, 0.875)]


def test_a_metric_that_is_not_there_is_no_number(path: Path) -> None:
    path.write_text(line(0, None))
    assert list(Curve("accuracy").read(path)) == [(1, None)]


ORDER = RunRequest((), study="abc")


def prepared(project: Project, config: Config) -> None:
    run_pipeline(project, config, RunRequest(("prepare",), study="abc"), Display(live=False))


def tried(study: Study, project: Project, config: Config) -> tuple[Ending, Run | None]:
    claim = study.claim()
    assert claim is not None
    ending, run = run_trial(claim, project, config, ORDER)
    study.tell(claim, ending)
    return ending, run


def validation(epoch: int, **values: float) -> str:
    return json.dumps({"step": 1, "epoch": epoch, "validation": values}) + "\n"


@pytest.mark.long
def test_a_trial_that_others_leave_behind_is_ended_early_and_its_run_states_it(
    tmp_path: Path, project: Project, make_config: MakeConfig
) -> None:
    """The second epoch, steps 5 to 8, is held: training is ended while it is under way."""
    config = make_config({"train.lr": {"choices": [0.02]}}, trials=2)
    study = open_study(tmp_path / "abc", config)
    good = study.claim()
    assert good is not None
    good.trial.report(2.0, 1)  # better than any accuracy
    study.tell(good, Ending("done", 2.0))
    (project.root / "hold").write_text("5")
    prepared(project, config)
    ending, run = tried(study, project, config)
    assert run is not None
    assert ending == Ending("pruned", reason="after epoch 1")
    assert run.read().steps["train"].status == "pruned"
    assert list(study.trials[1].intermediate_values) == [1]
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if run.id in " ".join(p.info["cmdline"] or [])] == []
    with pytest.raises(ConfigError, match="nothing to resume"):
        latest_unfinished(project)


def test_a_trial_is_an_ordinary_run_whose_same_settings_are_not_trained_again(
    tmp_path: Path, project: Project, make_config: MakeConfig
) -> None:
    config = make_config({"train.lr": {"choices": [0.02]}}, trials=2)
    study = open_study(tmp_path / "abc", config)
    (first, run), (second, again) = tried(study, project, config), tried(study, project, config)
    assert run is not None and again is not None
    summary = json.loads((run.output("train") / "summary.json").read_text())
    assert first == second == Ending("done", summary["best_validation"]["accuracy"])
    assert again.read().steps["train"].reused_from == run.id
    assert [sorted(trial.intermediate_values) for trial in study.trials] == [[1, 2], [1, 2]]
    assert [(body.study, body.trial) for _, body in load_history(project.runs)] == [("abc", 1), ("abc", 0)]


@pytest.mark.parametrize(
    ("space", "ending"),
    [
        ({"train.tensor_parallel": {"choices": [2]}, "train.processes": {"choices": [1]}}, ("failed", True)),
        ({"train.strategy": {"choices": ["diloco"]}, "train.precision": {"choices": ["fp16"]}}, ("refused", False)),
    ],
)
def test_settings_that_cannot_be_trained_end_the_trial_with_the_reason(
    tmp_path: Path, project: Project, make_config: MakeConfig, space: dict[str, Any], ending: tuple[str, bool]
) -> None:
    config = make_config(space, trials=1)
    found, run = tried(open_study(tmp_path / "abc", config), project, config)
    assert (found.state, found.blamed) == ending
    assert all(key.partition(".")[2] in found.reason for key in space)
    assert (run is None) == (found.state == "refused"), "what is refused makes no run"


def test_a_metric_that_training_does_not_show_ends_the_trial(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    (tmp_path / "metrics.jsonl").write_text(validation(0, loss=1.0))
    with pytest.raises(Pruned, match="no finite `accurracy`"):
        Watch(claim.trial, "accurracy").report_epochs(tmp_path)
    study.tell(claim, Ending("pruned"))


def test_what_an_earlier_worker_reported_is_not_reported_again(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    claim.trial.report(0.5, 1)
    (tmp_path / "metrics.jsonl").write_text(validation(0, accuracy=0.5) + validation(1, accuracy=0.75))
    watch = Watch(claim.trial, "accuracy")
    assert watch.report_epochs(tmp_path)
    assert not watch.report_epochs(tmp_path)
    assert study.trials[0].intermediate_values == {1: 0.5, 2: 0.75}
    study.tell(claim, Ending("pruned"))


def trial(state: str, **epochs: float) -> FrozenTrial:
    steps = {int(name.removeprefix("e")): value for name, value in epochs.items()}
    return create_trial(state=TrialState.PRUNED, user_attrs={"state": state}, intermediate_values=steps)


def begin(project: Project, config: Config) -> str:
    parts = identity(config, project)
    folder_of(project.runs, name_of(parts)).mkdir(parents=True)
    write_study(folder_of(project.runs, name_of(parts)), config, parts)
    return name_of(parts)


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ([trial("failed")] * 2, False),
        ([trial("failed")] * 3, True),
        ([trial("failed"), trial("pruned"), trial("failed")], True),
        ([*[trial("failed")] * 5, trial("pruned", e1=0.5)], False),
        ([*[trial("refused")] * 5, trial("failed")], False),
    ],
)
def test_a_search_in_which_nothing_was_ever_measured_is_hopeless(trials: list[FrozenTrial], said: bool) -> None:
    assert hopeless(trials) == said


def test_a_task_that_cannot_be_trained_stops_the_search(project: Project, make_config: MakeConfig) -> None:
    task = project.root / "task.py"
    task.write_text("class Sides:\n    pass\n")
    config = make_config()
    name = begin(project, config)
    lines: list[str] = []
    with pytest.raises(
        StageError, match=r"no trial got through its first epoch, 3 were tried; prepare: task\.py:Sides"
    ):
        work(read_study(project.runs, name), project, lambda: config, 1, lines.append)
    assert [line.partition(" (")[0] for line in lines] == [f"trial {number}: failed" for number in range(3)]


def test_refused_trials_are_reported_and_counted(project: Project, make_config: MakeConfig) -> None:
    config = make_config({"train.strategy": {"choices": ["diloco"]}, "train.precision": {"choices": ["fp16"]}}, trials=4)
    lines: list[str] = []
    work(read_study(project.runs, begin(project, config)), project, lambda: config, 1, lines.append)
    assert len(lines) == 4
    assert "does not go with" in lines[0]
    assert list(project.runs.glob("2*")) == [], "no run was made"


def test_a_file_that_changes_under_the_search_stops_it(project: Project, make_config: MakeConfig) -> None:
    config = make_config()
    name = begin(project, config)
    (project.root / "points.py").write_text((project.root / "points.py").read_text() + "\n")
    with pytest.raises(ConfigError, match=rf"points\.py changed while the search went on; .* study {name}"):
        work(read_study(project.runs, name), project, lambda: config, 1, lambda _: None)


def test_the_line_of_a_trial_has_its_settings_as_they_are_typed(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    study.tell(claim, Ending("done", 0.9))
    line = describe(claim, Ending("done", 0.9), None, 3.21, study.best())
    lr = float(f"{claim.values['train.lr']:.4g}")
    settings = f"train.lr={lr} train.batch_size={claim.values['train.batch_size']}"
    assert line == f"trial 0: done 0.9000, the best so far ({settings}; 3.2 s)"
    assert describe(claim, Ending("failed", reason="no"), None, 1, None).endswith("1.0 s): no")
