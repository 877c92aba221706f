from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pipeline.cli.service import _read_instances
from pipeline.contract.errors import ConfigError

from .conftest import Pipe


def test_stopping_where_nothing_runs_is_fine(pipe: Pipe) -> None:
    assert pipe("stop").stdout == "no service was running\n"
    assert json.loads(pipe("stop", "-o", "json").stdout) == {"ended": False}


def test_no_one_can_be_requested_where_nothing_is_live(pipe: Pipe) -> None:
    assert "no service is live here" in pipe("predict", expect=2).stderr


def test_there_is_nothing_to_serve_before_the_first_bundle(pipe: Pipe) -> None:
    assert "has a bundle yet" in pipe("serve", expect=2).stderr


def test_a_damaged_bundle_is_not_served(pipe_process: Pipe, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = ("--port", str(free.getsockname()[1]), "--grpc-port", "-1")
    assert "not a valid manifest" in pipe_process("serve", str(tmp_path), *ports, expect=2).stderr


def test_nan_in_a_file_of_instances_is_null(tmp_path: Path) -> None:
    file = tmp_path / "instances.json"
    file.write_text(json.dumps([[1.5, float("nan")], [None, 2]]))
    assert _read_instances(file) == {"instances": [[1.5, None], [None, 2]]}
    file.write_text(json.dumps([[float("inf")]]))
    with pytest.raises(ConfigError, match=r"instances\.json: Infinity is not valid in JSON"):
        _read_instances(file)
