from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from serve.errors import Unauthorized
from serve.security import ApiKeys, parse_keys, presented_key

FIRST, SECOND = "first-key-0123456789", "second-key-0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    hashed = hashlib.sha256(SECOND.encode()).hexdigest()
    path.write_text(f"# of the tests\n{FIRST}\n\nsha256:{hashed}\n")
    return path


@pytest.mark.parametrize(
    "headers",
    [
        {b"x-api-key": FIRST.encode()},
        {b"authorization": b"Bearer " + FIRST.encode()},
        {b"authorization": b"bearer  " + SECOND.encode()},
        {b"authorization": b"Basic " + base64.b64encode(b"anyone:" + SECOND.encode())},
    ],
)
def test_valid_key_is_accepted_in_every_header(file: Path, headers: dict[bytes, bytes]) -> None:
    ApiKeys(file).check(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"x-api-key": b""},
        {b"x-api-key": FIRST.encode() + b"x"},
        {b"x-api-key": FIRST.encode()[:-1]},
        {b"x-api-key": b"\xff\xfe"},
        {b"x-api-key": b"sha256:" + hashlib.sha256(SECOND.encode()).hexdigest().encode()},
        {b"x-api-key": hashlib.sha256(SECOND.encode()).hexdigest().encode()},
        {b"x-api-key": b"wrong", b"authorization": b"Bearer " + FIRST.encode()},
        {b"authorization": FIRST.encode()},
        {b"authorization": b"Basic ***"},
        {b"authorization": b"Digest " + FIRST.encode()},
    ],
)
def test_other_credentials_are_refused(file: Path, headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthorized) as caught:
        ApiKeys(file).check(headers)
    assert caught.value.headers[0] == (b"www-authenticate", b'Bearer realm="pipe", charset="UTF-8"')
    assert FIRST not in str(caught.value)


def test_browser_gets_a_basic_authentication_challenge(file: Path) -> None:
    with pytest.raises(Unauthorized) as caught:
        ApiKeys(file).check({b"accept": b"text/html,*/*;q=0.8"})
    assert caught.value.headers[0][1].startswith(b"Basic ")


def test_only_hashes_of_keys_are_kept(file: Path) -> None:
    keys = ApiKeys(file)
    assert FIRST not in repr(vars(keys))
    assert all(len(one) == 32 for one in parse_keys(file))


def test_changed_file_is_reloaded_and_an_invalid_one_ignored(file: Path) -> None:
    keys = ApiKeys(file)
    file.write_text("third-key-0123456789\n")
    keys.reload()
    keys.check({b"x-api-key": b"third-key-0123456789"})
    with pytest.raises(Unauthorized):
        keys.check({b"x-api-key": FIRST.encode()})
    file.write_text("")
    with pytest.raises(ConfigError):
        keys.reload()
    keys.check({b"x-api-key": b"third-key-0123456789"})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "contains no key; add one"),
        ("# nothing\n\n", "contains no key"),
        ("short\n", "line 1: no key; write 16 to 256 characters"),
        (f"{FIRST}\nwith a space in between\n", "line 2: no key"),
        ("sha256:abc0123456789\n", "line 1: no key"),
        ("clé-0123456789012345\n", "line 1: no key"),
    ],
)
def test_invalid_file_is_rejected_without_printing_its_content(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_keys(path)
    assert not any(line and line in str(caught.value) for line in text.splitlines())


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: cannot be read: No such file"):
        parse_keys(tmp_path / "absent")


def test_the_password_may_hold_a_colon() -> None:
    assert presented_key({b"authorization": b"Basic " + base64.b64encode(b":a:b")}) == b"a:b"
