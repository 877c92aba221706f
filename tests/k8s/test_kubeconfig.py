from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.cluster.api import connect
from pipeline.contract.errors import ResourceError

FILE: dict[str, Any] = {
    "current-context": "small",
    "clusters": [{"name": "small", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "me", "user": {"token": "t"}}],
    "contexts": [{"name": name, "context": {"cluster": "small", "user": "me"}} for name in ("small", "large")],
}
NOWHERE = [{"name": "small", "cluster": {}}]
TORN = [{"name": "small", "cluster": {"server": "https://127.0.0.1:1", "certificate-authority-data": "a"}}]


@pytest.mark.parametrize(
    ("changed", "context", "words"),
    [
        ({}, "medium", "has no context medium; there are small, large"),
        ({"current-context": ""}, "", "has no current context; choose one with `--context`: there are small, large"),
        ({"contexts": None}, "", "has no context small; it has none"),
        ({"clusters": NOWHERE}, "", "the cluster of context small has no server"),
        ({"clusters": TORN}, "", "cannot be used: Invalid base64"),
        ([], "", "cannot be used: "),
    ],
)
def test_what_is_wrong_with_a_kubeconfig_is_named_with_what_it_has(
    changed: Any, context: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**FILE, **changed} if isinstance(changed, dict) else ["a list"]
    (tmp_path / "config").write_text(yaml.safe_dump(body))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ResourceError, match=words):
        connect(context)


def test_the_context_that_is_named_is_the_one_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(yaml.safe_dump(FILE))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert (connect("").context, connect("large").context) == ("small", "large")
