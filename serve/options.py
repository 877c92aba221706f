"""What `python -m serve` can be told on its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.spec.errors import ConfigError
from serve.logs import Format
from serve.session import Provider
from serve.sockets import Address
from serve.tls import Pair


@dataclass(frozen=True)
class Options:
    bundle: Path
    name: str  # empty: the bundle's own
    public: Address
    grpc: Address | None
    standby: Address | None
    provider: Provider | None  # None: what the bundle says
    threads: int | None
    log_format: Format
    log_requests: float  # share of the requests that get a line each
    api_keys: Path | None
    tls: Pair | None


def parse(argv: Sequence[str]) -> Options:
    given = _parser().parse_args(argv)
    options = Options(
        bundle=given.bundle.resolve(),
        name=given.name,
        public=Address(given.host, given.port),
        grpc=_grpc(given.host, given.port, given.grpc_port),
        standby=None if given.standby is None else Address("127.0.0.1", given.standby),
        provider=given.provider,
        threads=given.threads,
        log_format=given.log_format or ("text" if sys.stderr.isatty() else "json"),
        log_requests=given.log_requests,
        api_keys=given.api_keys and given.api_keys.absolute(),
        tls=_pair(given.tls_certificate, given.tls_key),
    )
    ports = [address.port for address in (options.public, options.grpc, options.standby) if address]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"ports {', '.join(map(str, ports))}: --port, --grpc-port and --standby must differ")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m serve", description="Serve a bundle over HTTP and gRPC.", allow_abbrev=False
    )
    parser.add_argument("bundle", type=Path, help="bundle directory")
    parser.add_argument("--name", default="", help="model name in URLs (default: the bundle's)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8080, help="HTTP port (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=0, help="gRPC port; 0: HTTP port plus 1, -1: no gRPC")
    parser.add_argument("--provider", choices=("auto", "cpu", "cuda"), help="default: what the bundle says")
    parser.add_argument("--threads", type=_natural, help="threads inside one inference; 0: ONNX Runtime chooses")
    parser.add_argument(
        "--standby",
        type=_port,
        metavar="PORT",
        help="listen on this local port alone until SIGUSR1, then take over the public one",
    )
    _add_door(parser)
    _add_logging(parser)
    return parser


def _add_door(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="one key a line: who has none is answered 401")
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="PEM; with --tls-key HTTP and gRPC use TLS"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; the certificate's private key")


def _pair(certificate: Path | None, key: Path | None) -> Pair | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-certificate and --tls-key go together; give both or neither")
    return Pair(certificate.absolute(), key.absolute())


def _add_logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-format", choices=("text", "json"), help="default: text on a terminal, else JSON lines")
    parser.add_argument(
        "--log-requests",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of the requests to write a line for, from 0 to 1 (default: %(default)s); failures always get one",
    )


def _grpc(host: str, http_port: int, grpc_port: int) -> Address | None:
    if grpc_port == -1:
        return None
    port = grpc_port or http_port + 1
    if not 1 <= port <= 65535:
        raise ConfigError(f"--grpc-port: {port} is no port; name one from 1 to 65535, or -1 for none")
    return Address(host, port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; name one from 1 to 65535")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; name one from 0 to 1")
    return share
