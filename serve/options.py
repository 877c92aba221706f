"""The command line of `python -m serve`, parsed and checked; some options override limits of the bundle."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.settings.section import parse_share
from pipeline.contract.signature import OPTIONS, Limits, Runtime, parse_option
from pipeline.contract.signing import Trust
from pipeline.system.errors import ConfigError
from serve.limits import divide
from serve.monitoring.logs import Format
from serve.process.sockets import Address
from serve.routes import MODEL_NAME
from serve.sampling import SamplingOptions
from serve.security import CertificatePair


@dataclass(frozen=True)
class NamedBundle:
    name: str  # empty: the bundle's own
    path: Path


@dataclass(frozen=True)
class Options:
    bundles: tuple[NamedBundle, ...]  # several of one name are its versions, oldest first
    addresses: Mapping[str, Address]  # of http, and where there are such ports grpc, standby and health
    page: bool
    log_format: Format
    log_requests: float  # share of the requests that get a line each
    sampling: SamplingOptions
    api_keys: Path | None
    tls: CertificatePair | None
    canary: float  # share of requests for the last version of a name that has several; 0: it gets all
    shadows: tuple[NamedBundle, ...]
    shadow_share: float
    overrides: Mapping[str, Any]  # of the bundle's limits and runtime
    trust: Trust | None  # every bundle must be signed by one of these keys
    workers: int  # processes
    check: bool  # end after the golden requests

    def open(self, path: Path) -> Bundle:
        """Verify a bundle and return it, digest and all, with the overrides in its signature.

        Several workers divide the queue, the KV cache and the cores.
        """
        bundle = open_bundle(path, self.trust)
        signature = bundle.signature
        values = {**dict(signature.limits), **dict(signature.runtime), **self.overrides}
        if self.workers > 1:
            values |= {name: divide(values[name], self.workers) for name in ("max_waiting", "max_cache_bytes")}
            values["threads"] = values["threads"] or divide(usable_cores(), self.workers)
        limits = Limits(**{name: values[name] for name in Limits.model_fields})
        runtime = Runtime(**{name: values[name] for name in Runtime.model_fields})
        return replace(bundle, signature=signature.model_copy(update={"limits": limits, "runtime": runtime}))


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use, by its affinity and the CPU limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):  # no cgroup of version 2
        return cores
    return cores if limit == "max" else max(1, min(cores, int(limit) // int(period)))


def parse_options(argv: Sequence[str]) -> Options:
    given = vars(_parser().parse_intermixed_args(argv))
    take = given.pop
    host, port, standby, health_port = take("host"), take("port"), take("standby"), take("health_port")
    addresses = {
        "http": Address(host, port),
        "grpc": _grpc_address(host, port, take("grpc_port")),
        "standby": standby and Address("127.0.0.1", standby),
        "health": health_port and Address(host, health_port),
    }
    options = Options(
        bundles=_named_bundles(take("bundles"), take("name")),
        addresses={name: address for name, address in addresses.items() if address},
        tls=_certificate_pair(take("tls_certificate"), take("tls_key")),
        shadows=tuple(take("shadows")),
        sampling=SamplingOptions(*(take(name) for name in ("sample", "sample_to", "sample_max_bytes", "sample_url"))),
        overrides={name: value for name in OPTIONS if (value := take(name)) is not None},
        **given,
    )
    if options.sampling.share and not (options.sampling.folder or options.sampling.url):
        raise ConfigError("--sample: where to? Add --sample-to with a folder or URL for files, or --sample-url")
    if (url := options.sampling.url) and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--sample-url: {url} is no http:// or https:// address")
    ports = [address.port for address in options.addresses.values()]
    if len(set(ports)) < len(ports):
        names = ", ".join(map(str, ports))
        raise ConfigError(f"ports {names}: --port, --grpc-port, --health-port and --standby must differ")
    return options


def _parser() -> argparse.ArgumentParser:
    description = "Serve a bundle over HTTP and gRPC."
    parser = argparse.ArgumentParser("python -m serve", description=description, allow_abbrev=False)
    text = "bundle directory; several are several models, or versions of one where the name is the same"
    parser.add_argument("bundles", nargs="+", metavar="[NAME=]BUNDLE", help=text)
    parser.add_argument("--name", default="", help="model name in URLs of a single bundle (default: its own)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8080, help="HTTP port (default: %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=0, help="gRPC port; 0: HTTP port plus 1, -1: no gRPC")
    text = "port of /v2/health for probes, answered by a thread of its own, without TLS (default: none)"
    parser.add_argument("--health-port", type=_port, metavar="PORT", help=text)
    text = "processes that share the ports and the weights; auto: one for each usable core (default: %(default)s)"
    parser.add_argument("--workers", type=_workers, default=1, metavar="N", help=text)
    text = "listen on this local port alone until SIGUSR1, then take over the public one"
    parser.add_argument("--standby", type=_port, metavar="PORT", help=text)
    text = "load the bundles, run their golden requests, and exit without listening"
    parser.add_argument("--check", action="store_true", help=text)
    _add_bundled(parser)
    _add_security(parser)
    _add_rollout(parser)
    _add_logging(parser)
    _add_sampling(parser)
    return parser


def _add_bundled(parser: argparse.ArgumentParser) -> None:
    """Add the options that override settings of the bundle."""
    for name, setting in OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_with_reason(partial(parse_option, name)),
            metavar="|".join(get_args(setting.annotation)) or None,
            help=f"{setting.description} (default, or empty: that of the bundle)",
        )


def _add_security(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-keys", type=_absolute, metavar="FILE", help="API keys, one a line; else 401")
    text = "PEM; with --tls-key HTTP and gRPC use TLS"
    parser.add_argument("--tls-certificate", type=_absolute, metavar="FILE", help=text)
    parser.add_argument("--tls-key", type=_absolute, metavar="FILE", help="PEM; the certificate's private key")
    text = "public keys; a bundle that none of them signed is refused, at the start and later"
    parser.add_argument(
        "--require-signature", dest="trust", type=lambda path: Trust(_absolute(path)), metavar="FILE", help=text
    )
    parser.add_argument("--no-page", dest="page", action="store_false", help="no page for browsers at GET /")


def _certificate_pair(certificate: Path | None, key: Path | None) -> CertificatePair | None:
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-certificate and --tls-key go together; give both or neither")
    return None if certificate is None or key is None else CertificatePair(certificate, key)


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    """Add the options for replacing a bundle while the service runs."""
    share = _with_reason(parse_share)
    text = "give the last version of a name only this share of the requests, as in 10%%, and the rest to the first"
    parser.add_argument("--canary", type=share, default=0.0, metavar="SHARE", help=text)
    text = "send copies of a model's requests to this bundle too and count how its answers differ"
    parser.add_argument(
        "--shadow", dest="shadows", type=_named_bundle, action="append", default=[], metavar="[NAME=]BUNDLE", help=text
    )
    parser.add_argument("--shadow-share", type=share, default=1.0, metavar="SHARE", help="of requests (default: all)")


def _add_logging(parser: argparse.ArgumentParser) -> None:
    default, text = "text" if sys.stderr.isatty() else "json", "default: text on a terminal, else JSON lines"
    parser.add_argument("--log-format", choices=("text", "json"), default=default, help=text)
    text = "share of the requests that get a log line, from 0 to 1 (default: %(default)s); failures always do"
    parser.add_argument("--log-requests", type=_with_reason(parse_share), default=0.0, metavar="SHARE", help=text)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options for keeping requests and answers for `pipe monitor`."""
    text = "share of the requests to keep with their answers; POST /feedback then takes labels (default: none)"
    parser.add_argument("--sample", type=_with_reason(parse_share), default=0.0, metavar="SHARE", help=text)
    text = "folder or fsspec URL for Parquet files of samples and labels"
    parser.add_argument("--sample-to", default="", metavar="FOLDER|URL", help=text)
    text = "bytes of samples to keep; then the oldest files are deleted (default: %(default)s)"
    parser.add_argument("--sample-max-bytes", type=int, default=1 << 30, metavar="BYTES", help=text)
    text = "send each sample to this URL too, as CloudEvents like those of KServe's inference logger"
    parser.add_argument("--sample-url", default="", metavar="URL", help=text)


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


def _workers(text: str) -> int:
    if text == "auto":
        return usable_cores()
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _with_reason(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print the message of a ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
