"""The peers' own environment: what is installed here stays visible, so that torch is not installed twice."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from pipeline.contract.errors import ResourceError
from pipeline.contract.files import digest_bytes

PINS = Path(__file__).resolve().parents[1] / "peers.txt"


def peers_python(folder: Path) -> Path:
    """An interpreter that can import the peers, installed at the first call and after the pins changed."""
    wanted = digest_bytes(PINS.read_bytes() + sys.version.encode())
    mark, python = folder / "installed", folder / "bin" / "python"
    if mark.exists() and mark.read_text() == wanted:
        return python
    try:
        venv.create(folder, clear=True)
        _see_what_is_here(folder)
        _install(python, PINS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"no environment for the peers in {folder}: {error}") from error
    mark.write_text(wanted)
    return python


def _see_what_is_here(folder: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _install(python: Path, pins: Path) -> None:
    argv = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pins)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise ResourceError(f"the peers cannot be installed: {errors[-1][:300]}")
