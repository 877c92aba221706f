from __future__ import annotations

from typing import Any

import pytest

from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.run import Run
from pipeline.service.cluster_record import (
    Version,
    read_cluster_record,
    record_deployment,
    run_of_version,
    without_canary,
    write_cluster_record,
)

from ..conftest import NewRun


def deployment(bundle: str, **more: Any) -> dict[str, Any]:
    place = {"context": "small", "server": "http://here", "namespace": "models", "target": "kubernetes"}
    return {**place, "bundle": bundle * 64, "image": f"tiny:{bundle}", **more}


def test_what_served_before_stays_known(new_run: NewRun) -> None:
    first, second = new_run(), new_run()
    record_deployment(first, "tiny", deployment("a"))
    found = record_deployment(second, "tiny", deployment("b"))
    assert found == read_cluster_record(first.runs)
    assert found.previous == Version(run=first.id, bundle="a" * 64, image="tiny:a")
    assert found.current.run == second.id
    assert found.versions == [found.current, found.previous]


def test_the_same_bundle_again_is_no_new_version(new_run: NewRun) -> None:
    record_deployment(new_run(), "tiny", deployment("a"))
    record_deployment(new_run(), "tiny", deployment("b"))
    again = new_run()
    found = record_deployment(again, "tiny", deployment("b"))
    assert found.current.run == again.id
    assert found.previous is not None
    assert found.previous.bundle == "a" * 64


def test_same_bundle_in_another_image_is_a_new_version(new_run: NewRun) -> None:
    record_deployment(new_run(), "tiny", deployment("a"))
    found = record_deployment(new_run(), "tiny", {**deployment("a"), "image": "tiny:fixed"})
    assert found.previous is not None
    assert (found.current.image, found.previous.image) == ("tiny:fixed", "tiny:a")


def test_going_back_twice_comes_back(new_run: NewRun) -> None:
    for bundle in "aba":
        found = record_deployment(new_run(), "tiny", deployment(bundle))
    assert found.previous is not None
    assert (found.current.bundle[0], found.previous.bundle[0]) == ("a", "b")


def test_a_canary_replaces_nothing_until_it_is_promoted(new_run: NewRun) -> None:
    record_deployment(new_run(), "tiny", deployment("a"))
    run = new_run()
    found = record_deployment(run, "tiny", deployment("b", canary=10.0))
    assert (found.current.bundle[0], found.previous, found.percent) == ("a", None, 10.0)
    assert found.canary == Version(run=run.id, bundle="b" * 64, image="tiny:b")
    assert without_canary(run.runs, found).canary is None
    promoted = record_deployment(new_run(), "tiny", deployment("b"))
    assert (promoted.current.bundle[0], promoted.canary) == ("b", None)


def test_another_cluster_has_no_way_back_to_this_one(new_run: NewRun) -> None:
    record_deployment(new_run(), "tiny", deployment("a"))
    assert record_deployment(new_run(), "tiny", deployment("b", server="http://there")).previous is None


def test_a_run_that_is_gone_is_named(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=f"run {run.id}, whose bundle aaaaaaaaaaaa is to be served, is not in"):
        run_of_version(run.runs, record_deployment(run, "tiny", deployment("a")).current)


def test_a_damaged_record_is_named(new_run: NewRun) -> None:
    run: Run = new_run()
    write_cluster_record(run.runs, record_deployment(run, "tiny", deployment("a")))
    (run.runs / "cluster.json").write_text("{")
    with pytest.raises(PipelineError, match=r"cluster\.json: damaged"):
        read_cluster_record(run.runs)
