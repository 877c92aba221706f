"""The rendezvous store, in a process of its own: machines can still meet there when other processes die."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pipeline.system.errors import ResourceError, write_error
from pipeline.system.processes import split_address, watch_parent


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="train.elastic.store", description="run the store where the machines of a run meet"
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("address", help="host:port of this machine")
    options = parser.parse_args(argv)
    watch_parent()
    try:
        listener = listen(*split_address(options.address))
    except OSError as error:
        failure = ResourceError(
            f"train.rendezvous={options.address}: cannot listen there: {os.strerror(error.errno or 0).lower()}; "
            "to fix it, name a free port of the machine that runs `pipe run`"
        )
        write_error(failure, options.run / "train.partial")
        print(f"error: {failure}", file=sys.stderr)
        return failure.exit_code
    serve(listener)
    return 0


def serve(listener: socket.socket) -> None:
    """Serve until the parent dies or this process is terminated."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # slow to load: a port that is taken is failure before

    host, port = listener.getsockname()[:2]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    print(f"machines meet at {host}:{port}", flush=True)
    threading.Event().wait()
    del store


def listen(host: str, port: int) -> socket.socket:
    """Listen at the address; on all interfaces where it belongs to a gateway in front of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
