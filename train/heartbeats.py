"""Signs of life of the machines that meet, each judged by the reader's own clock: no two clocks are compared."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token


class Sign(NamedTuple):
    written: datetime  # by the clock of whoever wrote it
    here: datetime  # what it comes to by our own


class OwnClock(RendezvousBackend):
    """Stands before torch's backend, whose state holds times that agents write and others compare with their clocks.

    There, a machine whose clock is seconds off is taken for dead, or never. Here, a reader finds when it first saw a
    sign itself; what it does not change goes back as it was written.
    """

    def __init__(self, backend: RendezvousBackend, last_call_seconds: float) -> None:
        self._backend = backend
        self._last_call = timedelta(seconds=last_call_seconds)
        self._known: dict[object, Sign] = {}

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (_with_times(found[0], self._read), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(_with_times(state, self._write), token)
        return None if found is None else (_with_times(found[0], self._read), found[1], found[2])

    def _read(self, of: object, written: datetime) -> datetime:
        sign = self._known.get(of)
        if sign is None or sign.written != written:
            wait = self._last_call if of is _LAST_CALL else timedelta(0)
            sign = self._known[of] = Sign(written, datetime.now(UTC) + wait)
        return sign.here

    def _write(self, of: object, here: datetime) -> datetime:
        sign = self._known.get(of)
        if sign is None or sign.here != here:  # our own, made at this moment
            sign = self._known[of] = Sign(here, here)
        return sign.written


_LAST_CALL = "last call"  # when machines that are enough wait no longer for more


def _with_times(bits: bytes, changed: Callable[[object, datetime], datetime]) -> bytes:
    state = pickle.loads(bits)  # noqa: S301  # as torch itself reads it
    state.last_heartbeats = {node: changed(node, time) for node, time in state.last_heartbeats.items()}
    if state.deadline is not None:
        state.deadline = changed(_LAST_CALL, state.deadline)
    return pickle.dumps(state)
