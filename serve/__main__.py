"""`python -m serve BUNDLE…`: verify, load, ask the golden requests, and only then listen."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.contract.bundle import open_bundle
from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.processes import hide_packages
from serve.loading import prove
from serve.logs import configure, fatal, told
from serve.options import Door, Named, Options, parse
from serve.runtime.predictor import Predictor
from serve.security import read_token
from serve.shadow import Shadow, open_shadow
from serve.sockets import Sockets, reserve
from serve.tracing import configured

if TYPE_CHECKING:
    from serve.server import Service


_TURN_SECONDS = 0.5e-3  # a thread that comes from an inference waits so long, at most, for one that reads
_GARBAGE = 10_000  # new objects between two looks at the youngest; a request leaves none in circles

log = logging.getLogger("serve")


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    gc.disable()  # nothing that is made while we start is garbage; looking for some takes a tenth of the time
    try:
        configure(options.log_format)
        serve(options)
    except PipelineError as error:
        fatal(error, options.log_format)
        return error.exit_code
    return 0


def serve(options: Options) -> None:
    """Ports first, so that one in use is said at once; listening last, so that nothing unproven answers."""
    door = Door.of(options)
    share = options.standby is not None  # on stand-by the public port may be our predecessor's
    public = reserve(options.public, share=share)
    standby = None if options.standby is None else reserve(options.standby, share=False)
    grpc = None if options.grpc is None else reserve(options.grpc, share=share)
    admin = None if options.admin is None else reserve(options.admin, share=False)
    token = None if options.admin_token is None else read_token(options.admin_token)
    loaded = [_load(named, options) for named in options.bundles]
    shadows = [_shadow(named, options, dict(loaded)) for named in options.shadows]
    service = service_class()(
        loaded, shadows, options, Sockets(public, standby, admin, grpc), door, token, configured(os.environ)
    )
    settle()
    service.start(service.models)


def service_class() -> type[Service]:
    """Imported late: kserve reads sys.argv and takes a second."""
    with hide_packages("kubernetes_validate"):
        from serve.server import Service
    return Service


def settle() -> None:
    """What is in memory now stays: looking through it again and again would stop all requests for a while."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(_GARBAGE)
    sys.setswitchinterval(_TURN_SECONDS)


def _load(named: Named, options: Options) -> tuple[str, Predictor]:
    bundle = options.overrides.of(open_bundle(named.path, options.trust))
    name = named.name or bundle.name
    log.info("starting", extra=told(model=name, bundle=bundle.digest[:12]))
    return name, prove(bundle, options.provider, options.threads)


def _shadow(named: Named, options: Options, models: Mapping[str, Predictor]) -> Shadow:
    """Of the model it names, or of the only one."""
    name = named.name or (next(iter(models)) if len(models) == 1 else "")
    if name not in models:
        raise ConfigError(f"--shadow {named.path}: of which model? Write NAME=BUNDLE with one of {', '.join(models)}")
    return open_shadow(name, named.path, models[name].signature, options.shadow_share, options.trust)


def _leave(number: int, _frame: object) -> None:
    """Told to end before there is anything to answer; the first process of a container hears no signal but by this."""
    os._exit(128 + number)


def _end(code: int) -> None:
    """All is answered and told: taking the interpreter apart would cost every restart another half a second."""
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    _end(main(sys.argv[1:]))
