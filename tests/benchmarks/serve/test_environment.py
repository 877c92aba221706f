"""Environments of peers: an error of the installation is one line, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serve import environment
from benchmarks.serve.environment import python_of
from pipeline.system.errors import ResourceError
from pipeline.system.files import digest_bytes


def test_missing_interpreter_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="granian cannot be installed"):
        python_of("granian", str(tmp_path / "python"), tmp_path)


def test_an_environment_is_kept_until_its_pins_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PINS", tmp_path)
    (tmp_path / "peer.txt").write_text("peer==1\n")
    (tmp_path / "peer").mkdir()
    python = str(tmp_path / "python")  # does not exist, so nothing can be installed
    (tmp_path / "peer" / "installed").write_text(digest_bytes(f"peer==1\n{python}".encode()))
    assert python_of("peer", python, tmp_path) == tmp_path / "peer" / "bin" / "python"
    (tmp_path / "peer.txt").write_text("peer==2\n")
    with pytest.raises(ResourceError):
        python_of("peer", python, tmp_path)
