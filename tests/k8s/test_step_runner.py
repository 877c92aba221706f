from __future__ import annotations

import threading
from typing import Any

import pytest

from k8s.cluster.rollout_status import Ending

from .api_server import ApiServer
from .engines import Start, Witness, logged, logged_by, run
from .played import Played


def test_a_step_runs_to_its_end_and_leaves_its_log_and_nothing_else(api: ApiServer, engine: Start, claim: str) -> None:
    def play(pod: Played) -> int:
        pod.log("counting")
        pod.log("done")
        return 0

    api.nodes.play = play
    step = engine()
    assert run(step) == Ending(0)
    assert logged(step) == ["counting", "done"]
    assert list(api.objects) == [claim]
    (kept,) = step.logs.iterdir()
    assert [line.split(" ", 1)[1] for line in kept.read_text().splitlines()] == ["counting", "done"]


def test_the_pod_runs_the_argv_that_would_run_here(api: ApiServer, engine: Start) -> None:
    seen: list[Any] = []

    def play(pod: Played) -> int:
        seen.append(pod.spec["containers"][0])
        return 0

    api.nodes.play = play
    run(engine())
    (container,) = seen
    assert container["command"] == ["python", "-m", "pipeline.steps.prepare", "runs/run-1"]
    assert container["workingDir"] == "/project"
    assert {"name": "runs", "mountPath": "/project/runs"} in container["volumeMounts"]


def test_applying_is_server_side_in_our_name_and_tried_first(api: ApiServer, engine: Start) -> None:
    run(engine())
    patches = [query for method, _, query, _ in api.requests if method == "PATCH"]
    assert [query.get("dryRun") for query in patches] == ["All", None]
    assert {query["fieldManager"] for query in patches} == {"pipe"}


def test_several_pods_are_told_apart_by_their_rank(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        pod.log(f"here is {pod.index}")
        return 0

    api.nodes.play = play
    train = engine("train", nodes=2, processes=1)
    assert run(train) == Ending(0)
    assert sorted(logged(train)) == ["[0] here is 0", "[1] here is 1"]


def test_a_container_that_fails_gives_its_status_and_its_reason(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        pod.log("no memory")
        pod.end(137, "OOMKilled")
        return 137

    api.nodes.play = play
    step = engine()
    found = run(step)
    assert found.status == 137
    assert "the container ended with OOMKilled, exit code 137; it needs more memory than its limit" in found.reason
    assert logged(step) == ["no memory"]
    assert not [path for path in api.objects if "/jobs/" in path]


def test_streams_that_are_cut_lose_and_double_nothing(api: ApiServer, engine: Start) -> None:
    lines = [f"line {i}" for i in range(200)]

    def play(pod: Played) -> int:
        for line in lines:
            pod.log(line)
        return 0

    api.nodes.play = play
    api.cut_after = [0, 1, 3, 50, 2]
    step = engine()
    assert run(step) == Ending(0)
    assert logged(step) == lines


def test_a_history_that_expired_is_listed_anew(api: ApiServer, engine: Start) -> None:
    def play(pod: Played) -> int:
        api.store.expire()
        pod.log("after")
        return 0

    api.nodes.play = play
    assert run(engine()) == Ending(0)


def test_a_server_that_puts_off_or_breaks_is_asked_again(api: ApiServer, engine: Start, said: Witness) -> None:
    api.fail("PATCH", "/jobs/", status=429, headers={"Retry-After": "0"})
    api.fail("PATCH", "/jobs/", drop=True)
    api.fail("GET", "watch=true", status=503, times=8)
    again = threading.Event()
    said.on["the cluster answers again"] = again.set
    api.nodes.play = lambda pod: 0 if again.wait(30) else 1
    assert run(engine()) == Ending(0)
    assert [line for line in said.said if "does not answer (503" in line]


def test_a_slow_server_changes_nothing(api: ApiServer, engine: Start) -> None:
    api.fail("GET", "/jobs", seconds=0.2, times=2)
    assert run(engine()) == Ending(0)


def test_whoever_comes_back_follows_what_runs_and_the_log_goes_on(api: ApiServer, engine: Start, said: Witness) -> None:
    gone, back = threading.Event(), threading.Event()

    def play(pod: Played) -> int:
        pod.log("before")
        gone.set()
        back.wait(30)
        pod.log("after")
        return 0

    class Killed(BaseException):
        pass

    def die() -> None:
        if logged_by(first) == ["before"]:
            raise Killed

    api.nodes.play = play
    first = engine()
    first.tick = die
    first.start()
    with pytest.raises(Killed):
        first.follow()
    second = engine()
    assert second.find() is not None
    back.set()
    assert second.follow() == Ending(0)
    assert logged(second) == ["before", "after"]
