from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from serve.security import is_token, read_token

TOKEN = "t" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_a_token_opens_and_nothing_else_does(file: Path) -> None:
    token = read_token(file)
    assert is_token(f"Bearer {TOKEN}".encode(), token)
    for given in (b"", TOKEN.encode(), f"bearer {TOKEN}".encode(), f"Bearer {TOKEN}x".encode(), b"Bearer \xff"):
        assert not is_token(given, token)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_file_that_others_may_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match="others can read it; to fix it: chmod 600"):
        read_token(file)


def test_a_short_or_missing_token_is_refused(file: Path) -> None:
    file.write_text("short")
    with pytest.raises(ConfigError, match="shorter than 32 characters"):
        read_token(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(file.parent / "none")
