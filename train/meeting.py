"""Where processes meet when no launcher tells: the first one opens a store and publishes its address."""

from __future__ import annotations

import json
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed hands them on, unseen by type checkers
from torch.distributed import DistError

from pipeline.spec.address import split_address
from pipeline.spec.errors import StageError
from pipeline.spec.files import write_json
from pipeline.spec.rank import Rank

_LOOK_SECONDS = 0.1
_KNOCK_SECONDS = 5
_HERE = "127.0.0.1"
_MARK = "mark"  # the key of what tells this store from any other


def meet(rank: Rank, address: str, directory: Path, timeout_seconds: int) -> Store | None:
    """The store all meet in; None where the environment names it, as under torchrun."""
    timeout = timedelta(seconds=timeout_seconds)
    if rank.master:
        return None
    if address:
        host, port = split_address(address)
        return TCPStore(host, port, rank.world_size, rank.first, timeout)
    place = place_of(rank, directory)
    return _open(rank, place, timeout) if rank.first else _find(rank, place, timeout)


def place_of(rank: Rank, directory: Path) -> Path:
    """The file with the address, of this launch alone where the launcher gives it a name."""
    return directory / f"meeting-{rank.job or 'unnamed'}.json"


def _open(rank: Rank, place: Path, timeout: timedelta) -> Store:
    """On a free port, that of this machine alone where nobody comes from another."""
    listener = _listen(rank.all_local)
    port, mark = listener.getsockname()[1], secrets.token_hex(8)
    store = TCPStore(
        _HERE, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    store.set(_MARK, mark)
    write_json(place, {"host": _HERE if rank.all_local else socket.gethostname(), "port": port, _MARK: mark})
    return store


def _listen(all_local: bool) -> socket.socket:
    if all_local:
        return socket.create_server((_HERE, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _find(rank: Rank, place: Path, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if (store := _knock(place)) is not None:
            store.set_timeout(timeout)
            return store
        time.sleep(_LOOK_SECONDS)
    raise StageError(
        f"rank {rank.rank} on {socket.gethostname()} waited {timeout.total_seconds():.0f} s for rank 0 to publish "
        f"where to meet ({place.name} in {place.parent}); the run directory must be shared by all machines, "
        "or set train.rendezvous=host:port"
    )


def _knock(place: Path) -> Store | None:
    """The store behind a published address; None when there is none yet.

    An address left by an earlier launch leads nowhere, or to a store that does not know the mark beside it.
    """
    try:
        told = json.loads(place.read_text())
        socket.create_connection((told["host"], told["port"]), _KNOCK_SECONDS).close()
        store = TCPStore(told["host"], told["port"], timeout=timedelta(seconds=_KNOCK_SECONDS), wait_for_workers=False)
        known = store.check([_MARK]) and store.get(_MARK).decode() == told[_MARK]
    except (OSError, DistError):
        return None
    return store if known else None
