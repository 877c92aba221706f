"""The metric of a canary and of the stable version, on the labels that came since a time."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from k8s.cluster.history import Version
from pipeline.contract.canary import LabelMetric, RequestCounts, compare_versions
from pipeline.contract.config import Config, parse_config
from pipeline.contract.run import Run
from pipeline.contract.samples import SampleFolder
from pipeline.contract.settings.cluster import Rollout
from pipeline.monitor.canary import label_reader

from .conftest import Live, add_run

REQUESTS = RequestCounts(10_000)


def version(run: Run, number: int) -> Version:
    facts = {"state": "served", "image": "i", "by": "me", "since": "", "objects": ()}
    return Version.model_validate({"number": number, "run": run.id, "bundle": run.bundle().digest, **facts})


def settings(live: Live, **sections: Any) -> Config:
    values = {"name": "greater", "task": "task.py:Greater", "codec": "codec.py:Codec"}
    serve = {"sample": 1, "sample_to": f"file://{live.root / 'live'}"}
    return parse_config({**values, "serve": serve, **sections}, "test")


def compare(
    live: Live, canary: Run, since: float = 1.0, reports: list[str] | None = None, **sections: Any
) -> LabelMetric | str:
    report = (reports if reports is not None else []).append
    read = label_reader(live.root, live.run.runs, settings(live, **sections), report)
    return read(version(live.run, 1), version(canary, 2), since)


@pytest.fixture
def canary(live: Live) -> Run:
    return add_run(live, "wrong")


def send(live: Live, canary: Run, count: int, wrong: float) -> None:
    """Let both versions answer in turns; `wrong` is the share of the canary's errors."""
    for run, share in ((live.run, 0.05), (canary, wrong)):
        samples = live.samples(live.normal(count), bundle=run.bundle().digest)
        live.write(samples, live.labels(samples, share))


@pytest.mark.parametrize(("wrong", "outcome"), [(0.05, "promote"), (0.4, "roll back")])
def test_worse_labels_end_a_canary(live: Live, canary: Run, wrong: float, outcome: str) -> None:
    send(live, canary, 400, wrong)
    metric = compare(live, canary)
    assert isinstance(metric, LabelMetric)
    assert (metric.name, metric.lower, metric.stable.labels, metric.canary.labels) == ("accuracy", False, 400, 400)
    assert metric.canary.low < 1 - wrong < metric.canary.high
    result = compare_versions(REQUESTS, REQUESTS, Rollout(), metric)
    assert result.outcome == outcome, result
    assert "accuracy: " in result.text
    assert not (live.run.runs / "monitor").exists()


def test_margin_is_that_for_a_champion(live: Live, canary: Run) -> None:
    live.write(live.samples(live.normal(1)))
    metric = compare(live, canary, evaluate={"champion_margin": 0.2})
    assert isinstance(metric, LabelMetric)
    assert metric.margin == 0.2
    assert (metric.stable.labels, metric.canary.low, metric.canary.high) == (0, 0.0, 1.0)


def test_only_samples_since_the_observation_count(live: Live, canary: Run) -> None:
    send(live, canary, 300, 0.9)
    began = live.clock + 0.5
    send(live, canary, 100, 0.05)
    metric = compare(live, canary, since=began)
    assert isinstance(metric, LabelMetric)
    assert (metric.stable.labels, metric.canary.labels) == (100, 100)
    assert metric.canary.mean > 0.85


def test_files_written_before_a_time_are_not_listed(live: Live) -> None:
    live.write(live.samples(live.normal(2)))
    time.sleep(0.01)
    began = time.time()
    assert live.folder.sizes("samples", began) == {}
    live.write(live.samples(live.normal(2)))
    assert len(live.folder.sizes("samples")) == 2
    assert list(live.folder.sizes("samples", began)) == list(live.folder.sizes("samples"))[1:]


def unreadable(self: SampleFolder, kind: str, since: float = 0.0) -> dict[str, int]:
    raise PermissionError("denied")


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"serve": {"sample": 0}}, "serve.sample is not set"),
        ({"serve": {"sample": 1, "sample_to": ""}}, "serve.sample_to is not set"),
        (
            {"monitor": {"metric": "margin"}},
            "margin of run .* has no confidence sequence, as its values have no bounds",
        ),
        ({"monitor": {"metric": "f2"}}, "has no f2; it has accuracy"),
        ({}, "live has no samples of this observation"),
        ({"serve": {"sample": 1, "sample_to": "nowhere://x"}}, "serve.sample_to=nowhere://x: Protocol not known"),
    ],
)
def test_what_cannot_be_compared_is_reported(live: Live, canary: Run, sections: dict[str, Any], problem: str) -> None:
    reports: list[str] = []
    found = compare(live, canary, reports=reports, **sections)
    assert isinstance(found, str)
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(found)
    assert reports == [f"canary: labels are not compared: {found}"]


def test_a_problem_is_reported_once(live: Live, canary: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleFolder, "sizes", unreadable)
    reports: list[str] = []
    read = label_reader(live.root, live.run.runs, settings(live), reports.append)
    assert [read(version(live.run, 1), version(canary, 2), 1.0) for _ in range(3)] == ["denied"] * 3
    assert reports == ["canary: labels are not compared: denied"]
    assert read(None, version(canary, 2), 1.0) == "what serves was not deployed by pipe"


def test_run_of_the_stable_version_may_be_elsewhere(live: Live, canary: Run) -> None:
    stable = version(live.run, 1)
    shutil.rmtree(live.run.path)
    read = label_reader(live.root, live.run.runs, settings(live), print)
    assert read(stable, version(canary, 2), 1.0) == f"run {live.run.id} is not on this machine"


def test_error_of_the_task_does_not_end_the_comparison_of_requests(
    live: Live, canary: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("pipeline.monitor.look.open_task", fail)
    found = compare(live, canary)
    assert found == "division by zero"
    assert compare_versions(REQUESTS, REQUESTS, Rollout(), found).outcome == "promote"
    result = compare_versions(REQUESTS, REQUESTS, Rollout(min_labels=10), found)
    assert result.outcome == "inconclusive"
    assert "no labels, as division by zero" in result.text


def test_run_without_predictions_has_no_metric_to_compare(live: Live, canary: Run) -> None:
    (canary.output("evaluate") / "predictions.npz").unlink()
    found = compare(live, canary)
    assert found == f"accuracy of run {canary.id} has no confidence sequence, as its evaluation has no predictions"
