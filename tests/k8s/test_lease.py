from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from k8s.api import connect
from k8s.deploy import deploy
from k8s.lease import Lease
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import ResourceError

from .api_server import ApiServer
from .conftest import Configure

PLACE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/twice-deploy"


@pytest.fixture
def lease(api: ApiServer) -> Callable[..., Lease]:
    def make(holder: str, seconds: int = 30) -> Lease:
        return Lease(connect(""), "default", "twice-deploy", holder, poll_seconds=0.01, lasts_seconds=seconds)

    return make


def test_whoever_comes_second_is_told_who_deploys(lease: Callable[..., Lease]) -> None:
    said: list[str] = []
    with (
        lease("ann on a").held(0, print),
        pytest.raises(ResourceError, match="ann on a is deploying twice in namespace default"),
        lease("bob on b").held(0.05, said.append),
    ):
        pass
    assert said == ["ann on a is deploying here; waiting for it, 0.05 s at most"]


def test_whoever_waits_goes_on_when_the_first_is_through(lease: Callable[..., Lease]) -> None:
    first_is_through = threading.Event()
    waits = threading.Event()

    def first() -> None:
        with lease("ann on a").held(0, print):
            held.set()
            waits.wait(10)
        first_is_through.set()

    held = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    with lease("bob on b").held(10, lambda text: waits.set()):
        assert first_is_through.wait(10)
    thread.join()


def test_one_who_died_is_waited_for_no_longer_than_a_lease_lasts(lease: Callable[..., Lease]) -> None:
    dead = lease("ann on a", seconds=1)
    dead._take(0, print)
    with lease("bob on b").held(10, print) as check:
        check()


def test_a_lease_that_is_renewed_is_not_taken(lease: Callable[..., Lease]) -> None:
    with (
        lease("ann on a", seconds=1).held(0, print) as check,
        pytest.raises(ResourceError, match="ann on a"),
        lease("bob on b").held(1.5, print),
    ):
        pass
    check()


def until_it_raises(check: Callable[[], None]) -> None:
    for _ in range(500):
        check()
        threading.Event().wait(0.01)


def test_one_that_lost_its_lease_changes_nothing_more(lease: Callable[..., Lease], api: ApiServer) -> None:
    with lease("ann on a", seconds=1).held(0, print) as check:
        api.store.change(PLACE, lambda item: item["spec"].update(holderIdentity="bob on b"))
        with pytest.raises(ResourceError, match="somebody else took it; nothing more is changed"):
            until_it_raises(check)
    assert api.objects[PLACE]["spec"]["holderIdentity"] == "bob on b"


def test_a_deployment_waits_for_another_and_says_for_whom(
    api: ApiServer, lease: Callable[..., Lease], configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    config = configure()
    quick = config.model_copy(update={"rollout": config.rollout.model_copy(update={"wait_seconds": 0})})
    with lease("ann on a").held(0, print), pytest.raises(ResourceError, match="ann on a is deploying twice"):
        deploy(quick, bundle, "twice:1", tmp_path, False, print)
    assert not [path for path in api.objects if "/deployments/" in path]


def test_a_lease_that_cannot_be_given_back_hides_no_other_error(lease: Callable[..., Lease], api: ApiServer) -> None:
    said: list[str] = []

    def fail() -> None:
        with lease("ann on a").held(0, said.append):
            api.rules = []
            raise ValueError("the real one")

    with pytest.raises(ValueError, match="the real one"):
        fail()
    assert said[0].startswith("warning: lease/twice-deploy runs out by itself, in 30 s: ")
