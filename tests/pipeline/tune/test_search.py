from __future__ import annotations

import pytest

from pipeline.display import Display
from pipeline.history import create_run, write_record
from pipeline.project import Project
from pipeline.runner import Order, Road
from pipeline.spec.config import override_config
from pipeline.spec.errors import ConfigError, StageError
from pipeline.spec.run import StepRecord
from pipeline.spec.runs import all_runs
from pipeline.tune.search import Search, best_run, gpus_of, search
from pipeline.tune.space import as_overrides
from pipeline.tune.study import Ending

from .conftest import MakeConfig

QUIET = Display(live=False)


@pytest.fixture
def order(project: Project, make_config: MakeConfig) -> Search:
    return Search(project.root, project, (), 1, make_config(trials=2))


@pytest.mark.parametrize(
    ("visible", "workers", "shares"),
    [
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("0,1,2", 2, ["0", "1"]),  # as many for each, so that all trials are alike
        ("a,b", 2, ["a", "b"]),
        ("0", 2, [None, None]),
        ("", 2, [None, None]),
        ("0,1", 1, [None]),
    ],
)
def test_workers_get_gpus_of_their_own_where_there_are_enough(
    visible: str, workers: int, shares: list[str | None]
) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible}
    found = [gpus_of(worker, workers, env).get("CUDA_VISIBLE_DEVICES") for worker in range(workers)]
    assert found == shares


def test_without_a_complete_trial_there_is_no_best_run(order: Search) -> None:
    study = order.study()
    for reason in ("diverged", "no memory"):
        claim = study.claim()
        assert claim is not None
        study.tell(claim, Ending("failed", reason=reason))
    with pytest.raises(StageError, match=f"no trial of study {study.name} was completed: diverged; no memory"):
        best_run(order, study, ("prepare",), QUIET)


def test_the_best_trial_is_walked_on_once(order: Search, project: Project) -> None:
    """As if the other machine, or an earlier command, had made its run."""
    study = order.study()
    claim = study.claim()
    assert claim is not None
    study.tell(claim, Ending("done", 0.5))
    config = override_config(order.config, as_overrides(claim.values))
    run = create_run(project.runs, config, ("prepare",), "")
    run.output("prepare").mkdir()
    key = Road(project, config, Order(("prepare",)), []).decide("prepare").key
    write_record(run, StepRecord(step="prepare", status="done", key=key, parts={}))
    assert best_run(order, study, ("prepare",), QUIET).id == run.id
    assert [found.id for found in all_runs(project.runs)] == [run.id]


def test_there_is_nothing_to_look_at_before_the_first_search(order: Search) -> None:
    with pytest.raises(ConfigError, match=r"no study in .* yet; `pipe tune` begins one"):
        order.known_study(QUIET)
    assert not order.project.runs.exists()


def test_a_space_that_is_refused_leaves_nothing_behind(project: Project, make_config: MakeConfig) -> None:
    config = make_config({"train.lr": {"choices": [-1]}})
    with pytest.raises(ConfigError, match="greater than 0"):
        search(Search(project.root, project, (), 1, config), QUIET)
    assert not project.runs.exists()
