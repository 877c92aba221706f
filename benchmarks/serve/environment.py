"""Each peer's own environment: they cannot agree on what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.system.errors import ResourceError
from pipeline.system.files import digest_bytes

PINS = Path(__file__).with_name("pins")
FOLDER = Path(__file__).resolve().parents[1] / ".peers" / "serve"


def python_of(peer: str, base: str = sys.executable, folder: Path = FOLDER) -> Path:
    """Return a Python that can import the peer; it is installed at the first call and after its pins changed."""
    pins = PINS / f"{peer}.txt"
    digest = digest_bytes(pins.read_bytes() + base.encode())
    home = folder / peer
    installed_digest, python = home / "installed", home / "bin" / "python"
    if installed_digest.exists() and installed_digest.read_text() == digest:
        return python
    print(f"installing {peer} into {home}", file=sys.stderr)
    _do([base, "-m", "venv", "--clear", str(home)], peer)
    _do([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(pins)], peer)
    installed_digest.write_text(digest)
    return python


def _do(argv: list[str], peer: str) -> None:
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"{peer} cannot be installed: {error}") from error
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["it ended with an error"]
        raise ResourceError(f"{peer} cannot be installed: {errors[-1][:300]}")
