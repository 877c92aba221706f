"""The peers' own environment: what is installed here stays visible, so that torch is not installed twice."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from pipeline.system.errors import ResourceError
from pipeline.system.files import digest_bytes

PINS = Path(__file__).resolve().parents[1] / "peers.txt"


def peers_python(folder: Path) -> Path:
    """Return a Python that can import the peers; it is installed at the first call and after the pins changed."""
    digest = digest_bytes(PINS.read_bytes() + sys.version.encode())
    installed_digest, python = folder / "installed", folder / "bin" / "python"
    if installed_digest.exists() and installed_digest.read_text() == digest:
        return python
    try:
        venv.create(folder, clear=True)
        _see_what_is_here(folder)
        _install(python, PINS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"no environment for the peers in {folder}: {error}") from error
    installed_digest.write_text(digest)
    return python


def _see_what_is_here(folder: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _install(python: Path, pins: Path) -> None:
    argv = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pins)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise ResourceError(f"the peers cannot be installed: {errors[-1][:300]}")
