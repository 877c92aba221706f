"""Versions of a service on a real cluster: two clones of a project deploy, promote, restore and remove in turns."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial

import pytest

from k8s import deploy
from k8s.cluster.drift import inspect_deployment
from k8s.cluster.history import History, Version
from k8s.objects.kustomize import Object
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.settings.access import OPEN_ACCESS
from pipeline.system.errors import ConfigError

from .images import NAME
from .load import send_load
from .place import DEPLOYMENT, Place, Reports

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("image")]

MIN_REQUESTS = int(os.environ.get("PIPE_TEST_REQUESTS", "2000"))
ROUTE: Object = {
    "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {"name": NAME},
}  # fmt: skip


def options(place: Place, waiting: int, **settings: object) -> Config:
    return place.config({"environment": {"MAX_WAITING": str(waiting)}, **settings})


def history(place: Place) -> History:
    return deploy.read_versions(place.cluster, place.config())


def current(place: Place) -> int:
    version = history(place).current
    assert version is not None
    return version.number


def not_here(_: Version) -> Bundle | None:
    """Find no bundle, as a clone that has none of the runs."""
    return None


def test_two_clones_in_turns_lose_no_request(place: Place, reports: Reports) -> None:
    if not place.request("GET", "/apis/gateway.networking.k8s.io/v1").ok:
        pytest.skip("needs the CRDs of the Gateway API")
    promote = partial(deploy.promote, place.config(), OPEN_ACCESS, reports, not_here)
    roll_back = partial(deploy.roll_back, place.config(), OPEN_ACCESS, reports, not_here)
    place.deploy("stable", reports, options(place, 101, gateway="front"))
    with send_load(place) as load:
        place.deploy("stable", reports, options(place, 102, gateway="front"))
        assert place.cluster.read(ROUTE) is not None
        place.deploy("candidate", reports, options(place, 102))
        assert "deleted httproute/twice, which no version uses" in reports.lines
        assert (current(place), place.cluster.read(ROUTE)) == (3, None)
        with pytest.raises(ConfigError, match="has no canary"):
            promote()
        config = options(place, 103).model_copy(update={"rollout": place.config(rollout=CANARY).rollout})
        assert place.deploy("stable", reports, config)["canary"] == CANARY["canary_percent"]
        assert promote().number == 4
        for number, expected in ((None, 3), (None, 2), (4, 4), (1, 1)):
            roll_back(number)
            assert current(place) == expected
            assert inspect_deployment(place.cluster, history(place)).drift == ()
        while sum(load.counts()["requests"]) < MIN_REQUESTS:
            for number in (2, 3):
                roll_back(number)
        load.check()


CANARY = {"canary_percent": 30}


def test_undo_by_kubectl_is_a_version_and_the_next_deployment_replaces_it(place: Place, reports: Reports) -> None:
    place.deploy("stable", reports, options(place, 101))
    place.deploy("stable", reports, options(place, 102))
    kubectl = ["kubectl", "--namespace", place.namespace]
    subprocess.run([*kubectl, "rollout", "undo", f"deployment/{NAME}"], check=True)
    assert current(place) == 1
    subprocess.run([*kubectl, "rollout", "status", f"deployment/{NAME}"], check=True)
    assert inspect_deployment(place.cluster, history(place)).drift == ()
    place.deploy("candidate", reports, options(place, 102))
    live = place.cluster.read(DEPLOYMENT)
    assert live is not None
    assert place.bundles["candidate"].digest in json.dumps(live["spec"]["template"])
    assert [version.number for version in history(place).restorable()] == [1]


def test_an_interrupted_canary_is_continued_from_another_machine(
    place: Place, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.deploy("stable", reports)
    rollout = {"canary_percent": 30, "auto": True, "observe_seconds": 5, "min_requests": 20}
    with send_load(place) as load:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr("k8s.cluster.canary.observe", _interrupt)
            place.deploy("candidate", reports, place.config(rollout=rollout))
        config = place.config(rollout=rollout)
        assert deploy.continue_canary(config, OPEN_ACCESS, reports, not_here).number == 2
        load.check()
    assert current(place) == 2


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
