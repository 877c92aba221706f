"""API keys: who may ask. Kept as hashes, compared in constant time, read again when their file changes.

TLS for HTTP and gRPC from one certificate, taken up anew when its files change.

Files that may change under a running service, such as keys and certificates: looked at now and then, read anew.

The token of the admin interface: a file that its owner alone can read.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import os
import re
import ssl
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.errors import ConfigError, PipelineError
from serve.errors import Unauthorized

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


_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; HTTP/2 forbids most others


@dataclass(frozen=True)
class Pair:
    """A certificate with its chain, and its private key, both PEM."""

    certificate: Path
    key: Path

    def load_into(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certificate, self.key, _no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"serve.tls_certificate {self.certificate}, serve.tls_key {self.key}: cannot be used: {error}; "
                "both are PEM files, and the key is that certificate's and has no password"
            ) from error


class Tls:
    """What both servers use; a reload is for the connections to come."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.context, self.grpc_context = _context("http/1.1"), _context("h2")
        self.reload()

    def reload(self) -> None:
        """As the files are now. Files that are wrong change nothing."""
        self.pair.load_into(_context(""))  # half a replacement, on trial: the context in use stays whole
        self.pair.load_into(self.context)
        self.pair.load_into(self.grpc_context)


def _context(protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    if protocol:
        context.set_alpn_protocols([protocol])
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renewed:
    """`reload` raises PipelineError and changes nothing where the files are wrong."""

    what: str
    paths: tuple[Path, ...]
    reload: Callable[[], None]


async def keep(renewed: Sequence[Renewed], seconds: float = _SECONDS) -> None:
    """Until it is cancelled. Files that are wrong are said once for each change of theirs."""
    seen = {one: _state(one) for one in renewed}
    while True:
        await asyncio.sleep(seconds)
        for one in renewed:
            if (state := _state(one)) == seen[one]:
                continue
            seen[one] = state
            try:
                one.reload()
            except PipelineError as error:
                log.error("%s changed and cannot be used, the old one stays: %s", one.what, error)
            else:
                log.info("%s changed: the new one is in use", one.what)


def _state(one: Renewed) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes with a file's content, also where a mounted Secret swaps a symbolic link."""
    return tuple(_stat(path) for path in one.paths)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


_SHORTEST = 32


def read_token(path: Path) -> str:
    """Refused where others could have read it."""
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token {path}: cannot be read ({error})") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--admin-token {path}: others may read it; chmod 600 {path}")
    if len(text) < _SHORTEST:
        raise ConfigError(f"--admin-token {path}: shorter than {_SHORTEST} characters; write a random one")
    return text


def opens(given: bytes, token: str) -> bool:
    """Whether an `authorization` header carries it; the time it takes tells nothing."""
    return hmac.compare_digest(given, b"Bearer " + token.encode())
