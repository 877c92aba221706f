"""Start the training processes of one machine: torch's elastic agent, as torchrun runs it, with our parent watch.

Torch restarts the processes when one ends too early or when machines join or leave. After an early end, the agent
calls `restart_after` first. Heartbeats of the machines are timed by the reader's own clock, so that clocks may differ.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from pipeline.contract.restarts import (
    PROCESS_END_SECONDS,
    GiveUp,
    ProcessEnd,
    Restart,
    newest_attempt,
    read_events,
    restart_after,
)
from pipeline.system.errors import DeviceFault, Stalled, missing_module_in_log, read_error
from pipeline.system.fork_server import Process, start_module
from pipeline.system.processes import TERMINATED, AgentStatus, describe_exit, was_terminated, watch_parent
from train.hang_report import MISMATCH_ADVICE

_UNLIMITED_RESTARTS = 1 << 30  # `restart_after` decides, not torch's own counter
# A machine without a heartbeat for 3 s is gone. Once enough machines have come, more are awaited for 2 s.
_RENDEZVOUS_TIMES = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
_TRIAL_SECONDS = 60  # a process that uses a broken GPU may hang
_LOG_END_BYTES = 1 << 16
_MISMATCH = re.compile(r"(\d+) vs (\d+)\. Received data size doesn't match expected size")  # gloo, before it aborts
_HEALTHY = RunResult(WorkerState.HEALTHY)
_EXIT_BARRIER_SECONDS = 30  # for agents whose processes end a little later


class Agent(SimpleElasticAgent):
    """Starts processes by the fork server, and again only when `restart_after` decides so."""

    def __init__(self, spec: WorkerSpec, run: Path, restarts: int, log: Path | None = None) -> None:
        super().__init__(spec, exit_barrier_timeout=_EXIT_BARRIER_SECONDS)
        self._run, self._restarts, self._log = run, restarts, log
        self._log_start = _size(log)
        self._gpus = torch.cuda.device_count()
        self._processes: dict[int, Process] = {}  # by rank
        self._attempt = 0  # of these processes
        self.lost_device = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self._attempt = 1 + newest_attempt(read_events(self._run))
        for worker in worker_group.workers:
            env = {**os.environ, **_rank_variables(worker_group, worker)}
            arguments = [str(argument) for argument in worker_group.spec.args[2:]]  # after `-m train`
            self._processes[worker.global_rank] = start_module("train", arguments, Path.cwd(), env, (0, 1, 2))
        return {worker.local_rank: self._processes[worker.global_rank].pid for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:  # noqa: ARG002
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = PROCESS_END_SECONDS) -> None:
        """Signal all processes, and kill those that have not ended in time."""
        for process in self._processes.values():
            process.send_signal(death_sig)
        deadline = time.monotonic() + min(timeout, PROCESS_END_SECONDS)
        for process in self._processes.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self._processes = {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ends = {rank: process.poll() for rank, process in self._processes.items()}
        statuses = {rank: status for rank, status in ends.items() if status}
        if not statuses:
            has_finished = all(status == 0 for status in ends.values())
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(ends)) if has_finished else _HEALTHY
        failures = {
            worker.global_rank: ProcessFailure(worker.local_rank, worker.id, statuses[worker.global_rank], "")
            for worker in worker_group.workers
            if worker.global_rank in statuses
        }
        self._shutdown()
        end = describe_failures(statuses, self._run / "train.partial", self._new_output())
        decision = restart_after(self._run, replace(end, attempt=self._attempt), self._restarts)
        self.lost_device = isinstance(decision, Restart) and self._has_lost_device(statuses.values())
        if isinstance(decision, GiveUp) or self.lost_device:
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED, failures=failures)

    def _new_output(self) -> str:
        """Return the end of what this machine's processes have written since the last failure."""
        start, self._log_start = self._log_start, _size(self._log)
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(max(start, self._log_start - _LOG_END_BYTES))
            return file.read().decode(errors="replace")

    def _has_lost_device(self, statuses: Collection[int]) -> bool:
        """Return whether a GPU is gone: the driver lists fewer than before, or after a fault one does not work."""
        if torch.cuda.device_count() < self._gpus:
            return True
        return DeviceFault.exit_code in statuses and not devices_work(self._gpus)


def _rank_variables(group: WorkerGroup, worker: Worker) -> dict[str, str]:
    """Return what torchrun sets for each process."""
    spec = group.spec
    values = {
        "LOCAL_RANK": worker.local_rank,
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}


def devices_work(count: int) -> bool:
    """Try all GPUs, in another process: this one must not hold memory on them."""
    program = f"import torch; [torch.ones(1, device=f'cuda:{{i}}').item() for i in range({count})]"
    try:
        return subprocess.run([sys.executable, "-c", program], timeout=_TRIAL_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def describe_failures(statuses: Mapping[int, int], directory: Path, output: str = "") -> ProcessEnd:
    """Return why processes ended, from the exit statuses by rank: a killed one explains those that failed after it."""
    host = socket.gethostname()
    causes = {rank: status for rank, status in statuses.items() if not was_terminated(status)} or dict(statuses)
    # Signals first; but a process may abort (SIGABRT) because another was killed.
    rank = min(causes, key=lambda rank: (causes[rank] >= 0, causes[rank] == -signal.SIGABRT))
    exit_text = describe_exit(f"rank {rank} on {host}", causes[rank])
    error = read_error(directory)
    if error is not None and not error.passing:
        return ProcessEnd(host, str(error), passing=False)
    if isinstance(error, Stalled):  # the watchdogs of the others killed the process that hung
        return ProcessEnd(host, str(error))
    if causes[rank] == -signal.SIGABRT and (sizes := _MISMATCH.search(output)):
        received, expected = sizes.groups()
        reason = f"rank {rank} on {host} received {received} bytes in a collective where it expected {expected}"
        return ProcessEnd(host, f"the processes call different collectives: {reason}. {MISMATCH_ADVICE}", passing=False)
    if causes[rank] < 0 or was_terminated(causes[rank]):
        return ProcessEnd(host, exit_text)
    if error is not None:
        return ProcessEnd(host, str(error), echo=error.echo)
    if (missing := missing_module_in_log(output)) is not None:
        return ProcessEnd(host, f"rank {rank} on {host}: {missing}", passing=False)
    # Status 1 without an error may come from a process that lost contact while a new attempt began.
    return ProcessEnd(host, f"{exit_text} and left no reason", passing=causes[rank] == 1)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    watch_parent(passes_on=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, _raise_signal)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # shared, it hands out addresses of an earlier round
    try:
        spec = _spec(options)
        agent = Agent(spec, options.run, options.restarts, options.log)
        result = agent.run()
        if agent.lost_device:
            return AgentStatus.LOST_DEVICE
        if result is None:  # the group is full, and the others have finished
            return AgentStatus.CLOSED
        if result.is_failed():
            return AgentStatus.FAILED
        spec.rdzv_handler.shutdown()  # later machines find it closed
        return AgentStatus.DONE
    except RendezvousClosedError:
        return AgentStatus.CLOSED
    except RendezvousTimeoutError:
        return AgentStatus.TOO_FEW
    except RendezvousConnectionError as error:
        print(f"agent: {error}", file=sys.stderr)
        return AgentStatus.NO_STORE
    except SignalException:
        return TERMINATED


def _raise_signal(number: int, _frame: object) -> None:
    raise SignalException(f"the agent got {signal.Signals(number).name}", sigval=signal.Signals(number))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.elastic.agent", description="start the training processes of one machine"
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--log", type=Path, default=None, help="where the output of the processes goes")
    parser.add_argument("--processes", type=int, required=True, help="on this machine")
    parser.add_argument("--restarts", type=int, default=0, help="in a row without a new checkpoint")
    parser.add_argument("--min-nodes", type=int, default=1, help="machines that training needs")
    parser.add_argument("--max-nodes", type=int, default=1, help="machines that train together")
    parser.add_argument("--rendezvous", default="", help="host:port of the rendezvous store; empty: one machine")
    parser.add_argument("--id", default="", help="id of the rendezvous")
    parser.add_argument("--address", default=None, help="of this machine, for the others")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other machines")
    return parser.parse_args(argv)


def _spec(options: argparse.Namespace) -> WorkerSpec:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=options.rendezvous or "localhost:0",
        run_id=options.id or secrets.token_hex(8),
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        local_addr=options.address or (None if options.rendezvous else "127.0.0.1"),
        is_host=not options.rendezvous,
        join_timeout=options.timeout,
        read_timeout=options.timeout,  # of the store: a shorter interruption is waited for
        **_RENDEZVOUS_TIMES,
    )
    c10d_backend, store = create_backend(parameters)
    backend = LocalClockBackend(c10d_backend, _RENDEZVOUS_TIMES["last_call_timeout"])
    return WorkerSpec(
        role="train",
        local_world_size=options.processes,
        entrypoint=sys.executable,
        args=("-m", "train", str(options.run)),
        rdzv_handler=create_handler(store, backend, parameters),
        max_restarts=_UNLIMITED_RESTARTS,
        local_addr=options.address,
    )


class _SeenTime(NamedTuple):
    written: datetime  # by the writer's clock
    seen: datetime  # by our own clock


class LocalClockBackend(RendezvousBackend):
    """Wraps torch's backend, whose state holds times that agents write and others compare with their own clocks.

    There, a machine whose clock is seconds off counts as dead, or never dies. Here, a reader replaces each new time by
    the moment it first saw it; times it has not changed itself are written back as they were.
    """

    def __init__(self, backend: RendezvousBackend, last_call_seconds: float) -> None:
        self._backend = backend
        self._last_call = timedelta(seconds=last_call_seconds)
        self._times: dict[object, _SeenTime] = {}

    @property
    def name(self) -> str:
        return str(self._backend.name)

    def get_state(self) -> tuple[bytes, Token] | None:
        answer = self._backend.get_state()
        return None if answer is None else (_map_times(answer[0], self._to_own_clock), answer[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        answer = self._backend.set_state(_map_times(state, self._to_writers_clock), token)
        return None if answer is None else (_map_times(answer[0], self._to_own_clock), answer[1], answer[2])

    def _to_own_clock(self, key: object, written: datetime) -> datetime:
        time = self._times.get(key)
        if time is None or time.written != written:
            wait = self._last_call if key is _LAST_CALL else timedelta(0)
            time = self._times[key] = _SeenTime(written, datetime.now(UTC) + wait)
        return time.seen

    def _to_writers_clock(self, key: object, seen: datetime) -> datetime:
        time = self._times.get(key)
        if time is None or time.seen != seen:  # our own time, set just now
            time = self._times[key] = _SeenTime(seen, seen)
        return time.written


_LAST_CALL = "last call"  # the key of the deadline after which enough machines wait for no more


def _map_times(data: bytes, convert: Callable[[object, datetime], datetime]) -> bytes:
    state = pickle.loads(data)  # noqa: S301  # torch reads it the same way
    state.last_heartbeats = {node: convert(node, time) for node, time in state.last_heartbeats.items()}
    if state.deadline is not None:
        state.deadline = convert(_LAST_CALL, state.deadline)
    return pickle.dumps(state)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
