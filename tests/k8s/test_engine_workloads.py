from __future__ import annotations

import threading
from typing import Any

import pytest

from k8s.cluster import errors
from k8s.cluster.rollout_status import Ending
from k8s.step_runner import Engine
from pipeline.contract.errors import StageError

from .api_server import ApiServer, Fault
from .engines import Start, Witness, logged, run
from .object_store import Object
from .played import Played


@pytest.fixture(autouse=True)
def _asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.Reasons, "every_seconds", 0.02)


@pytest.fixture
def crds(api: ApiServer) -> None:
    api.crds |= {"jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1", "kueue.x-k8s.io/v1beta2"}


def job_of(step: Engine, api: ApiServer) -> str:
    kind = step.work.job["kind"].lower()
    return next(path for path in api.objects if f"/{kind}s/" in path)


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_training_of_another_controller_is_followed_and_removed(
    workload: str, api: ApiServer, engine: Start, claim: str
) -> None:
    def play(pod: Played) -> int:
        pod.log(f"here is {pod.index}")
        return 0

    api.nodes.play = play
    train = engine("train", cluster={"workload": workload}, nodes=2, processes=1)
    assert run(train) == Ending(0)
    assert sorted(logged(train)) == ["[0] here is 0", "[1] here is 1"]
    assert list(api.objects) == [claim]


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("workload", ["jobset", "trainjob"])
def test_training_of_another_controller_that_fails_says_why(workload: str, api: ApiServer, engine: Start) -> None:
    api.nodes.play = lambda pod: 2
    found = run(engine("train", cluster={"workload": workload}))
    assert found.status == 2
    assert found.reason.startswith("the container ended with Error, exit code 2")


@pytest.mark.usefixtures("crds")
@pytest.mark.parametrize("step", ["prepare", "train"])
def test_what_waits_in_a_queue_says_so_in_the_words_of_kueue(
    step: str, api: ApiServer, engine: Start, said: Witness
) -> None:
    def suspend(item: Object) -> None:
        if item["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == "team-a":
            item["spec"]["suspend"] = True

    def admit() -> None:
        api.store.change(path, lambda item: item["spec"].update(suspend=False))
        api.nodes.see(path, api.objects[path])

    api.webhook = suspend
    found = engine(step, cluster={"queue": "team-a"})
    found.start()
    path = job_of(found, api)
    condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota for cpu"}
    labels = {"kueue.x-k8s.io/job-uid": api.objects[path]["metadata"]["uid"]}
    metadata = {"name": "job-twice", "labels": labels}
    status = {"conditions": [condition]}
    api.add({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": metadata, "status": status})
    said.on["the Job waits in its queue; Kueue: insufficient unused quota for cpu"] = admit
    assert found.follow() == Ending(0)


def event(kind: str, name: str, message: str) -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.1"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedCreate" if kind == "Job" else "FailedMount",
        "message": message,
        "lastTimestamp": "2026-01-02T00:00:00Z",
    }


def test_a_job_whose_pods_are_refused_says_what_only_its_events_say(
    api: ApiServer, engine: Start, said: Witness
) -> None:
    def allow() -> None:
        api.nodes.makes_pods = True
        api.nodes.see(path, api.objects[path])

    api.nodes.makes_pods = False
    step = engine()
    step.start()
    path = job_of(step, api)
    api.add(event("Job", path.rsplit("/", 1)[1], "pods are forbidden: exceeded quota: small"))
    said.on["its pod has to start; FailedCreate: pods are forbidden: exceeded quota: small"] = allow
    assert step.follow() == Ending(0)


def test_a_pod_that_waits_for_a_volume_says_what_only_its_events_say(
    api: ApiServer, engine: Start, said: Witness
) -> None:
    mounted = threading.Event()

    def play(pod: Played) -> int:
        pod.status(phase="Pending", containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}])
        api.add(event("Pod", pod.name, 'secret "object-store" not found'))
        return 0 if mounted.wait(30) else 1

    api.nodes.play = play
    said.on['FailedMount: secret "object-store" not found'] = mounted.set
    assert run(engine()) == Ending(0)


def test_pods_of_an_earlier_attempt_have_ended_before_the_next_one_begins(
    api: ApiServer, engine: Start, said: Witness
) -> None:
    order: list[str] = []
    may_end = threading.Event()

    def play(pod: Played) -> int:
        order.append("begins")
        if len(order) == 1:
            assert pod.gone.wait(30)
            assert may_end.wait(30)
        order.append("ends")
        return 0

    api.nodes.play = play
    engine("train", key="a" * 64).start()
    said.on["waiting for pods of an earlier attempt to end: twice-train"] = may_end.set
    assert run(engine("train", key="b" * 64)) == Ending(0)
    assert order == ["begins", "ends"] * 2


def test_an_apply_that_breaks_off_leaves_nothing(api: ApiServer, engine: Start, claim: str) -> None:
    api.faults.append(
        Fault(lambda asked: asked.plural == "jobs" and asked.method == "PATCH" and "dryRun" not in asked.query, 500)
    )
    with pytest.raises(StageError, match="500"):
        engine("train").start()
    assert list(api.objects) == [claim]


def test_a_log_that_may_not_be_read_is_told_once_with_the_missing_rule(
    api: ApiServer, engine: Start, said: Witness
) -> None:
    rule = {"apiGroups": ["", "batch"], "verbs": ["get", "list", "watch", "create", "patch", "delete"]}
    resources = ["jobs", "services", "pods", "persistentvolumeclaims", "events"]
    api.rules = [{**rule, "resources": resources}]
    assert run(engine("train", nodes=2, processes=1)) == Ending(0)
    (told,) = [line for line in said.said if line.startswith("warning: the log of pod/")]
    assert told.endswith('- apiGroups: [""]\n  resources: ["pods/log"]\n  verbs: [get]')


def test_what_the_cluster_remarks_is_said(api: ApiServer, engine: Start, said: Witness) -> None:
    api.warning = "would violate PodSecurity"
    run(engine())
    (told,) = [line for line in said.said if "would violate PodSecurity" in line]
    assert told.startswith("warning: job/twice-prepare-")


def test_lists_that_come_in_pages_and_events_that_are_torn_change_nothing(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        pod.log("done")
        return 0

    api.page, api.torn, api.nodes.play = 1, 2, play
    train = engine("train", nodes=2, processes=1)
    assert run(train) == Ending(0)
    assert sorted(logged(train)) == ["[0] done", "[1] done"]


def test_an_end_that_the_cluster_takes_away_at_once_is_still_the_end(
    api: ApiServer, engine: Start, said: Witness
) -> None:
    runs = threading.Event()
    said.on["its pod runs"] = runs.set
    api.nodes.play = lambda pod: 0 if runs.wait(30) else 1
    api.nodes.keeps_ended = False
    assert run(engine()) == Ending(0)
