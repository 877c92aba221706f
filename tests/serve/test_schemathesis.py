"""schemathesis reads `/openapi.json` and sends valid and invalid requests."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serve.identity_models import build
from tests.serve.llm import tiny

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


ST = Path(sysconfig.get_path("scripts")) / "st"
KEY = "a-key-that-is-hard-to-guess"
RULES = Path(__file__).parent / "schemathesis.toml"


def _judge(server: Running, folder: Path, *options: str, seconds: int) -> None:
    """Run all its checks; files about failures go to `folder`."""
    argv = [
        str(ST),
        "--config-file",
        str(RULES),
        "run",
        f"{server.url}/openapi.json",
        "--no-color",
        "--seed",
        "7",
        "--no-shrink",
    ]
    done = subprocess.run(
        [*argv, "--phases", "coverage,fuzzing", "--continue-on-failure", *options],
        cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]
    count = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert count, done.stdout
    assert int(count[1]) == int(count[2]) > 300
    assert "Traceback" not in server.log


@pytest.mark.long
def test_service_conforms_to_its_openapi_document(server: Running, tmp_path: Path) -> None:
    _judge(server, tmp_path, "-n", "200", seconds=500)


@pytest.mark.long
def test_service_with_a_key_conforms_to_its_openapi_document(
    module_launcher: Launcher, bundle_path: Path, tmp_path: Path
) -> None:
    """schemathesis also checks that requests without a key are refused."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    server = module_launcher(bundle_path, options=["--api-keys", str(tmp_path / "keys")])
    _judge(server, tmp_path, "-n", "5", "-H", f"Authorization: Bearer {KEY}", seconds=200)


@pytest.mark.long
def test_service_of_several_inputs_conforms_to_its_openapi_document(module_launcher: Launcher, tmp_path: Path) -> None:
    bundle = build(
        tmp_path / "bundle",
        {"image": ("FP16", ["batch", 2, 2]), "mask": ("BOOL", ["batch"]), "words": ("BYTES", ["batch", "length"])},
    )
    _judge(module_launcher(bundle), tmp_path, "-n", "100", "--exclude-path-regex", "/versions/", seconds=500)


@pytest.mark.long
def test_service_of_a_language_model_conforms_to_its_openapi_document(
    module_launcher: Launcher, tmp_path: Path
) -> None:
    server = module_launcher(tiny.build(tmp_path / "bundle"))
    _judge(server, tmp_path, "-n", "40", "--include-path-regex", "^/openai/", seconds=500)
