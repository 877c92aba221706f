"""The size of the serving image, from its requirements and our source as a build installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k8s.images.build import Recipe, write_context
from pipeline.contract.bundle import Bundle

LIMIT_MEGABYTES = 220

# Runs without this environment's packages: only those of the image may be imported.
CHECK = """
import sys
sys.path[:0] = sys.argv[1:3]
import serve.llm.model, serve.process.workers
from serve.__main__ import main
print(sys.modules["httptools"].__file__)
sys.exit(main([sys.argv[3], "--check"]))
"""


@pytest.mark.long
def test_the_serving_image_for_cpu_is_small_and_starts(bundle: Bundle, tmp_path: Path) -> None:
    context = tmp_path / "context"
    write_context(bundle, Recipe("python:3.11-slim", "cpu"), context)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "venv" / "lib" / version / "site-packages"
    install = ("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
    call(*install, "--no-deps", "--target", str(packages), "-r", str(context / "requirements-cpu.txt"))
    call(str(context / "slim.py"), str(tmp_path / "venv"), str(context / "app"))
    size = sum(map(blocks, (tmp_path / "venv", context / "app", context / "bundle"))) / 1e6
    print(f"{size:.0f} MB beyond the base")
    assert size <= LIMIT_MEGABYTES
    lines = call("-I", "-S", "-c", CHECK, str(packages), str(context / "app"), str(context / "bundle")).splitlines()
    assert Path(lines[0]).is_relative_to(packages)


def call(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def blocks(folder: Path) -> int:
    """Return the bytes of whole blocks on disk."""
    return sum((Path(parent) / name).lstat().st_blocks * 512 for parent, _, names in os.walk(folder) for name in names)
