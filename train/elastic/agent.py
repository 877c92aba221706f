"""What starts the training processes of one machine: torch's elastic agent, as torchrun runs it, on our leash.

It starts them anew when one ends too early, or when machines come or go, and tells of each end in the run directory.

Signs of life of the machines that meet, each judged by the reader's own clock: no two clocks are compared.
"""

from __future__ import annotations

import argparse
import os
import pickle
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from pipeline.contract.attempts import Stop, decide, read_story, tell_end
from pipeline.contract.errors import Stalled, read_error
from pipeline.contract.processes import LEFT, AgentStatus, asked_to_go, ending, watch_parent

_IN_PLACE = 1 << 30  # how often is decided by the record of attempts, not by counting here
# A machine that says nothing for 3 s is gone; 2 s after enough have come the others are waited for no longer.
_PATIENCE = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
_READ_SECONDS = 20  # for an answer of the store
_GOODBYE_SECONDS = 30  # for agents whose processes end a little later; one that is lost then costs no more


class Agent(LocalElasticAgent):
    """Stops where starting again would not help, which torch's own does after a number of times."""

    def __init__(self, spec: WorkerSpec, run: Path, restarts: int) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull), exit_barrier_timeout=_GOODBYE_SECONDS)
        self._run, self._restarts = run, restarts

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
            tell_end(self._run, host=socket.gethostname(), **described(statuses, self._run / "train.partial"))
            if isinstance(decide(read_story(self._run), self._restarts), Stop):
                self._remaining_restarts = 0
        return result


def described(statuses: Mapping[int, int], directory: Path) -> dict[str, Any]:
    """The end of processes, by rank: the one a signal ended before those that others made fail."""
    own = {rank: status for rank, status in statuses.items() if not asked_to_go(status)} or dict(statuses)
    rank = min(own, key=lambda one: (own[one] >= 0, own[one] == -6))  # who aborts may do so for another that was killed
    said = ending(f"rank {rank} on {socket.gethostname()}", own[rank])
    error = read_error(directory)
    if error is not None and not error.passing:
        return {"reason": str(error), "passing": False}
    if isinstance(error, Stalled):  # who did not answer was killed by those who told
        return {"reason": str(error)}
    if own[rank] < 0 or asked_to_go(own[rank]):
        return {"reason": said}
    if error is not None:
        return {"reason": str(error), "echo": error.echo}
    # Status 1 without a word may be one that lost contact while a new attempt began.
    return {"reason": f"{said} and left no reason", "passing": own[rank] == 1}


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    watch_parent()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # shared, it hands out addresses of an earlier round
    try:
        spec = _spec(options)
        result = Agent(spec, options.run, options.restarts).run()
        if result is None:  # one machine more than were asked for, and the others are through
            return AgentStatus.CLOSED
        if result.is_failed():
            return AgentStatus.FAILED
        spec.rdzv_handler.shutdown()  # who comes now comes too late
        return AgentStatus.DONE
    except RendezvousClosedError:
        return AgentStatus.CLOSED
    except RendezvousTimeoutError:
        return AgentStatus.TOO_FEW
    except RendezvousConnectionError as error:
        print(f"agent: {error}", file=sys.stderr)
        return AgentStatus.NO_STORE
    except SignalException:
        return LEFT


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.elastic.agent", description="starts the training processes of one machine"
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--processes", type=int, required=True, help="on this machine")
    parser.add_argument("--restarts", type=int, default=0, help="in a row without a new checkpoint")
    parser.add_argument("--fewest", type=int, default=1, help="machines that training goes on with")
    parser.add_argument("--most", type=int, default=1, help="machines that train together")
    parser.add_argument("--meeting", default="", help="host:port of the store where machines meet; empty: alone")
    parser.add_argument("--id", default="", help="what the meeting is called")
    parser.add_argument("--address", default=None, help="of this machine, for the others")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other machines")
    return parser.parse_args(argv)


def _spec(options: argparse.Namespace) -> WorkerSpec:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=options.meeting or "localhost:0",
        run_id=options.id or secrets.token_hex(8),
        min_nodes=options.fewest,
        max_nodes=options.most,
        local_addr=options.address or (None if options.meeting else "127.0.0.1"),
        is_host=not options.meeting,
        join_timeout=options.timeout,
        read_timeout=min(_READ_SECONDS, options.timeout),
        **_PATIENCE,
    )
    backend, store = create_backend(parameters)
    return WorkerSpec(
        role="train",
        local_world_size=options.processes,
        entrypoint=sys.executable,
        args=("-m", "train", str(options.run)),
        rdzv_handler=create_handler(store, OwnClock(backend, _PATIENCE["last_call_timeout"]), parameters),
        max_restarts=_IN_PLACE,
        local_addr=options.address,
    )


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
