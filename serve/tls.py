"""TLS for HTTP and gRPC from one certificate, taken up anew when its files change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pipeline.spec.errors import ConfigError

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
