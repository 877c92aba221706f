"""The command line of `python -m serve`, parsed and checked; some options override limits of the bundle."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.settings.section import parse_share
from pipeline.contract.signing import Trust
from pipeline.system.errors import ConfigError
from serve.monitoring.logs import Format
from serve.process.limits import divide
from serve.process.sockets import Address
from serve.routes import MODEL_NAME
from serve.runtime.session import Provider
from serve.security import CertificatePair


@dataclass(frozen=True)
class Overrides:
    """Limits in place of those of the bundle, under the same names; None keeps that of the bundle."""

    max_batch_size: int | None = None
    max_body_bytes: int | None = None
    max_waiting: int | None = None
    deadline_seconds: float | None = None
    max_cache_bytes: int | None = None
    batch_rows: int | None = None
    batch_delay_ms: float | None = None

    def apply(self, bundle: Bundle, workers: int = 1) -> Bundle:
        """Return the same bundle, digest and all, with these limits in its signature, to be verified with them.

        Several processes divide the queue and the KV cache.
        """
        given = {name: value for name, value in asdict(self).items() if value is not None}
        signature = bundle.signature
        for name in ("max_waiting", "max_cache_bytes") if workers > 1 else ():
            given[name] = divide(given.get(name, getattr(signature.limits, name)), workers)
        parts = {
            part: model.model_copy(update={name: given[name] for name in type(model).model_fields if name in given})
            for part, model in (("limits", signature.limits), ("runtime", signature.runtime))
        }
        return replace(bundle, signature=signature.model_copy(update=parts)) if given else bundle


@dataclass(frozen=True)
class NamedBundle:
    name: str  # empty: the bundle's own
    path: Path


@dataclass(frozen=True)
class Options:
    bundles: tuple[NamedBundle, ...]  # several of one name are its versions, oldest first
    public: Address
    grpc: Address | None
    standby: Address | None
    health: Address | None
    provider: Provider | None  # None: that of the bundle
    threads: int | None
    page: bool
    log_format: Format
    log_requests: float  # share of the requests that get a line each
    api_keys: Path | None
    tls: CertificatePair | None
    canary: float = 0.0  # share of requests for the last version of a name that has several; 0: it gets all
    shadows: tuple[NamedBundle, ...] = ()
    shadow_share: float = 1.0
    overrides: Overrides = field(default_factory=Overrides)
    trust: Trust | None = None  # every bundle must be signed by one of these keys
    workers: int = 1  # processes
    check: bool = False  # end after the golden requests

    def open(self, path: Path) -> Bundle:
        """Verify a bundle and return it with its limits overridden."""
        return self.overrides.apply(open_bundle(path, self.trust), self.workers)

    def intra_op_threads(self, bundle: Bundle) -> int:
        """Return the threads inside one inference; 0: ONNX Runtime chooses. Workers divide the cores."""
        threads = bundle.signature.runtime.threads if self.threads is None else self.threads
        return threads or (0 if self.workers == 1 else max(1, usable_cores() // self.workers))


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use, by its affinity and the CPU limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):  # no cgroup of version 2
        return cores
    return cores if limit == "max" else max(1, min(cores, int(limit) // int(period)))


def parse_options(argv: Sequence[str]) -> Options:
    given = _parser().parse_intermixed_args(argv)
    options = Options(
        bundles=_named_bundles(given.bundles, given.name),
        public=Address(given.host, given.port),
        grpc=_grpc_address(given.host, given.port, given.grpc_port),
        standby=None if given.standby is None else Address("127.0.0.1", given.standby),
        health=None if given.health_port is None else Address(given.host, given.health_port),
        provider=given.provider,
        threads=given.threads,
        page=given.page,
        log_format=given.log_format or ("text" if sys.stderr.isatty() else "json"),
        log_requests=given.log_requests,
        api_keys=given.api_keys and given.api_keys.absolute(),
        tls=_certificate_pair(given.tls_certificate, given.tls_key),
        canary=given.canary,
        shadows=tuple(_named_bundle(text) for text in given.shadow),
        shadow_share=given.shadow_share,
        overrides=Overrides(**{one.name: getattr(given, one.name) for one in fields(Overrides)}),
        workers=given.workers,
        check=given.check,
        trust=given.require_signature and Trust(given.require_signature.absolute()),
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    addresses = (options.public, options.grpc, options.standby, options.health)
    ports = [address.port for address in addresses if address]
    if len(set(ports)) < len(ports):
        raise ConfigError(
            f"ports {', '.join(map(str, ports))}: --port, --grpc-port, --health-port and --standby must differ"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m serve", description="Serve a bundle over HTTP and gRPC.", allow_abbrev=False
    )
    parser.add_argument(
        "bundles",
        nargs="+",
        metavar="[NAME=]BUNDLE",
        help="bundle directory; several are several models, or versions of one where the name is the same",
    )
    parser.add_argument("--name", default="", help="model name in URLs of a single bundle (default: its own)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8080, help="HTTP port (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=0, help="gRPC port; 0: HTTP port plus 1, -1: no gRPC")
    parser.add_argument(
        "--health-port",
        type=_port,
        metavar="PORT",
        help="port of /v2/health for probes, answered by a thread of its own, without TLS (default: none)",
    )
    parser.add_argument("--provider", choices=("auto", "cpu", "cuda", "tensorrt"), help="default: that of the bundle")
    parser.add_argument(
        "--threads", type=_unless_empty(_natural), help="threads inside one inference; 0: ONNX Runtime chooses"
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        default=1,
        metavar="N",
        help="processes that share the ports and the weights; auto: one for each usable core (default: %(default)s)",
    )
    parser.add_argument(
        "--standby",
        type=_port,
        metavar="PORT",
        help="listen on this local port alone until SIGUSR1, then take over the public one",
    )
    parser.add_argument(
        "--check", action="store_true", help="load the bundles, run their golden requests, and exit without listening"
    )
    _add_limits(parser)
    _add_security(parser)
    _add_rollout(parser)
    _add_logging(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that override limits of the bundle."""
    for name, kind, text in (
        ("--max-batch-size", _positive, "most instances in one request"),
        ("--max-body-bytes", _positive, "largest request body, also once it is decompressed"),
        ("--max-waiting", _positive, "most requests that wait; more get 503"),
        ("--deadline-seconds", _seconds, "for requests that name none; 0: they wait as long as it takes"),
        ("--max-cache-bytes", _positive, "memory for the KV cache of all texts that are being generated"),
        ("--batch-rows", _positive, "most instances that waiting requests are merged to; 1 merges none"),
        ("--batch-delay-ms", _seconds, "longest wait for more requests to merge, under load only"),
    ):
        parser.add_argument(
            name, type=_unless_empty(kind), metavar="N", help=f"{text} (default, or empty: that of the bundle)"
        )


def _add_security(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="API keys, one a line; else 401")
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="PEM; with --tls-key HTTP and gRPC use TLS"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; the certificate's private key")
    parser.add_argument(
        "--require-signature",
        type=Path,
        metavar="FILE",
        help="public keys; a bundle that none of them signed is refused, at the start and later",
    )
    parser.add_argument("--no-page", dest="page", action="store_false", help="no page for browsers at GET /")


def _certificate_pair(certificate: Path | None, key: Path | None) -> CertificatePair | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-certificate and --tls-key go together; give both or neither")
    return CertificatePair(certificate.absolute(), key.absolute())


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    """Add the options for replacing a bundle while the service runs."""
    parser.add_argument(
        "--canary",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="give the last version of a name only this share of the requests, as in 10%%, and the rest to the first",
    )
    parser.add_argument(
        "--shadow",
        action="append",
        default=[],
        metavar="[NAME=]BUNDLE",
        help="send copies of a model's requests to this bundle too and count how its answers differ",
    )
    parser.add_argument("--shadow-share", type=_share, default=1.0, metavar="SHARE", help="of requests (default: all)")


def _add_logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-format", choices=("text", "json"), help="default: text on a terminal, else JSON lines")
    parser.add_argument(
        "--log-requests",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of the requests that get a log line, from 0 to 1 (default: %(default)s); failures always do",
    )


def _named_bundles(texts: Sequence[str], name: str) -> tuple[NamedBundle, ...]:
    bundles = tuple(_named_bundle(text) for text in texts)
    if name and (len(bundles) > 1 or bundles[0].name):
        raise ConfigError("--name: only for a single bundle without NAME=; write NAME=BUNDLE for each")
    return (NamedBundle(_model_name(name), bundles[0].path),) if name else bundles


def _named_bundle(text: str) -> NamedBundle:
    """Parse `NAME=BUNDLE`, unless a directory has this very name."""
    name, mark, path = text.partition("=")
    if not mark or "/" in name or Path(text).is_dir():
        return NamedBundle("", Path(text).resolve())
    return NamedBundle(_model_name(name), Path(path).resolve())


def _model_name(name: str) -> str:
    if not re.fullmatch(MODEL_NAME, name):
        raise ConfigError(f"{name!r} is not a model name; use letters, digits, dots, - and _")
    return name


def _grpc_address(host: str, http_port: int, grpc_port: int) -> Address | None:
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


def _unless_empty(kind: Callable[[str], float]) -> Callable[[str], float | None]:
    """Accept an empty text as no value: that of an environment variable that is not set."""

    def read(text: str) -> float | None:
        return kind(text) if text else None

    return read


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return int(text)


def _workers(text: str) -> int:
    return usable_cores() if text == "auto" else _positive(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:  # NaN is neither
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return seconds


def _share(text: str) -> float:
    try:
        return parse_share(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
