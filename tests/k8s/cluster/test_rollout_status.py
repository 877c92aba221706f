from __future__ import annotations

from typing import Any

import pytest

from k8s.cluster.rollout_status import judge, pod_troubles


def deployment(wanted: int, **status: Any) -> dict[str, Any]:
    return {
        "kind": "Deployment",
        "metadata": {"name": "d", "generation": 2},
        "spec": {"replicas": wanted},
        "status": {"observedGeneration": 2} | status,
    }


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}, "controller"),
        ({"replicas": 2, "updatedReplicas": 1, "availableReplicas": 2}, "1 of 2 replicas updated"),
        ({"replicas": 3, "updatedReplicas": 2, "availableReplicas": 3}, "1 old replicas still end"),
        ({"replicas": 2, "updatedReplicas": 2, "availableReplicas": 1}, "1 of 2 updated replicas available"),
        ({}, "0 of 2 replicas updated"),
    ],
)
def test_an_unfinished_roll_out_is_not_done(status: dict[str, Any], text: str) -> None:
    progress = judge(deployment(2, **status))
    assert not progress.done
    assert text in progress.text


def test_a_roll_out_is_done_when_only_new_replicas_are_left_and_available() -> None:
    assert judge(deployment(2, replicas=2, updatedReplicas=2, availableReplicas=2)).done


def test_a_quota_that_forbids_pods_is_named() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    assert "exceeded quota" in judge(deployment(1, conditions=[failure])).text


def service(generation: int, conditions: list[dict[str, str]], **status: Any) -> dict[str, Any]:
    metadata = {"name": "s", "generation": generation}
    return {"kind": "InferenceService", "metadata": metadata, "status": {"conditions": conditions, **status}}


READY = {"type": "Ready", "status": "True"}


def test_a_ready_condition_of_an_older_version_counts_for_nothing() -> None:
    assert not judge(service(2, [READY], observedGeneration=1)).done
    assert judge(service(2, [READY], observedGeneration=2)).done


def test_a_kserve_that_writes_no_observed_generation_is_believed() -> None:
    assert judge(service(2, [READY])).done


def test_a_service_that_is_not_ready_names_its_conditions() -> None:
    broken = {"type": "PredictorReady", "status": "False", "reason": "MinimumReplicasUnavailable"}
    assert judge(service(1, [broken])).text == "PredictorReady: MinimumReplicasUnavailable"


def test_a_pod_that_merely_starts_is_no_trouble() -> None:
    starting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    assert pod_troubles([{"metadata": {"name": "p"}, "status": {"containerStatuses": [starting]}}]) == []


def test_an_evicted_pod_is_named() -> None:
    status = {"phase": "Failed", "reason": "Evicted", "message": "node low on memory"}
    assert pod_troubles([{"metadata": {"name": "p"}, "status": status}]) == ["p: Evicted: node low on memory"]
