"""Where the machines of a run meet, as the run directory tells it, and which of them are there."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path

import psutil

from pipeline.contract.files import write_json
from pipeline.contract.processes import split_address
from pipeline.contract.run import Run
from pipeline.training.launchers import Meeting

_KNOCK_SECONDS = 3
_BEAT_SECONDS = 2.0  # between two signs of life of a machine
_SILENT_SECONDS = 15.0  # a shared folder may show them late


def publish(run: Run, address: str) -> Meeting:
    """A new meeting; whoever still waits for an earlier one comes here."""
    meeting = Meeting(address, secrets.token_hex(8))
    write_json(_place(run), {"address": meeting.address, "id": meeting.id})
    return meeting


def published(run: Run) -> Meeting | None:
    try:
        body = json.loads(_place(run).read_text())
    except (OSError, ValueError):
        return None
    return Meeting(body["address"], body["id"])


def withdraw(run: Run) -> None:
    _place(run).unlink(missing_ok=True)


def answers(address: str) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(split_address(address), _KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def own_address(address: str) -> str:
    """Of this machine, as whoever listens at `address` sees it: the host name may lead elsewhere."""
    family, kind, _, _, place = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:  # nothing is sent
        way.connect(place)
        return str(way.getsockname()[0])


def interface(own: str) -> str:
    """The network interface that has this address."""
    named = (name for name, addresses in psutil.net_if_addrs().items() for one in addresses if one.address == own)
    return next(named, "")


class Presence:
    """This machine's sign of life in the run directory."""

    def __init__(self, run: Run) -> None:
        self._path = run.path / "logs" / "nodes" / f"{socket.gethostname()}-{os.getpid()}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._beaten = 0.0

    def beat(self) -> None:
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._path.touch()

    def leave(self) -> None:
        self._path.unlink(missing_ok=True)

    def count(self) -> int:
        """Machines that are there, by one clock: that of whoever keeps the folder."""
        self._path.touch()
        now = self._path.stat().st_mtime
        return sum(now - _touched(path) < _SILENT_SECONDS for path in self._path.parent.iterdir())


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # it has left at this moment
        return 0.0


def _place(run: Run) -> Path:
    return run.path / "rendezvous.json"
