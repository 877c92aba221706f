"""API keys and TLS; keys and certificates are reloaded when their files change.

Keys are kept as hashes and compared in constant time. HTTP and gRPC use the same certificate.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.system.errors import ConfigError, PipelineError
from serve.errors import Unauthorized

OPEN_RPCS = frozenset({"ServerLive", "ServerReady"})  # for probes, which have no key; ModelReady reveals names

_KEY_REQUIRED = "this service requires an API key: send it as `authorization: Bearer KEY` or `x-api-key: KEY`"
_KEY = re.compile(rb"[!-~]{16,256}")  # as an HTTP header carries it; shorter ones can be guessed
_HASHED = re.compile(rb"sha256:([0-9a-f]{64})")


class ApiKeys:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._hashes = parse_keys(path)

    def reload(self) -> None:
        """Read the file again; one with an error changes nothing."""
        self._hashes = parse_keys(self.path)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise Unauthorized unless a known key came with the request."""
        browser = b"text/html" in headers.get(b"accept", b"")
        if (key := presented_key(headers)) is None:
            raise Unauthorized(_KEY_REQUIRED, browser=browser)
        digest, known = hashlib.sha256(key).digest(), False
        for one in self._hashes:  # all of them, so that the time reveals nothing
            known |= hmac.compare_digest(one, digest)
        if not known:
            raise Unauthorized("the API key is not known here", browser=browser)


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key of a request; a browser sends it as the password of basic authentication."""
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


def parse_keys(path: Path) -> tuple[bytes, ...]:
    """Return the hashes of a file with one key a line, plain or as `sha256:` and its hash; # begins a comment."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"serve.api_keys: {path}: cannot be read: {error.strerror}") from error
    hashes = []
    for number, line in enumerate(map(bytes.strip, lines), 1):
        if not line or line.startswith(b"#"):
            continue
        if hashed := _HASHED.fullmatch(line):
            hashes.append(bytes.fromhex(hashed[1].decode()))
        elif line.startswith(b"sha256:") or not _KEY.fullmatch(line):  # the line itself is never shown
            raise ConfigError(
                f"serve.api_keys: {path}, line {number}: no key; write 16 to 256 characters without spaces, "
                "or sha256: and 64 hex digits; `openssl rand -hex 24` makes one"
            )
        else:
            hashes.append(hashlib.sha256(line).digest())
    if not hashes:
        raise ConfigError(f"serve.api_keys: {path}: contains no key; add one, or remove the setting")
    return tuple(dict.fromkeys(hashes))


_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; HTTP/2 forbids most others


@dataclass(frozen=True)
class CertificatePair:
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
    """The TLS contexts of both ports; a reload is for new connections."""

    def __init__(self, pair: CertificatePair) -> None:
        self.pair = pair
        self.context, self.grpc_context = _context("http/1.1"), _context("h2")
        self.reload()

    def reload(self) -> None:
        """Read the files again; files with an error change nothing."""
        self.pair.load_into(_context(""))  # first into a spare context, so that those in use are never half replaced
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


_POLL_SECONDS = 5.0

log = logging.getLogger(__name__)


# Files of a running service: their name in messages, their paths, and what reads them again. That raises PipelineError,
# and changes nothing, where they have an error.
ReloadedFiles = tuple[str, tuple[Path, ...], Callable[[], None]]


async def reload_changed_files(watched: Sequence[ReloadedFiles], seconds: float = _POLL_SECONDS) -> None:
    """Poll the files until cancelled. An error is logged once for each change of the files."""
    states = [[_state(path) for path in paths] for _, paths, _ in watched]
    while True:
        await asyncio.sleep(seconds)
        for place, (name, paths, reload) in enumerate(watched):
            before, states[place] = states[place], [_state(path) for path in paths]
            if states[place] == before:
                continue
            try:
                reload()
            except PipelineError as error:
                log.error("%s changed and cannot be used, the old one stays: %s", name, error)
            else:
                log.info("%s changed: the new one is in use", name)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file, also when a mounted Secret swaps a symbolic link."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@dataclass(frozen=True)
class Security:
    """The keys and the TLS of the public ports; None where they are off."""

    keys: ApiKeys | None = None
    tls: Tls | None = None

    @classmethod
    def load(cls, api_keys: Path | None, tls: CertificatePair | None) -> Security:
        """Read the files at once, so that an error in them is reported before anything else is done."""
        return cls(None if api_keys is None else ApiKeys(api_keys), None if tls is None else Tls(tls))

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers of every HTTP response; what needs a key is not to be cached."""
        private = [("cache-control", "no-store")] if self.keys else []
        return [("x-content-type-options", "nosniff"), *private]

    def reloaded_files(self) -> list[ReloadedFiles]:
        watched: list[ReloadedFiles] = []
        if self.keys:
            watched.append(("serve.api_keys", (self.keys.path,), self.keys.reload))
        if self.tls:
            pair = self.tls.pair
            watched.append(("serve.tls_certificate", (pair.certificate, pair.key), self.tls.reload))
        return watched
