from __future__ import annotations

from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from pipeline.project import Project
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError, StageError
from pipeline.tune.record import folder_of, identity, name_of, read_study, write_study
from pipeline.tune.study import Ending, Study
from pipeline.tune.worker import describe, hopeless, work

from .conftest import MakeConfig


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


def test_refused_trials_are_told_and_counted(project: Project, make_config: MakeConfig) -> None:
    config = make_config({"train.sync": {"choices": ["diloco"]}, "train.precision": {"choices": ["fp16"]}}, trials=4)
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
