from __future__ import annotations

from typing import Any

import pytest

from k8s.cluster.drift import DeploymentState
from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Run
from pipeline.service.cluster_record import (
    VERSIONS_KEPT,
    ClusterRecord,
    ClusterStatus,
    Version,
    begin_deployment,
    describe_clusters,
    end_failed_restore,
    read_cluster_records,
    record_deployment,
    run_of_version,
    select_record,
    step_back,
    without_canary,
)
from pipeline.system.errors import BundleError, ConfigError, PipelineError
from pipeline.system.files import write_json

from ..conftest import NewRun
from ..packing import MakeRun


def deployment(bundle: str, **more: Any) -> dict[str, Any]:
    place = {"context": "small", "server": "http://here", "namespace": "models", "target": "kubernetes"}
    return {**place, "bundle": bundle * 64, "image": f"tiny:{bundle}", **more}


def bundles(record: ClusterRecord) -> str:
    return "".join(version.bundle[0] for version in record.versions)


def test_previous_version_is_recorded(new_run: NewRun) -> None:
    first, second = new_run(), new_run()
    record_deployment(first, "tiny", deployment("a"))
    found = record_deployment(second, "tiny", deployment("b"))
    assert read_cluster_records(first.runs) == [found]
    assert found.previous is not None
    assert (found.previous.run, found.previous.bundle, found.previous.image) == (first.id, "a" * 64, "tiny:a")
    assert found.current.run == second.id
    assert found.needed_runs() == {first.id, second.id}


@pytest.mark.parametrize(
    ("deployed", "versions"),
    [
        (["a", "b", "b"], "ab"),  # the same bundle again
        (["a", "a of another image"], "aa"),
        (["a", "b", "a"], "aba"),  # a deployed before
    ],
)
def test_another_bundle_or_image_is_a_new_version(new_run: NewRun, deployed: list[str], versions: str) -> None:
    for bundle in deployed:
        run = new_run()
        found = record_deployment(run, "tiny", {**deployment(bundle[0]), "image": f"tiny:{bundle}"})
    assert (bundles(found), found.current.run) == (versions, run.id)


def test_a_canary_replaces_nothing_until_it_is_promoted(new_run: NewRun) -> None:
    stable, run = new_run(), new_run()
    record_deployment(stable, "tiny", deployment("a"))
    found = record_deployment(run, "tiny", deployment("b", canary=10.0))
    assert (found.current.bundle[0], found.previous, found.percent) == ("a", None, 10.0)
    assert found.canary is not None
    assert (found.canary.run, found.canary.bundle, found.canary.image) == (run.id, "b" * 64, "tiny:b")
    assert found.needed_runs() == {stable.id, run.id}
    assert without_canary(run.runs, found).canary is None
    promoted = record_deployment(new_run(), "tiny", deployment("b"))
    assert (promoted.current.bundle[0], promoted.canary) == ("b", None)


def test_a_record_of_an_older_version_is_read(new_run: NewRun) -> None:
    record = record_deployment(run := new_run(), "tiny", deployment("a"))
    write_json(run.runs / "cluster.json", [{**record.model_dump(), "canary_in_place": True}])
    assert [found.versions for found in read_cluster_records(run.runs)] == [record.versions]


def test_each_cluster_and_namespace_has_its_own_history(new_run: NewRun) -> None:
    for bundle, namespace in (("a", "staging"), ("a", "production"), ("b", "staging"), ("c", "staging")):
        record_deployment(new_run(), "tiny", deployment(bundle, namespace=namespace))
    record_deployment(new_run(), "other", deployment("z", namespace="staging"))
    run = new_run()
    record_deployment(run, "tiny", deployment("b", namespace="production"))
    record_deployment(run, "tiny", deployment("d", server="http://there", namespace="production"))
    found = {(item.name, item.server, item.namespace): bundles(item) for item in read_cluster_records(run.runs)}
    assert found == {
        ("tiny", "http://here", "staging"): "abc",
        ("tiny", "http://here", "production"): "ab",
        ("tiny", "http://there", "production"): "d",
        ("other", "http://here", "staging"): "z",
    }


def test_only_the_newest_versions_are_kept(new_run: NewRun) -> None:
    run = new_run()
    for number in range(VERSIONS_KEPT + 3):
        found = record_deployment(run, "tiny", deployment("a", image=f"tiny:{number}"))
    assert found.versions[0].image == "tiny:3"
    assert len(found.versions) == VERSIONS_KEPT


def test_restored_version_adds_none_to_the_history(new_run: NewRun) -> None:
    run = new_run()
    for bundle in "abc":
        record = record_deployment(run, "tiny", deployment(bundle))
    record = step_back(run.runs, record)
    assert (bundles(record), record.unfinished) == ("ab", run.id), "interrupted here, it is repeated"
    record = record_deployment(new_run(), "tiny", deployment("b"))
    assert (bundles(record), record.unfinished) == ("ab", "")


def test_failed_deployment_is_recorded_until_a_rollback_begins(new_run: NewRun, config: Config) -> None:
    run = new_run()
    record_deployment(new_run(), "tiny", deployment("a"))
    begin_deployment(run, override_config(config, ["deploy.namespace=elsewhere"]), "http://here")
    (record,) = read_cluster_records(run.runs)
    assert record.unfinished == ""
    begin_deployment(run, override_config(config, ["deploy.namespace=models"]), "http://here")
    (failed,) = read_cluster_records(run.runs)
    assert (failed.unfinished, bundles(failed)) == (run.id, "a")
    end_failed_restore(run.runs, failed)
    assert read_cluster_records(run.runs) == [failed], "nothing was applied"
    end_failed_restore(run.runs, record)
    assert read_cluster_records(run.runs) == [record]


def test_status_shows_all_places_and_how_to_roll_back_each(new_run: NewRun) -> None:
    run = new_run()
    for bundle in "abc":
        staging = record_deployment(run, "tiny", deployment(bundle, namespace="staging"))
    production = record_deployment(run, "tiny", deployment("a", namespace="production"))
    clusters = [ClusterStatus(staging, DeploymentState("up")), ClusterStatus(production, DeploymentState("gone"))]
    rollback = "`pipe registry rollback --context small --namespace staging`"
    serves = "tiny serves bundle {} of run {} since {}"
    up = serves.format("c" * 12, run.id, staging.current.since)
    gone = serves.format("a" * 12, run.id, production.current.since)
    assert describe_clusters(clusters) == [
        f"cluster small (http://here), namespace staging: {up}: up",
        f"{rollback} restores bundle bbbbbbbbbbbb of run {run.id}",
        f"before it: bundle aaaaaaaaaaaa of run {run.id}",
        f"cluster small (http://here), namespace production: {gone}: gone",
    ]
    assert clusters[0].facts()["previous"]["bundle"] == "b" * 64
    assert clusters[1].facts()["previous"] is None
    with pytest.raises(
        ConfigError, match=r"at 2 places; .* --namespace staging \(http://here\), or --context small --n"
    ):
        select_record([staging, production])
    assert select_record([production]) is production


def test_a_run_that_is_gone_is_named(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match=f"run {run.id}, whose bundle aaaaaaaaaaaa is to be served, is not in"):
        run_of_version(run.runs, record_deployment(run, "tiny", deployment("a")).current)


def test_a_run_whose_bundle_was_changed_is_not_served_again(make_run: MakeRun) -> None:
    run = make_run()
    assert run_of_version(run.runs, Version(run=run.id, bundle=run.bundle().digest, image="")).id == run.id
    with pytest.raises(BundleError, match="but the one that was deployed is bbbbbbbbbbbb"):
        run_of_version(run.runs, Version(run=run.id, bundle="b" * 64, image=""))


def test_a_damaged_record_is_named(new_run: NewRun) -> None:
    run: Run = new_run()
    record_deployment(run, "tiny", deployment("a"))
    (run.runs / "cluster.json").write_text("{")
    with pytest.raises(PipelineError, match=r"cluster\.json: damaged: .*; to fix it: move it away, `pipe deploy`"):
        read_cluster_records(run.runs)


def test_a_record_of_a_newer_version_is_not_called_damaged(new_run: NewRun) -> None:
    run: Run = new_run()
    record = record_deployment(run, "tiny", deployment("a"))
    write_json(run.runs / "cluster.json", [record.model_dump() | {"shiny": 1}])
    with pytest.raises(
        PipelineError, match=r"newer version of pipe \(0\.shiny is unknown here\); to fix it: pip install"
    ):
        read_cluster_records(run.runs)
