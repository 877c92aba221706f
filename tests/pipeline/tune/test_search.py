from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from pipeline.contract.config import override_config
from pipeline.contract.run import StepRecord, all_runs
from pipeline.display import Display
from pipeline.history import Project, create_run, write_record
from pipeline.system.errors import ConfigError, ResourceError, StageError
from pipeline.tune.record import study_folder
from pipeline.tune.search import (
    SearchRequest,
    Study,
    TrialResult,
    as_overrides,
    assign_gpus,
    run_best_trial,
    run_search,
    search_space,
)
from pipeline.work import RunRequest, Work

from .conftest import MakeConfig, begun

QUIET = Display(live=False)


@pytest.fixture
def request_(project: Project, make_config: MakeConfig) -> SearchRequest:
    return SearchRequest(project.root, project, (), 1, make_config(trials=2))


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
def test_workers_get_separate_gpus_if_there_are_enough(visible: str, workers: int, shares: list[str | None]) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible}
    found = [assign_gpus(worker, workers, env).get("CUDA_VISIBLE_DEVICES") for worker in range(workers)]
    assert found == shares


def recorded_study(request: SearchRequest) -> Study:
    begun(request.project, request.config)
    return request.study()


def test_no_best_run_without_a_finished_trial(request_: SearchRequest) -> None:
    study = recorded_study(request_)
    for reason in ("diverged", "no memory"):
        claim = study.claim()
        assert claim is not None
        study.record_result(claim, TrialResult("failed", reason=reason))
    with pytest.raises(StageError, match=f"no trial of study {study.name} has finished: diverged; no memory"):
        run_best_trial(request_, study, ("prepare",), QUIET)


def test_best_trial_is_run_once(request_: SearchRequest, project: Project) -> None:
    """A run that another machine or an earlier command made is reused."""
    study = recorded_study(request_)
    claim = study.claim()
    assert claim is not None
    study.record_result(claim, TrialResult("done", 0.5))
    config = override_config(request_.config, as_overrides(claim.values))
    run = create_run(project.runs, config, ("prepare",), "")
    run.output("prepare").mkdir()
    key = Work(project, config, RunRequest(("prepare",)), []).decide("prepare").key
    write_record(run, StepRecord(step="prepare", status="done", key=key, parts={}))
    assert run_best_trial(request_, study, ("prepare",), QUIET).id == run.id
    assert [found.id for found in all_runs(project.runs)] == [run.id]


def test_rejected_space_leaves_no_files(project: Project, make_config: MakeConfig) -> None:
    config = make_config({"train.lr": {"choices": [-1]}})
    with pytest.raises(ConfigError, match="greater than 0"):
        run_search(SearchRequest(project.root, project, (), 1, config), QUIET)
    assert not project.runs.exists()


@pytest.mark.usefixtures("without_locks")
def test_search_without_locks_is_refused(request_: SearchRequest) -> None:
    with pytest.raises(ResourceError, match="no locks, without which two workers could train one trial; to fix it"):
        run_search(request_, QUIET)
    assert not study_folder(request_.project.runs, "").exists()
    with pytest.raises(ResourceError, match="no locks, without which"):  # as for `pipe tune status`
        recorded_study(request_)


def test_type_of_a_range_is_that_of_the_setting(make_config: MakeConfig) -> None:
    space = {
        "train.lr": {"low": "1e-4", "high": 1, "log": True},
        "train.batch_size": {"low": 16, "high": 64},
        "train.optimizer": {"choices": ["sgd", "adamw"]},
    }
    assert search_space(make_config(space)) == {
        "train.lr": FloatDistribution(1e-4, 1.0, log=True),
        "train.batch_size": IntDistribution(16, 64),
        "train.optimizer": CategoricalDistribution(("sgd", "adamw")),
    }


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        ({}, "tune.space is empty; to fix it: name settings to search"),
        ({"train.lrr": {"choices": [1]}}, r"unknown setting `train\.lrr`; did you mean `train\.lr`\?"),
        ({"lr": {"choices": [1]}}, r"unknown setting `lr`; did you mean `train\.lr`\?"),
        (
            {"train.lr": {"choices": [0.1, -1]}},
            r"tune\.space: `train\.lr`: input should be greater than 0 \(found -1\)",
        ),
        (
            {"train.warmup_ratio": {"low": 0.5, "high": 1.5}},
            r"`train\.warmup_ratio`: input should be less than or equal to 1",
        ),
        ({"train.epochs": {"low": 1.5, "high": 3}}, r"`train\.epochs`: input should be a valid integer"),
        (
            {"train.optimizer": {"choices": ["sgd", "lion"]}},
            r"`train\.optimizer`: input should be 'adamw', 'sgd' or 'muon'",
        ),
        ({"train.optimizer": {"low": 1, "high": 2}}, r"`train\.optimizer`: input should be 'adamw', 'sgd' or 'muon'"),
        ({"train.rendezvous": {"choices": [True]}}, r"`train\.rendezvous`: input should not be true or false"),
        ({"serve.threads": {"choices": [1, 2]}}, r"tune\.space\.serve\.threads: training does not depend on it"),
        ({"tune.trials": {"choices": [1, 2]}}, r"tune\.space\.tune\.trials: training does not depend on it"),
    ],
)
def test_rejected_settings_and_values_are_reported(
    make_config: MakeConfig, space: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        search_space(make_config(space))


def test_conflicting_values_are_left_to_the_trials(make_config: MakeConfig) -> None:
    """Neither of these goes with the defaults' fp16, but other trials have other precisions."""
    space = {"train.strategy": {"choices": ["ddp", "diloco"]}, "train.precision": {"choices": ["fp32", "fp16"]}}
    config = override_config(make_config(space), ["train.precision=fp16"])
    assert set(search_space(config)) == set(space)


def test_overrides_reproduce_the_values(make_config: MakeConfig) -> None:
    values = {"train.lr": 1.2345678901234567e-05, "train.checkpoints": "no", "train.compile": True, "train.epochs": 3}
    train = override_config(make_config(), as_overrides(values)).train
    assert [train.lr, train.checkpoints, train.compile, train.epochs] == list(values.values())
