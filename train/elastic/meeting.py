"""Where machines meet: in a store they agree on who takes part in a round of training.

A round begins when as many machines as may take part have joined, or enough of them and for a while no more. One that
joins later ends the round: the others see it, stop their processes and join, too. Each machine counts its heartbeats
in the store; readers time them by their own clocks, so that clocks may differ.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from pydantic import Field
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pipeline.contract.settings.section import Frozen
from pipeline.system.processes import AgentStatus, split_address

_BEAT_SECONDS = 1.0
_ALIVE_SECONDS = 3.0  # a machine without a heartbeat for so long is gone
_LAST_CALL_SECONDS = 2.0  # once enough machines have joined, more are awaited for so long
_LEAVING_SECONDS = 30.0  # for machines whose processes end a little later
_POLL_SECONDS = 0.1
_STATE = "machines"


class Place(Frozen):
    """What the others need to know of a machine."""

    address: str
    port: int  # free there, for the store of the training processes
    processes: int


class Machines(Frozen):
    """The state of a meeting, by names of machines."""

    round: int = 0
    members: dict[str, Place] = Field(default_factory=dict)  # of this round
    joined: dict[str, Place] = Field(default_factory=dict)  # for the next round
    closed: bool = False

    def with_joined(self, name: str, place: Place, alive: Collection[str], most: int) -> Machines:
        """Let a machine join the next round, if there is room beside all others that are alive."""
        joined = {other: its for other, its in self.joined.items() if other in alive}
        if len({*joined, *self.awaited(alive)} - {name}) < most:
            joined[name] = place
        return self.model_copy(update={"joined": joined})

    def awaited(self, alive: Collection[str]) -> set[str]:
        """Return the machines of this round that will join the next one."""
        return (self.members.keys() - self.joined.keys()) & {*alive}

    def begun(self) -> Machines:
        return Machines(round=self.round + 1, members=dict(sorted(self.joined.items())))


@dataclass(frozen=True)
class Round:
    number: int
    machine: int  # the rank of this machine
    places: tuple[Place, ...]  # of all machines, by rank

    @property
    def first_rank(self) -> int:
        return sum(place.processes for place in self.places[: self.machine])

    @property
    def size(self) -> int:
        return sum(place.processes for place in self.places)


class MeetingEnded(Exception):
    """There is no next round for this machine."""

    def __init__(self, status: AgentStatus) -> None:
        super().__init__(status.name)
        self.status = status


class Meeting:
    """This machine's part in the meeting of a run."""

    def __init__(self, store: Store, address: str, processes: int, fewest: int, most: int, timeout: float) -> None:
        self._store, self._address, self._processes = store, address, processes
        self._fewest, self._most, self._timeout = fewest, most, timeout
        self._name = f"{address}-{secrets.token_hex(4)}"
        self._round = 0
        self.heartbeats = Heartbeats(store, self._name)
        store.compare_set(_STATE, "", Machines().model_dump_json())

    def next_round(self) -> Round:
        """Join the next round, and return it when it begins."""
        place = Place(address=self._address, port=free_port(self._address), processes=self._processes)
        deadline = time.monotonic() + self._timeout
        seen: tuple[set[str], set[str]] | None = None
        quiet_since = 0.0
        while True:
            state, machines = self._read()
            if machines.closed:
                raise MeetingEnded(AgentStatus.CLOSED)
            if machines.round > self._round and self._name in machines.members:
                self._round = machines.round
                return Round(self._round, [*machines.members].index(self._name), tuple(machines.members.values()))
            now = time.monotonic()
            alive = {self._name, *self.heartbeats.alive({*machines.members, *machines.joined})}
            after = machines.with_joined(self._name, place, alive, self._most)
            if self._name not in after.joined:  # there is no room until another machine has gone
                deadline = now + self._timeout
            elif now > deadline:
                raise MeetingEnded(AgentStatus.TOO_FEW)
            awaited = after.awaited(alive)
            if seen != ({*after.joined}, awaited):
                seen, quiet_since = ({*after.joined}, awaited), now
            is_last_call_over = not awaited and now - quiet_since > _LAST_CALL_SECONDS
            if len(after.joined) == self._most or (len(after.joined) >= self._fewest and is_last_call_over):
                after = after.begun()
            if after == machines:
                time.sleep(_POLL_SECONDS)
            else:
                self._write(state, after)

    def interruption(self) -> Literal["", "newcomer", "loss"]:
        """Return why other machines have joined the next round: one is new, or one of this round lost its processes."""
        machines = self._read()[1]
        joined = self.heartbeats.alive(machines.joined)
        return "loss" if joined & machines.members.keys() else "newcomer" if joined else ""

    def finish(self, current: Round) -> None:
        """Close the meeting once the other machines have finished this round, or after a while."""
        key, deadline = f"finished-{current.number}", time.monotonic() + _LEAVING_SECONDS
        with contextlib.suppress(DistError):  # the machine with the store has left
            self._store.add(key, 1)
            while self._store.add(key, 0) < len(current.places) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            state, machines = self._read()
            while not machines.closed:
                self._write(state, machines.model_copy(update={"closed": True}))
                state, machines = self._read()

    def _read(self) -> tuple[str, Machines]:
        state = self._store.get(_STATE).decode()
        return state, Machines.model_validate_json(state)

    def _write(self, before: str, after: Machines) -> None:
        """Write the state, unless another machine has changed it meanwhile."""
        self._store.compare_set(_STATE, before, after.model_dump_json())


class Heartbeats:
    """A thread counts the heartbeats of this machine; those of others are watched."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._counts: dict[str, tuple[int, float]] = {}  # and when they were new, by our watch
        self._watch = 0.0
        self._looked = time.monotonic()
        self._done = threading.Event()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join(_ALIVE_SECONDS)

    def alive(self, names: Iterable[str]) -> set[str]:
        """Return who is alive; while this process or the store is stopped, the watch for the others is, too."""
        now = time.monotonic()
        self._watch, self._looked = self._watch + min(now - self._looked, _BEAT_SECONDS), now
        for name in names:
            count = self._store.add(name, 0)
            if self._counts.get(name, (-1,))[0] != count:
                self._counts[name] = count, self._watch
        return {name for name in names if self._watch - self._counts[name][1] < _ALIVE_SECONDS}

    def _beat(self) -> None:
        with contextlib.suppress(DistError):
            while True:
                self._store.add(self._name, 1)
                if self._done.wait(_BEAT_SECONDS):
                    return


def open_meeting_store(address: str, run_id: str, timeout_seconds: int) -> Store:
    """Open the store at an address; without one, that of a machine alone."""
    if not address:
        return HashStore()
    host, port = split_address(address)
    # A shorter interruption is waited for.
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False)
    return PrefixStore(run_id, store)


def free_port(address: str) -> int:
    family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(target[:2], family=family) as listener:
        return int(listener.getsockname()[1])
