"""`python -m serve BUNDLE…`: verify and load the bundles, run their golden requests, and only then listen."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError, PipelineError
from serve.models import LoadedModel
from serve.monitoring.logs import configure, log_fatal, log_fields
from serve.monitoring.tracing import configure_tracing
from serve.options import NamedBundle, Options, parse_options
from serve.process.server import SingleServer
from serve.process.service import Service
from serve.process.sockets import bind_socket
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor
from serve.security import Security
from serve.shadow import Shadow, open_shadow

_SWITCH_INTERVAL_SECONDS = 0.5e-3  # the longest wait of a thread back from an inference for one that decodes
_GC_THRESHOLD = 50_000  # new objects between two collections: a full queue has so many, and no reference cycles

log = logging.getLogger("serve")


def main(argv: Sequence[str]) -> int:
    try:
        options = parse_options(argv)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    gc.disable()  # collecting garbage takes a tenth of the start, and there is none
    try:
        configure(options.log_format)
        return serve(options)
    except PipelineError as error:
        log_fatal(error, options.log_format)
        return error.exit_code


def serve(options: Options) -> int:
    """Bind the ports first, to report one in use at once; listen last, so that nothing unverified answers."""
    security = Security.load(options.api_keys, options.tls)
    if options.check:
        return check(options, security)
    share = "standby" in options.addresses  # then the other ports may still be our predecessor's
    sockets = {
        port: bind_socket(address, share=share and port != "standby") for port, address in options.addresses.items()
    }
    common = (options, sockets, security)
    bundles = [_open(named, options) for named in options.bundles]
    load = partial(_load, bundles)
    if options.workers == 1:
        SingleServer(_service(load(), options, security), *common).run()
        return 0
    from serve.process.workers import Supervisor, share_models  # a single process needs none of it

    loaded = share_models(load, [bundle for _, bundle in bundles])
    supervisor = os.getpid()
    return Supervisor(lambda: _service(loaded or load(), options, security, supervisor), *common).run()


def check(options: Options, security: Security) -> int:
    """Do all that a start does before it listens, as in the build of an image."""
    bundles = [_open(named, options) for named in options.bundles]
    service = _service(_load(bundles), options, security)
    print("ok: golden requests answered:", *(f"{name}={value}" for name, value in service.identity().items()))
    service.close()
    return 0


def tune_garbage_collector() -> None:
    """Exempt what is in memory now from garbage collection, which would stop all requests for a while."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(_GC_THRESHOLD)
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)


def _open(named: NamedBundle, options: Options) -> tuple[str, Bundle]:
    bundle = options.open(named.path)
    name = named.name or bundle.name
    log.info("starting", extra=log_fields(model=name, bundle=bundle.digest[:12]))
    return name, bundle


def _load(bundles: Sequence[tuple[str, Bundle]]) -> list[LoadedModel]:
    loaded = [(name, load_predictor(bundle)) for name, bundle in bundles]
    tune_garbage_collector()
    return loaded


def _service(
    loaded: Sequence[LoadedModel], options: Options, security: Security, served_by: int | None = None
) -> Service:
    shadows = [_shadow(named, options, dict(loaded)) for named in options.shadows]
    return Service(loaded, shadows, options, security, configure_tracing(os.environ), served_by)


def _shadow(named: NamedBundle, options: Options, models: Mapping[str, Predictor]) -> Shadow:
    """Open the shadow of the model that it names, or of the only one."""
    name = named.name or (next(iter(models)) if len(models) == 1 else "")
    if name not in models:
        raise ConfigError(f"--shadow {named.path}: which model? Write NAME=BUNDLE with one of {', '.join(models)}")
    return open_shadow(name, named.path, models[name].signature, options.shadow_share, options.trust)


def _exit_on_signal(number: int, _frame: object) -> None:
    """End at once while starting; the first process of a container gets no signal that it does not handle."""
    os._exit(128 + number)


def _exit(code: int) -> None:
    """End without taking the interpreter apart, which would cost every restart half a second."""
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, _exit_on_signal)
    _exit(main(sys.argv[1:]))
