"""Fixtures: a real small bundle, configurations, a test API server and a registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from k8s.cluster.api import connect
from k8s.step_runner import StepRunner
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config, parse_config

from .api_server import ApiServer, Response
from .doubling_bundle import make_bundle
from .registry_server import RegistryServer
from .step_runners import MakeStepRunner, Reports, make_step_job

Configure = Callable[..., Config]


@pytest.fixture
def configure() -> Configure:
    def make(
        deploy: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
        serve: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
        monitor: dict[str, Any] | None = None,
    ) -> Config:
        body = {"name": "twice", "task": "task.py:T", "codec": "codec.py:C", "deploy": deploy or {}}
        more = {"train": train or {}, "serve": serve or {}, "cluster": cluster or {}, "monitor": monitor or {}}
        return parse_config({**body, **more}, source="test")

    return make


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model that doubles its input."""
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """Start an API server and point KUBECONFIG to it."""
    server = ApiServer()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield server
    server.close()


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    server = RegistryServer().start()
    yield server
    server.stop()


@pytest.fixture
def no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge canaries without waiting for their requests."""
    monkeypatch.setattr("pipeline.contract.canary.time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def model(bundle: Bundle) -> Callable[[str, Any], Response]:
    """Return the responses of the model's pods."""

    def answer(path: str, body: Any) -> Response:
        header = {"x-bundle-digest": bundle.digest}
        if path == "/v1/models/twice:predict":
            return 200, header, {"predictions": (2 * np.array(body["instances"])).tolist()}
        if path == "/v2/models/twice/infer":
            given = body["inputs"][0]
            doubled = [2 * value for value in given["data"]]
            outputs = [{"name": "y", "datatype": "FP32", "shape": given["shape"], "data": doubled}]
            return 200, header, {"model_name": "twice", "outputs": outputs}
        return 404, header, {"error": f"no {path}"}

    return answer


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def claim(api: ApiServer) -> str:
    body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "twice-runs"}, "spec": {}}
    return api.add(body)


@pytest.fixture
def make_runner(api: ApiServer, claim: str, tmp_path: Path, configure: Configure, reports: Reports) -> MakeStepRunner:
    def make(
        step: str = "prepare",
        key: str = "k" * 64,
        timeout_seconds: float = 60,
        cluster: dict[str, Any] | None = None,
        **train: Any,
    ) -> StepRunner:
        job = make_step_job(configure, step, key, cluster, **train)
        tick = lambda: None  # noqa: E731
        return StepRunner(
            connect(""), "default", job, tmp_path / step, tmp_path / "log", timeout_seconds, reports, tick
        )

    return make
