from __future__ import annotations

from typing import Any

import pytest

from k8s.cluster.rollout_status import pod_problems, rollout_progress


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
        ({"replicas": 3, "updatedReplicas": 2, "availableReplicas": 3}, "1 old replicas still terminate"),
        ({"replicas": 2, "updatedReplicas": 2, "availableReplicas": 1}, "1 of 2 updated replicas available"),
        ({}, "0 of 2 replicas updated"),
    ],
)
def test_an_unfinished_roll_out_is_not_done(status: dict[str, Any], text: str) -> None:
    progress = rollout_progress(deployment(2, **status))
    assert not progress.done
    assert text in progress.text


def test_a_roll_out_is_done_when_only_new_replicas_are_left_and_available() -> None:
    assert rollout_progress(deployment(2, replicas=2, updatedReplicas=2, availableReplicas=2)).done


def test_an_exceeded_quota_is_reported() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
    assert "exceeded quota" in rollout_progress(deployment(1, conditions=[failure])).text


def service(generation: int, conditions: list[dict[str, str]], **status: Any) -> dict[str, Any]:
    metadata = {"name": "s", "generation": generation}
    return {"kind": "InferenceService", "metadata": metadata, "status": {"conditions": conditions, **status}}


READY = {"type": "Ready", "status": "True"}


def test_a_ready_condition_of_an_older_version_is_ignored() -> None:
    assert not rollout_progress(service(2, [READY], observedGeneration=1)).done
    assert rollout_progress(service(2, [READY], observedGeneration=2)).done


def test_a_missing_observed_generation_of_kserve_is_accepted() -> None:
    assert rollout_progress(service(2, [READY])).done


def test_a_service_that_is_not_ready_names_its_conditions() -> None:
    broken = {"type": "PredictorReady", "status": "False", "reason": "MinimumReplicasUnavailable"}
    assert rollout_progress(service(1, [broken])).text == "PredictorReady: MinimumReplicasUnavailable"


def test_a_starting_pod_is_no_problem() -> None:
    starting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    assert pod_problems([{"metadata": {"name": "p"}, "status": {"containerStatuses": [starting]}}]) == []


def test_an_evicted_or_lost_pod_is_reported() -> None:
    status = {"phase": "Failed", "reason": "Evicted", "message": "node low on memory"}
    assert pod_problems([{"metadata": {"name": "p"}, "status": status}]) == ["p: Evicted: node low on memory"]
    lost = {"phase": "Running", "reason": "NodeLost", "message": "node kind-2 is unresponsive"}
    assert pod_problems([{"metadata": {"name": "p"}, "status": lost}]) == ["p: NodeLost: node kind-2 is unresponsive"]
