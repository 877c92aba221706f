"""API keys: who may ask. Kept as hashes, compared in constant time, read again when their file changes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.spec.errors import ConfigError
from serve.refusal import Unauthorized

OPEN_RPCS = frozenset({"ServerLive", "ServerReady", "ModelReady"})  # what probes ask, which have no key

_WANTED = "this service asks for an API key: send it as `authorization: Bearer KEY` or `x-api-key: KEY`"
_KEY = re.compile(rb"[!-~]{16,256}")  # as an HTTP header carries it; shorter ones can be guessed
_HASHED = re.compile(rb"sha256:([0-9a-f]{64})")


class Keys:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._hashes = parse(path)

    def reload(self) -> None:
        """As the file is now. A file that is wrong changes nothing."""
        self._hashes = parse(self.path)

    def admit(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise Unauthorized unless a known key came with the request."""
        browser = b"text/html" in headers.get(b"accept", b"")
        if (key := presented(headers)) is None:
            raise Unauthorized(_WANTED, browser=browser)
        found, known = hashlib.sha256(key).digest(), False
        for one in self._hashes:  # all of them: the time tells nothing
            known |= hmac.compare_digest(one, found)
        if not known:
            raise Unauthorized("the API key is not known here", browser=browser)


def presented(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key of a request; a browser, which asks people for a name and a password, sends it as the password."""
    if (key := headers.get(b"x-api-key")) is not None:
        return key
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return None
    return None


def parse(path: Path) -> tuple[bytes, ...]:
    """One key a line, in clear or as `sha256:` and its hash; empty lines and those that begin with # do not count."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"serve.api_keys: {path}: cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(map(bytes.strip, lines), 1):
        if not line or line.startswith(b"#"):
            continue
        if hashed := _HASHED.fullmatch(line):
            found.append(bytes.fromhex(hashed[1].decode()))
        elif line.startswith(b"sha256:") or not _KEY.fullmatch(line):  # the line itself is never told
            raise ConfigError(
                f"serve.api_keys: {path}, line {number}: no key; write 16 to 256 characters without spaces, "
                "or sha256: and 64 hex digits; `openssl rand -hex 24` makes one"
            )
        else:
            found.append(hashlib.sha256(line).digest())
    if not found:
        raise ConfigError(f"serve.api_keys: {path}: holds no key, so nobody could ask; add one, or leave the word out")
    return tuple(dict.fromkeys(found))
