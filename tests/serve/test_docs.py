"""The commands of `docs/serving.md`, typed line by line into a shell, print what it shows."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Serve
from pipeline.system.sources import SOURCE_ROOT
from serve.errors import RequestError
from serve.options import parse_options
from serve.routes import PATHS
from tests.serve import embedder
from tests.serve.llm import tiny

from .conftest import Launcher, Running

DOCUMENT = (SOURCE_ROOT / "docs" / "serving.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
ANYTHING = "…"


@dataclass
class Ran:
    """A block: its text, what it printed, and the output that the document shows, if any, as JSON or lines."""

    text: str
    printed: str
    kind: str
    expected: str


class Shell:
    """Runs the blocks in one folder, with the ports of the services that were started for it."""

    def __init__(self, folder: Path, places: dict[str, str], env: dict[str, str]) -> None:
        self._folder, self._places, self._env = folder, places, env

    def run(self, language: str, text: str) -> str:
        for known, actual in self._places.items():
            text = text.replace(known, actual)
        argv = ["bash", "-euo", "pipefail", "-c", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(argv, cwd=self._folder, env=self._env, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, f"{text}\n{done.stderr.decode()}"
        return done.stdout.decode()


@pytest.fixture(scope="module")
def outputs(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory, module_launcher: Launcher) -> list[Ran]:
    folder = tmp_path_factory.mktemp("docs")
    samples = ["--sample", "1", "--sample-to", str(folder / "samples")]
    server = module_launcher(bundle_path, options=["--name", "digits", *samples])
    story = module_launcher(tiny.build(folder / "story"), options=["--name", "story"])
    search = module_launcher(embedder.build(folder / "search"), options=["--name", "search"])
    places = {
        "localhost:8060": f"localhost:{search.port}",
        "localhost:8070": f"localhost:{story.port}",
        "localhost:8080": f"localhost:{server.port}",
        "localhost:8081": f"localhost:{server.grpc_port}",
    }
    env = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT)}
    env.pop("PIPE_API_KEY", None)
    shell, found = Shell(folder, places, env), []
    for (language, text), (following, expected) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language not in ("sh", "python"):
            continue
        if "localhost:8443" in text:
            places["localhost:8443"] = f"localhost:{_closed(module_launcher, bundle_path, folder).port}"
        found.append(Ran(text, shell.run(language, text), following, expected))
    return found


def _closed(launcher: Launcher, bundle: Path, folder: Path) -> Running:
    """Start a service with the keys and the certificate that the document has just made."""
    access = Access.from_settings(Serve(api_keys="keys", tls_certificate="tls.crt", tls_key="tls.key"), folder)
    return launcher(bundle, options=["--name", "digits", *access.options])


def test_every_command_prints_what_the_document_shows(outputs: list[Ran]) -> None:
    assert sum(ran.text.count("curl ") for ran in outputs) > 30
    for ran in outputs:
        if ran.kind == "json":
            _same_objects(ran.text, list(_objects(ran.expected)), list(_objects(ran.printed)))
        elif ran.kind == "text":
            _same_lines(ran)


def _objects(text: str) -> Iterator[Any]:
    decoder, place = json.JSONDecoder(), 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        value, place = decoder.raw_decode(text, place)
        yield value


def _same_objects(text: str, expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found), f"{text}\n{found}"
    for wanted, got in zip(expected, found, strict=True):
        assert _alike(wanted, got), f"{text}\n{json.dumps(wanted)}\n{json.dumps(got)[:600]}"


def _alike(wanted: Any, got: Any) -> bool:
    if wanted == ANYTHING:
        return True
    if isinstance(wanted, dict) and isinstance(got, dict):
        return wanted.keys() == got.keys() and all(_alike(wanted[key], got[key]) for key in wanted)
    if isinstance(wanted, list) and isinstance(got, list):
        return len(wanted) == len(got) and all(map(_alike, wanted, got))
    if isinstance(wanted, float):
        return isinstance(got, int | float) and math.isclose(wanted, got)
    return bool(wanted == got)


def _same_lines(ran: Ran) -> None:
    """Check that the lines of the document are printed, in any order; the ellipsis stands for anything."""
    for line in ran.expected.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.split(ANYTHING))
        assert re.search(pattern, ran.printed), f"{ran.text}\n{line}\n{ran.printed[:2000]}"


def test_every_endpoint_has_a_curl_example() -> None:
    sent = set(re.findall(r"curl [^\n]*?localhost:80[678]0(\S*)", DOCUMENT))
    named = {path: "story" if "openai" in path else "digits" for path, _ in PATHS.values()}
    missing = [path for path, name in named.items() if path.replace("{model_name}", name) not in sent]
    assert missing == []
    assert {"/v2/models/digits/ready", "/v2/models/digits/versions/1/infer"} <= sent


@pytest.mark.parametrize(
    "line", [line for language, text in BLOCKS if language == "console" for line in text.splitlines()]
)
def test_every_documented_start_command_is_valid(line: str) -> None:
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "serve"]
    parse_options(words[3:])


def test_every_error_status_is_in_the_table() -> None:
    received = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", DOCUMENT, re.MULTILINE) for code in row.split(",")}
    kinds: list[type[RequestError]] = [RequestError, *RequestError.__subclasses__()]
    undocumented = {499}  # the client left
    assert {int(kind.status) for kind in kinds} - undocumented <= received


def test_every_serve_setting_is_documented() -> None:
    received = {"canary", "shadow", "shadow_share"}  # documented as options
    for name in Serve.model_fields.keys() - received:
        assert re.search(rf"\b{name}\b", DOCUMENT), name
    for name in received:
        assert f"--{name.replace('_', '-')}" in DOCUMENT


def test_documented_metrics_exist(outputs: list[Ran]) -> None:
    metrics = "".join(ran.printed for ran in outputs if ran.text.endswith("/metrics\n"))
    for name in re.findall(r"`(pipe_\w+)`", DOCUMENT):
        assert name in metrics, name
