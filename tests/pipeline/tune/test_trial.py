from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.display import Display
from pipeline.history import load_history
from pipeline.project import Project
from pipeline.runner import Order, latest_unfinished, run_road
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError, Pruned
from pipeline.spec.run import Run
from pipeline.tune.study import Ending, Study
from pipeline.tune.trial import Watch, run_trial

from .conftest import MakeConfig, open_study

ORDER = Order((), study="abc")


def prepared(project: Project, config: Config) -> None:
    run_road(project, config, Order(("prepare",), study="abc"), Display(live=False))


def tried(study: Study, project: Project, config: Config) -> tuple[Ending, Run | None]:
    claim = study.claim()
    assert claim is not None
    ending, run = run_trial(claim, project, config, ORDER)
    study.tell(claim, ending)
    return ending, run


def validation(epoch: int, **values: float) -> str:
    return json.dumps({"step": 1, "epoch": epoch, "validation": values}) + "\n"


@pytest.mark.long
def test_a_trial_that_others_leave_behind_is_ended_early_and_its_run_says_so(
    tmp_path: Path, project: Project, make_config: MakeConfig
) -> None:
    """The second epoch, steps 5 to 8, is held: training is ended while it is under way."""
    config = make_config({"train.lr": {"choices": [0.02]}}, trials=2, startup_trials=1)
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
        ({"train.tensor": {"choices": [2]}, "train.processes": {"choices": [1]}}, ("failed", True)),
        ({"train.sync": {"choices": ["diloco"]}, "train.precision": {"choices": ["fp16"]}}, ("refused", False)),
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


def test_a_metric_that_training_does_not_tell_ends_the_trial(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    (tmp_path / "metrics.jsonl").write_text(validation(0, loss=1.0))
    with pytest.raises(Pruned, match="no finite `accurracy`"):
        Watch(claim.trial, "accurracy").report(tmp_path)
    study.tell(claim, Ending("pruned"))


def test_what_an_earlier_worker_reported_is_not_reported_again(tmp_path: Path, study: Study) -> None:
    claim = study.claim()
    assert claim is not None
    claim.trial.report(0.5, 1)
    (tmp_path / "metrics.jsonl").write_text(validation(0, accuracy=0.5) + validation(1, accuracy=0.75))
    watch = Watch(claim.trial, "accuracy")
    assert watch.report(tmp_path)
    assert not watch.report(tmp_path)
    assert study.trials[0].intermediate_values == {1: 0.5, 2: 0.75}
    study.tell(claim, Ending("pruned"))
