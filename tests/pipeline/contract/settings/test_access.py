from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Serve
from pipeline.system.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text("# mine\nfirst-key-0123456789\n\nsecond-key-0123456789\n")
    for name in ("crt", "key"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_paths_are_relative_to_the_root_and_defaults_add_no_options(root: Path) -> None:
    access = Access.from_settings(Serve(api_keys="keys", tls_certificate="crt", tls_key=str(root / "key")), root)
    expected = ["--api-keys", root / "keys", "--tls-certificate", root / "crt", "--tls-key", root / "key"]
    assert access.options == list(map(str, expected))
    assert access.scheme == "https"
    assert access.without_tls.options == ["--api-keys", str(root / "keys")]
    access = Access.from_settings(Serve(), root)
    assert (access.options, access.headers(), access.scheme) == ([], {}, "http")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"api_keys": "absent"}, r"serve.api_keys: .*absent: no such file"),
        ({"tls_key": "key"}, "go together"),
        ({"tls_certificate": "crt"}, "go together"),
    ],
)
def test_missing_files_and_incomplete_tls_are_refused(root: Path, words: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Access.from_settings(Serve(**words), root)


def test_own_requests_send_the_first_key_or_that_of_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = Access.from_settings(Serve(api_keys="keys"), root)
    assert access.headers() == {"x-api-key": "first-key-0123456789"}
    monkeypatch.setenv("PIPE_API_KEY", "another")
    assert access.headers() == {"x-api-key": "another"}


def test_hashed_keys_cannot_be_sent(root: Path) -> None:
    access = Access.from_settings(Serve(api_keys="keys"), root)
    hashed = access.hashed_keys()
    assert hashed.splitlines()[0] == f"sha256:{hashlib.sha256(b'first-key-0123456789').hexdigest()}"
    (root / "keys").write_text(hashed)
    assert access.hashed_keys() == hashed
    with pytest.raises(ConfigError, match="has only hashes; set PIPE_API_KEY"):
        access.headers()
