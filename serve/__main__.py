"""`python -m serve BUNDLE`: verify, load, ask the golden requests, and only then listen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from pipeline.spec.bundle import open_bundle
from pipeline.spec.errors import PipelineError
from serve.door import Door
from serve.logs import configure, fatal, told
from serve.options import Options, parse
from serve.predictor import Predictor
from serve.selfcheck import verify
from serve.session import Session
from serve.sockets import check_free, reserve

log = logging.getLogger("serve")


def main(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
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
    if options.grpc is not None:
        check_free(options.grpc, share=share)
    bundle = open_bundle(options.bundle)
    log.info("starting", extra=told(model=options.name or bundle.name, bundle=bundle.digest[:12]))
    predictor = Predictor(bundle, Session(bundle, options.provider, options.threads))
    verify(bundle, predictor)
    from serve.server import Service  # here, not above: kserve reads sys.argv and takes a second to import

    service = Service(bundle, predictor, options, public, standby, door)
    service.start([service.model])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
