"""Connections: kubeconfig errors, retries and REST paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.cluster.api import Response, Unreachable, connect, plural, retry_after_seconds
from pipeline.system.errors import ResourceError

from ..api_server import ApiServer

FILE: dict[str, Any] = {
    "current-context": "small",
    "clusters": [{"name": "small", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "me", "user": {"token": "t"}}],
    "contexts": [{"name": name, "context": {"cluster": "small", "user": "me"}} for name in ("small", "large")],
}
NO_SERVER = [{"name": "small", "cluster": {}}]
BAD_CERTIFICATE = [{"name": "small", "cluster": {"server": "https://127.0.0.1:1", "certificate-authority-data": "a"}}]


@pytest.mark.parametrize(
    ("changed", "context", "message"),
    [
        ({}, "medium", "has no context medium; there are small, large"),
        ({"current-context": ""}, "", "has no current context; choose one with `--context`: there are small, large"),
        ({"contexts": None}, "", "has no context small; it has none"),
        ({"clusters": NO_SERVER}, "", "the cluster of context small has no server"),
        ({"clusters": BAD_CERTIFICATE}, "", "cannot be used: Invalid base64"),
        (["a list"], "", "cannot be used: "),
        ("", "", "kubeconfig"),
        ("a: [", "", "kubeconfig"),
    ],
)
def test_a_broken_kubeconfig_is_explained(
    changed: Any, context: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**FILE, **changed} if isinstance(changed, dict) else changed
    (tmp_path / "config").write_text(body if isinstance(body, str) else yaml.safe_dump(body))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ResourceError, match=message):
        connect(context)


def test_the_named_context_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(yaml.safe_dump(FILE))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert (connect("").context, connect("large").context) == ("small", "large")


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"retry-after": "3"}, 3.0),
        (503, {"retry-after": "900"}, 20.0),
        (503, {}, None),
        (500, {"retry-after": "1"}, None),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ],
)
def test_only_a_busy_server_with_retry_after_is_waited_for(
    status: int, headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after_seconds(Response(status, headers, b"")) == seconds


def test_kinds_have_their_plural_in_paths() -> None:
    kinds = ["Job", "NetworkPolicy", "Ingress", "HTTPRoute", "PodDisruptionBudget"]
    assert [plural(kind) for kind in kinds] == [
        "jobs", "networkpolicies", "ingresses", "httproutes", "poddisruptionbudgets",
    ]  # fmt: skip


def test_only_safe_requests_are_retried_after_a_cut_connection(api: ApiServer) -> None:
    path = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    for method in ("GET", "POST"):
        api.fail(method, "/leases", drop=True)
    connection = connect("")
    assert connection.request("GET", path).status == 200
    with pytest.raises(Unreachable, match="does not answer"):
        connection.request("POST", path, body=b"{}")
    assert [method for method, *_ in api.requests] == ["GET", "GET", "POST"]
