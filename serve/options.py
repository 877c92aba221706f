"""What `python -m serve` can be told on its command line.

What whoever runs a service may say otherwise than the bundle: how much it takes, and how it merges requests.

Who may come in, and whether what is said can be overheard: API keys and TLS, where they are set.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.section import share_of
from pipeline.contract.signing import Trust
from serve.logs import Format
from serve.routes import MODEL_NAME
from serve.runtime.session import Provider
from serve.security import Keys, Pair, Renewed, Tls
from serve.sockets import Address


@dataclass(frozen=True)
class Overrides:
    """None: what the bundle says. The names are the bundle's."""

    max_batch_size: int | None = None
    max_body_bytes: int | None = None
    max_waiting: int | None = None
    deadline_seconds: float | None = None
    max_cache_bytes: int | None = None
    batch_rows: int | None = None
    batch_delay_ms: float | None = None

    def of(self, bundle: Bundle) -> Bundle:
        """The same bundle, digest and all, with these words in its signature; to be proven with them."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        signature = bundle.signature
        parts = {
            part: model.model_copy(update={name: said[name] for name in type(model).model_fields if name in said})
            for part, model in (("limits", signature.limits), ("runtime", signature.runtime))
        }
        return replace(bundle, signature=signature.model_copy(update=parts)) if said else bundle


@dataclass(frozen=True)
class Named:
    name: str  # empty: the bundle's own
    path: Path


@dataclass(frozen=True)
class Options:
    bundles: tuple[Named, ...]  # several of one name are its versions, oldest first
    public: Address
    grpc: Address | None
    standby: Address | None
    provider: Provider | None  # None: what the bundle says
    threads: int | None
    page: bool
    log_format: Format
    log_requests: float  # share of the requests that get a line each
    api_keys: Path | None
    tls: Pair | None
    canary: float = 0.0  # share of the last version of each name that has several; 0: it gets all
    shadows: tuple[Named, ...] = ()
    shadow_share: float = 1.0
    admin: Address | None = None
    admin_token: Path | None = None
    overrides: Overrides = field(default_factory=Overrides)
    keep_versions: int = 2
    trust: Trust | None = None  # whose signature every bundle must bear


def parse(argv: Sequence[str]) -> Options:
    given = _parser().parse_intermixed_args(argv)
    options = Options(
        bundles=_named(given.bundles, given.name),
        public=Address(given.host, given.port),
        grpc=_grpc(given.host, given.port, given.grpc_port),
        standby=None if given.standby is None else Address("127.0.0.1", given.standby),
        provider=given.provider,
        threads=given.threads,
        page=given.page,
        log_format=given.log_format or ("text" if sys.stderr.isatty() else "json"),
        log_requests=given.log_requests,
        api_keys=given.api_keys and given.api_keys.absolute(),
        tls=_pair(given.tls_certificate, given.tls_key),
        canary=given.canary,
        shadows=tuple(_bundle(text) for text in given.shadow),
        shadow_share=given.shadow_share,
        admin=None if given.admin is None else Address("127.0.0.1", given.admin),
        admin_token=given.admin_token,
        overrides=Overrides(**{one.name: getattr(given, one.name) for one in fields(Overrides)}),
        keep_versions=given.keep_versions,
        trust=given.require_signature and Trust(given.require_signature.absolute()),
    )
    _check(options)
    return options


def _check(options: Options) -> None:
    if (options.admin is None) != (options.admin_token is None):
        raise ConfigError("--admin PORT and --admin-token FILE go together: who may change what is served is known")
    found = (options.public, options.grpc, options.standby, options.admin)
    ports = [address.port for address in found if address]
    if len(set(ports)) < len(ports):
        raise ConfigError(f"ports {', '.join(map(str, ports))}: --port, --grpc-port, --standby and --admin must differ")


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
    parser.add_argument("--provider", choices=("auto", "cpu", "cuda"), help="default: what the bundle says")
    parser.add_argument(
        "--threads", type=_unless_empty(_natural), help="threads inside one inference; 0: ONNX Runtime chooses"
    )
    parser.add_argument(
        "--standby",
        type=_port,
        metavar="PORT",
        help="listen on this local port alone until SIGUSR1, then take over the public one",
    )
    _add_limits(parser)
    _add_door(parser)
    _add_rollout(parser)
    _add_logging(parser)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """In place of what the bundle says, which is the default of each."""
    for name, kind, text in (
        ("--max-batch-size", _positive, "most instances in one request"),
        ("--max-body-bytes", _positive, "largest request body, also once it is decompressed"),
        ("--max-waiting", _positive, "most requests that wait; more are answered 503"),
        ("--deadline-seconds", _seconds, "of requests that name none; 0: they wait as long as it takes"),
        ("--max-cache-bytes", _positive, "memory for the keys and values of all texts that are being written"),
        ("--batch-rows", _positive, "most instances that waiting requests are merged to; 1 merges none"),
        ("--batch-delay-ms", _seconds, "longest wait for company, under load only"),
    ):
        parser.add_argument(
            name, type=_unless_empty(kind), metavar="N", help=f"{text} (default, or empty: what the bundle says)"
        )


def _add_door(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="one key a line: who has none is answered 401")
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="PEM; with --tls-key HTTP and gRPC use TLS"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; the certificate's private key")
    parser.add_argument(
        "--require-signature",
        type=Path,
        metavar="FILE",
        help="public keys: a bundle that none of them signed is refused, at the start and whenever one comes in",
    )
    parser.add_argument("--no-page", dest="page", action="store_false", help="no page for people at GET /")


def _pair(certificate: Path | None, key: Path | None) -> Pair | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-certificate and --tls-key go together; give both or neither")
    return Pair(certificate.absolute(), key.absolute())


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    """What lets a new bundle come in without the old one going."""
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
    parser.add_argument(
        "--keep-versions",
        type=_positive,
        default=2,
        metavar="N",
        help="versions of a model that stay loaded after a switch, the current one among them (default: %(default)s)",
    )
    parser.add_argument(
        "--admin", type=_port, metavar="PORT", help="local port to change what is served (default: there is none)"
    )
    parser.add_argument(
        "--admin-token", type=Path, metavar="FILE", help="with --admin: its token, readable by its owner alone"
    )


def _add_logging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-format", choices=("text", "json"), help="default: text on a terminal, else JSON lines")
    parser.add_argument(
        "--log-requests",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of the requests to write a line for, from 0 to 1 (default: %(default)s); failures always get one",
    )


def _named(texts: Sequence[str], name: str) -> tuple[Named, ...]:
    found = tuple(_bundle(text) for text in texts)
    if name and (len(found) > 1 or found[0].name):
        raise ConfigError("--name: is for a single bundle without a name of its own; write NAME=BUNDLE for each")
    return (Named(_model_name(name), found[0].path),) if name else found


def _bundle(text: str) -> Named:
    """`NAME=BUNDLE`, unless it is a directory as it stands."""
    name, mark, path = text.partition("=")
    if not mark or "/" in name or Path(text).is_dir():
        return Named("", Path(text).resolve())
    return Named(_model_name(name), Path(path).resolve())


def _model_name(name: str) -> str:
    if not re.fullmatch(MODEL_NAME, name):
        raise ConfigError(f"{name!r} is no model name; use letters, digits, dots, - and _")
    return name


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


def _unless_empty(kind: Callable[[str], float]) -> Callable[[str], float | None]:
    """A word that a variable of the environment stands for, and that is not set."""

    def read(text: str) -> float | None:
        return kind(text) if text else None

    return read


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:  # nor is NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive number")
    return found


def _share(text: str) -> float:
    try:
        return share_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Door:
    keys: Keys | None = None
    tls: Tls | None = None

    @classmethod
    def of(cls, options: Options) -> Door:
        """Reads the files at once, so that a wrong one is said before anything else is done."""
        keys = None if options.api_keys is None else Keys(options.api_keys)
        return cls(keys, None if options.tls is None else Tls(options.tls))

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Of every HTTP answer."""
        private = [("cache-control", "no-store")] if self.keys else []  # what a key was needed for is not kept
        return [("x-content-type-options", "nosniff"), *private]

    def renewed(self) -> list[Renewed]:
        """What is read anew when its files change."""
        found = []
        if self.keys:
            found.append(Renewed("serve.api_keys", (self.keys.path,), self.keys.reload))
        if self.tls:
            pair = self.tls.pair
            found.append(Renewed("serve.tls_certificate", (pair.certificate, pair.key), self.tls.reload))
        return found
