"""Fixtures: a cluster given by PIPE_TEST_CLUSTER or started here, a namespace for each test, and what it must have."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from k8s.cluster.cluster import Cluster
from pipeline.contract.bundle import Bundle

from .control_plane import missing_binaries, run_control_plane, unpack_binaries
from .images import PAUSE_SECONDS, make_bundle
from .place import Place, Reports, wait_until
from .tcp_proxy import TcpProxy, write_proxied_kubeconfig

_OLDEST_VERSION = (1, 30)


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if given := os.environ.get("PIPE_TEST_CLUSTER"):
        yield Path(given).absolute()
        return
    folder, missing, problem = tmp_path_factory.mktemp("control-plane"), missing_binaries(), ""
    with pytest.MonkeyPatch.context() as patch:
        if missing:
            problem = unpack_binaries(folder)
            patch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
        if problem or missing_binaries():
            reason = f"PIPE_TEST_CLUSTER is not set, and {', '.join(missing)} not on PATH; {problem}"
            pytest.skip(f"no API server: {reason}")
        with run_control_plane(folder) as plane:
            yield plane.kubeconfig


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {version: make_bundle(folder / version, version) for version in PAUSE_SECONDS}


@pytest.fixture
def proxy(kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """Put a proxy between `pipe` and the API server, and point KUBECONFIG to it."""
    proxy = write_proxied_kubeconfig(kubeconfig, tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield proxy
    proxy.close()


@pytest.fixture
def cluster(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    cluster = Cluster.connect("", "default")
    yield cluster
    cluster.connection.pool.clear()


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path, bundles: Mapping[str, Bundle]) -> Iterator[Place]:
    """Create a namespace with the `restricted` Pod Security Standard, and delete it after the test."""
    name = f"pipe-test-{uuid.uuid4().hex[:8]}"
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    place = Place(
        replace(cluster, namespace=name),
        name,
        tmp_path / "rendered",
        os.environ.get("PIPE_TEST_IMAGE", "twice"),
        bundles,
    )
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    place.create("/api/v1/namespaces", body)
    yield place
    place.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def supported(cluster: Cluster) -> None:
    """Skip on a Kubernetes that `pipe` does not support."""
    version = tuple(int(number) for number in re.findall(r"\d+", cluster.version)[:2])
    if version < _OLDEST_VERSION:
        pytest.skip(f"needs Kubernetes 1.30, this is {cluster.version}")


@pytest.fixture
def controllers(place: Place) -> None:
    """Skip without a controller manager, which gives each namespace its default service account."""
    path = f"/api/v1/namespaces/{place.namespace}/serviceaccounts/default"
    try:
        wait_until(lambda: place.request("GET", path).ok, "the default service account", 20)
    except AssertionError:
        pytest.skip("needs a controller manager")


@pytest.fixture
def nodes(place: Place, supported: None, controllers: None) -> list[str]:
    """Return the names of the nodes that run pods; skip without nodes or an image for them."""
    items = place.request("GET", "/api/v1/nodes").json()["items"]
    names = [item["metadata"]["name"] for item in items if _is_ready(item)]
    if not names:
        pytest.skip("needs a node with a kubelet")
    return names


@pytest.fixture
def image(nodes: list[str]) -> None:
    if "PIPE_TEST_IMAGE" not in os.environ:
        pytest.skip("needs PIPE_TEST_IMAGE; `python -m tests.cluster.images NAME` builds it")


def _is_ready(node: Mapping[str, Mapping[str, list[Mapping[str, str]]]]) -> bool:
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in node["status"]["conditions"])
    return ready and not node["spec"].get("unschedulable")
