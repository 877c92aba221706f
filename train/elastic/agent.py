"""Start the training processes of one machine, and again when one ends too early or machines come or leave.

After an early end, the agent calls `restart_after`, which decides; in each round, the machines meet first (meeting.py).
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import DistError

from pipeline.contract.restarts import (
    PROCESS_END_SECONDS,
    GiveUp,
    ProcessEnd,
    newest_attempt,
    read_events,
    restart_after,
)
from pipeline.system.errors import DeviceFault, missing_module_in_log, read_error
from pipeline.system.fork_server import Process, start_module
from pipeline.system.processes import AgentStatus, describe_exit, exit_by_exception, was_terminated, watch_parent
from train.elastic.meeting import Meeting, MeetingEnded, Round, open_meeting_store
from train.hang_report import MISMATCH_ADVICE

_POLL_SECONDS = 0.1
_LOSS_SECONDS = 1.0  # without one of them, the others cannot save a checkpoint, and only write why they end
_TRIAL_SECONDS = 60  # a process that uses a broken GPU may hang
_LOG_END_BYTES = 1 << 16
_MISMATCH = re.compile(r"(\d+) vs (\d+)\. Received data size doesn't match expected size")  # gloo, before it aborts


class Agent:
    """Starts the processes of this machine, and again as long as `restart_after` decides so."""

    def __init__(self, run: Path, restarts: int, meeting: Meeting, job: str = "", log: Path | None = None) -> None:
        self._run, self._restarts, self._meeting, self._job, self._log = run, restarts, meeting, job, log
        self._log_start = _size(log)
        self._gpus = torch.cuda.device_count()
        self._processes: dict[int, Process] = {}  # by rank
        self._attempt = 0  # of these processes

    def train(self) -> AgentStatus:
        while True:
            current = self._meeting.next_round()
            self._start(current)
            status = self._watch(current)
            if status is not None:
                return status

    def stop(self, seconds: float = PROCESS_END_SECONDS) -> None:
        """End all processes, and kill those that have not ended in time."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self._processes = {}

    def _start(self, current: Round) -> None:
        self._attempt = 1 + newest_attempt(read_events(self._run))
        for local_rank in range(current.places[current.machine].processes):
            env = {**os.environ, **_rank_variables(current, local_rank, self._job)}
            process = start_module("train", [str(self._run)], Path.cwd(), env, (0, 1, 2))
            self._processes[current.first_rank + local_rank] = process

    def _watch(self, current: Round) -> AgentStatus | None:
        """Return the status to end with; None: start again in the next round."""
        while True:
            time.sleep(_POLL_SECONDS)
            ends = {rank: process.poll() for rank, process in self._processes.items()}
            if statuses := {rank: status for rank, status in ends.items() if status}:
                return self._decide(statuses)
            if None not in ends.values():
                self._meeting.finish(current)
                return AgentStatus.DONE
            if interruption := self._meeting.interruption():
                self.stop(_LOSS_SECONDS if interruption == "loss" else PROCESS_END_SECONDS)
                return None

    def _decide(self, statuses: Mapping[int, int]) -> AgentStatus | None:
        self.stop(PROCESS_END_SECONDS if all(map(was_terminated, statuses.values())) else _LOSS_SECONDS)
        end = describe_failures(statuses, self._run / "train.partial", self._new_output())
        decision = restart_after(self._run, replace(end, attempt=self._attempt), self._restarts)
        if isinstance(decision, GiveUp):
            return AgentStatus.FAILED
        return AgentStatus.LOST_DEVICE if self._has_lost_device(statuses.values()) else None

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


def _rank_variables(current: Round, local_rank: int, job: str) -> dict[str, str]:
    """Return what torchrun sets for each process."""
    first, own = current.places[0], current.places[current.machine]
    values = {
        "LOCAL_RANK": local_rank,
        "RANK": current.first_rank + local_rank,
        "GROUP_RANK": current.machine,
        "LOCAL_WORLD_SIZE": own.processes,
        "WORLD_SIZE": current.size,
        "GROUP_WORLD_SIZE": len(current.places),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": first.port,
        "TORCHELASTIC_RUN_ID": job,
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
        signal.signal(number, exit_by_exception)
    try:
        store = open_meeting_store(options.rendezvous, options.id, options.timeout)
        meeting = Meeting(
            store, options.address, options.processes, options.min_nodes, options.max_nodes, options.timeout
        )
        agent = Agent(options.run, options.restarts, meeting, options.id or secrets.token_hex(8), options.log)
        with meeting.heartbeats.beating():
            try:
                return agent.train()
            finally:
                agent.stop()
    except MeetingEnded as end:
        return end.status
    except DistError as error:
        print(f"agent: {error}", file=sys.stderr)
        return AgentStatus.NO_STORE


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
    parser.add_argument("--address", default="127.0.0.1", help="of this machine, for the others")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other machines")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
