"""The wheel's extras on every supported platform: resolved from the metadata of wheels on PyPI, none is downloaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")  # glibc 2.28 or macOS 14
EXTRAS = ("all", "train", "serve")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        urllib.request.urlopen("https://pypi.org/simple/pip/", timeout=30).close()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"PyPI cannot be reached: {error}")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return next(folder.glob("*.whl"))


def resolve(wheel: Path, extra: str, platform: str, python: str) -> dict[str, str]:
    """Return name and version of all packages that an extra installs there, with constraints.txt and only wheels."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate",
        "--only-binary", ":all:", "--python-platform", platform, "--python-version", python,
        "--constraint", "constraints.txt", "-",
    ]  # fmt: skip
    env = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(
        command, input=f"pipe-road[{extra}] @ {wheel.as_uri()}", cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{extra} on {platform}, Python {python}: {done.stderr}"
    return dict(re.findall(r"^([\w.-]+)(?:\[[\w,]*\])?==(\S+)", done.stdout, re.MULTILINE))


@pytest.mark.long
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_from_wheels_alone(extra: str, platform: str, python: str, wheel: Path) -> None:
    packages = resolve(wheel, extra, platform, python)
    assert ("torch" in packages) == (extra != "serve")
    assert "onnxruntime" in packages
    assert "onnxruntime-gpu" not in packages
    assert ("kserve" in packages) == (extra == "all" and platform != "aarch64-manylinux_2_28")  # psutil<6 has no wheel


@pytest.mark.long
@pytest.mark.parametrize(
    ("platform", "runtime"),
    [
        ("x86_64-manylinux_2_28", "onnxruntime-gpu"),
        ("aarch64-manylinux_2_34", "onnxruntime-gpu"),
        ("aarch64-apple-darwin", "onnxruntime"),
    ],
)
def test_variant_for_gpus_brings_one_runtime(platform: str, runtime: str, wheel: Path) -> None:
    packages = resolve(wheel, "all-gpu", platform, "3.12")
    assert [name for name in packages if name.startswith("onnxruntime")] == [runtime]
    assert ("nvidia-cudnn-cu13" in packages) == (runtime == "onnxruntime-gpu")
