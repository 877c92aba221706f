from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pipeline.cli import service
from pipeline.cli.service import _read_instances, parse_shard
from pipeline.service.process import CanaryRecord
from pipeline.system.errors import BundleError, ConfigError

from ...k8s.doubling_bundle import make_bundle
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


def test_predict_writes_a_file_without_a_service_or_a_project(pipe: Pipe, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    (tmp_path / "in.jsonl").write_text("[1, 2]\n[3, 0.1]\n")
    output = tmp_path / "out.jsonl"
    words = ("predict", "--bundle", str(bundle.path), "--input", str(tmp_path / "in.jsonl"), "--output", str(output))
    result = json.loads(pipe(*words, "-o", "json", here=tmp_path).stdout)
    assert (result["rows"], result["output"], result["bundle"]) == (2, str(output), bundle.digest)
    assert output.read_text() == "[2.0,4.0]\n[6.0,0.20000000298023224]\n"
    assert "out.jsonl: exists; to fix it: name another file, or add --overwrite" in pipe(*words, expect=2).stderr
    shown = pipe(*words, "--overwrite", "--shard", "1/1").stdout
    assert shown.startswith("2 rows in ")
    assert shown.endswith(f" rows/s): {output}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bundle B --input in.csv", "--bundle: needs --input FILE_OR_FOLDER and one --output FILE"),
        ("--input in.csv --output out.csv", "out.csv: a file needs --bundle RUN|BUNDLE; else -o is text or json"),
        ("--bundle none --input in.csv --output out.csv", "no runs in "),
    ],
)
def test_predict_refuses_incomplete_options(pipe: Pipe, words: str, message: str) -> None:
    assert message in pipe("predict", *words.split(), expect=2).stderr


def test_shard_is_a_number_of_a_count_or_that_of_an_indexed_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_shard("3/4") == (3, 4)
    for text in ("0/4", "5/4", "auto/4", "1", "a/b"):
        with pytest.raises(ConfigError, match=rf"--shard {text}: write I/N, as 1/4 to 4/4, or auto/N"):
            parse_shard(text)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert parse_shard("auto/4") == (1, 4)
