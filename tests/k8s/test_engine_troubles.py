from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from k8s.cluster.rollout_status import Ending
from pipeline.contract.errors import PipelineError, ResourceError, StageError

from .api_server import ApiServer
from .engines import Start, Witness, logged, logged_by, run
from .played import Played


def test_a_job_of_other_sources_is_not_taken_for_this_one(api: ApiServer, engine: Start) -> None:
    api.nodes.play = lambda pod: 0 if pod.gone.wait(30) else 1
    engine(key="a" * 64).start()
    assert engine(key="b" * 64).find() is None


def test_cancelling_lets_pods_end_and_keeps_their_last_words(api: ApiServer, engine: Start, claim: str) -> None:
    begun = threading.Event()

    def play(pod: Played) -> int:
        pod.log("training")
        begun.set()
        assert pod.gone.wait(30)
        pod.log("checkpoint made")
        return 143

    api.nodes.play = play
    step = engine("train")
    step.start()
    assert begun.wait(30), "a pod that never ran has no words"
    step.cancel()
    assert list(api.objects) == [claim]
    assert logged(step)[-1] == "checkpoint made"


def test_what_is_done_is_not_lost_for_a_server_that_restarts(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        pod.log("last words")
        api.fail("GET", "/pods?labelSelector", status=503, times=3)
        api.fail("GET", "/jobs?labelSelector", status=503, times=2)
        return 0

    api.nodes.play = play
    step = engine()
    assert run(step) == Ending(0)
    assert logged(step) == ["last words"]
    assert not [path for path in api.objects if "/jobs/" in path]


def test_removing_touches_nothing_of_anybody_else(api: ApiServer, engine: Start) -> None:
    labels = {"pipe-road/run": "run-2", "pipe-road/step": "prepare", "pipe-road/key": "k" * 16}
    other = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "another", "labels": labels}, "spec": {}}
    path = api.add(other)
    run(engine())
    assert path in api.objects


def test_a_job_that_somebody_deletes_is_named(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        api.store.delete(pod.job)
        api.nodes.forget(pod.job)
        return 0

    api.nodes.play = play
    step = engine()
    step.start()
    found = step.follow()
    assert found.status == 1
    assert "was deleted by somebody else" in found.reason


def test_an_image_that_cannot_be_had_is_not_waited_for_for_ever(api: ApiServer, engine: Start) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}

    def play(pod: Played) -> int:
        pod.status(phase="Pending", containerStatuses=[{"name": "step", "state": {"waiting": waiting}}])
        pod.gone.wait(30)
        return -1

    api.nodes.play = play
    step = engine(timeout_seconds=0.1)
    found = run(step)
    assert "ImagePullBackOff: Back-off pulling image" in found.reason


def test_a_pod_that_waits_for_a_free_node_is_waited_for_and_said(api: ApiServer, engine: Start, said: Witness) -> None:
    free = threading.Event()
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient cpu"}

    def play(pod: Played) -> int:
        pod.status(phase="Pending", conditions=[unscheduled])
        free.wait(30)
        return 0

    api.nodes.play = play
    said.on["Pending: 0/3 nodes: insufficient cpu"] = free.set
    assert run(engine(timeout_seconds=0.01)) == Ending(0)


def test_a_log_is_kept_when_its_pod_is_gone(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        if pod.path.endswith("-0"):
            pod.log("first words")
            while "first words" not in logged_by(step):
                assert not pod.gone.wait(0.01)  # a log that nobody read is lost with its node
            api.nodes.start(pod.job, 0, name="-again")
            api.nodes.lose(pod.path)
            return -1
        pod.log("second words")
        return 0

    api.nodes.play = play
    step = engine()
    assert run(step) == Ending(0)
    assert logged(step) == ["first words", "second words"]
    assert len(list(step.logs.iterdir())) == 2


@pytest.mark.parametrize(
    ("prepare", "kind", "words"),
    [
        (lambda api: api.quota.update(Job="count/jobs.batch"), StageError, "quota of namespace default is used up"),
        (lambda api: setattr(api, "rules", []), ResourceError, 'resources: \\["persistentvolumeclaims"\\]'),
        (lambda api: api.store.objects.clear(), ResourceError, "no volume claim twice-runs"),
        (lambda api: api.namespaces.clear(), StageError, "kubectl create namespace default"),
    ],
)
def test_what_the_cluster_refuses_is_told_with_its_mend(
    prepare: Callable[[ApiServer], None], kind: type[PipelineError], words: str, api: ApiServer, engine: Start
) -> None:
    prepare(api)
    with pytest.raises(kind, match=words):
        engine().start()
    assert not [path for path in api.objects if "/jobs/" in path]
