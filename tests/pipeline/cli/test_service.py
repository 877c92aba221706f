from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pipeline.cli import service
from pipeline.cli.service import _read_instances
from pipeline.service.process import CanaryRecord
from pipeline.system.errors import BundleError, ConfigError

from ..records import live_service
from .conftest import Pipe


def test_stop_without_a_service_succeeds(pipe: Pipe) -> None:
    assert pipe("stop").stdout == "no service was running\n"
    assert json.loads(pipe("stop", "-o", "json").stdout) == {"ended": False}


def test_a_damaged_bundle_is_not_served(pipe_process: Pipe, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = ("--port", str(free.getsockname()[1]), "--grpc-port", "-1")
    assert "manifest.json: damaged: " in pipe_process("serve", str(tmp_path), *ports, expect=2).stderr


def test_predict_refuses_answers_of_a_bundle_that_was_not_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the deployed canary are accepted."""
    live = live_service(canary=CanaryRecord(run="s", bundle="b" * 64, share=0.1))
    for digest in (live.bundle, "b" * 64):
        monkeypatch.setattr(
            service, "send_request", lambda *_, digest=digest, **__: (200, {"x-bundle-digest": digest}, 1)
        )
        assert service._predict(live, {}) == 1
    monkeypatch.setattr(service, "send_request", lambda *_, **__: (200, {"x-bundle-digest": "c" * 64}, 1))
    with pytest.raises(
        BundleError, match=r"answered with bundle c{12}, but a{12} and b{12} was deployed; `pipe deploy`"
    ):
        service._predict(live, {})


def test_nan_in_a_file_of_instances_is_null(tmp_path: Path) -> None:
    file = tmp_path / "instances.json"
    file.write_text(json.dumps([[1.5, float("nan")], [None, 2]]))
    assert _read_instances(file) == {"instances": [[1.5, None], [None, 2]]}
    file.write_text(json.dumps([[float("inf")]]))
    with pytest.raises(ConfigError, match=r"instances\.json: Infinity is not valid in JSON"):
        _read_instances(file)
