from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C import _distributed_c10d as c10d

from train.hang_report import (
    Activity,
    Hang,
    ProcessReport,
    StackDump,
    culprits,
    describe_collective,
    describe_collectives,
    describe_hang,
    is_mismatch,
    is_network_cut,
    kernel_state,
    locate,
    numbered_calls,
    silence_reason,
    thread_stacks,
    unfinished_collectives,
    waits_on_gpu,
)


@pytest.fixture
def sleeper() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL) as process:
        yield process
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_stacks_contain_all_threads_except_the_calling_one() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(thread_stacks()), name="asker")
    thread.start()
    thread.join()
    assert found[0].startswith("thread MainThread, innermost call last:\n")
    assert "test_stacks_contain_all_threads" in found[0]
    assert "asker" not in found[0]


def test_stack_dump_writes_unless_rearmed(tmp_path: Path) -> None:
    path = tmp_path / "frozen"
    wire = StackDump(path, 0.3)
    for _ in range(3):
        wire.rearm()
        time.sleep(0.05)
    assert path.read_text() == ""
    end = time.monotonic() + 300
    while not path.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "test_stack_dump_writes" in path.read_text()
    wire.rearm()
    assert path.read_text() == "", "emptied, as training has progressed since"
    wire.remove()
    assert not path.exists()


def test_a_stopped_process_is_reported_as_such(sleeper: psutil.Popen) -> None:
    started = sleeper.create_time()
    for text in ("its interpreter is blocked in native code", "it is stopped (SIGSTOP)"):
        end = time.monotonic() + 300
        while silence_reason(sleeper.pid, started) != text:  # at its start it may wait for the disk
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(sleeper.pid, signal.SIGSTOP)
    assert kernel_state(sleeper.pid).startswith("T (stopped), in ")


def test_another_process_with_the_same_number_is_not_taken_for_one_that_has_ended(sleeper: psutil.Popen) -> None:
    assert silence_reason(sleeper.pid, sleeper.create_time() - 60) == "it has ended"


# The second process never comes to the exchange the first one waits in.
WAITER = """
import os, sys, threading, time
import torch, torch.distributed as dist
from train.hang_report import describe_collectives, enable_flight_recorder, unfinished_collectives

enable_flight_recorder()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(3))
end = time.monotonic() + 300
while (before := unfinished_collectives()) and time.monotonic() < end:  # it is recorded as done a little later
    time.sleep(0.01)
if sys.argv[2] == "0":
    threading.Thread(target=dist.all_reduce, args=(torch.ones(5),), daemon=True).start()
    while not (found := unfinished_collectives()):
        time.sleep(0.01)
    print(repr([before, describe_collectives(found)]), flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_unfinished_collective_is_reported_with_number_and_size(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WAITER, str(tmp_path / "meet"), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "[[], 'gloo:all_reduce, no. 2, of [5] Float']\n"
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_without_a_recorder_nothing_is_reported() -> None:
    assert unfinished_collectives() == []


# A dump of torch's NCCL flight recorder.
NCCL_ENTRY = {
    "profiling_name": "nccl:all_reduce", "is_p2p": False, "collective_seq_id": 7, "p2p_seq_id": 0, "retired": False,
    "state": "started", "input_sizes": [[151498]], "input_dtypes": ["Float"],
}  # fmt: skip


def record_nccl(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    finished: list[dict[str, Any]] = [
        {"collective_seq_id": 5, "retired": True},
        {"collective_seq_id": 6, "state": "completed"},
    ]
    entries = [{**NCCL_ENTRY, **entry} for entry in (*finished, changes)]
    dump = json.dumps({"entries": entries})
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda _collectives, _active: dump, raising=False)


def test_collectives_of_nccl_are_read_from_its_own_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    record_nccl(monkeypatch)
    assert describe_collectives(unfinished_collectives()) == "nccl:all_reduce, no. 7, of [151498] Float"


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({}, True),
        ({"state": "scheduled"}, False),
        ({"retired": True}, False),
        ({"profiling_name": "gloo:gather"}, False),
    ],
)
def test_only_a_collective_that_the_gpu_has_begun_is_waited_for(
    changes: dict[str, Any], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_nccl(monkeypatch, **changes)
    assert waits_on_gpu(unfinished_collectives()) is waits


def test_an_exchange_of_several_tensors_names_them_all() -> None:
    entry = {"is_p2p": True, "p2p_seq_id": 4, "profiling_name": "gloo:send", "input_sizes": [[2, 3], [1]]}
    assert (
        describe_collective({**entry, "input_dtypes": ["Float", "Long"]})
        == "gloo:send, no. 4, of [2, 3] Float and [1] Long"
    )


WAITING, OURS, USERS = Activity.WAITING, Activity.PIPE_CODE, Activity.USER_CODE


def report(rank: int, activity: Activity = WAITING, still: float = 30, **more: Any) -> ProcessReport:
    values = {"host": "node", "pid": 40 + rank, "started": 0.0, "beat": 9, "step": 4, "phase": "update", **more}
    values.setdefault("place", "")
    return ProcessReport(rank=rank, activity=activity, still_seconds=still, **values)


def blamed(*reports: ProcessReport, silent: set[int] = frozenset()) -> list[int]:  # type: ignore[assignment]
    return [one.rank for one in culprits(reports, silent, timeout_seconds=30)]


def test_collectives_of_one_number_must_be_equal_in_all_processes() -> None:
    entry = {**NCCL_ENTRY, "process_group": ["0", "default_pg"]}
    sums, more = numbered_calls([entry]), numbered_calls([{**entry, "input_sizes": [[7]]}])
    others = numbered_calls([{**entry, "profiling_name": "nccl:barrier"}])
    gathers = [numbered_calls([{**entry, "profiling_name": "nccl:gather", "input_sizes": [[n]]}]) for n in (2, 3)]
    elsewhere = numbered_calls([{**entry, "process_group": ["1", "tensor"], "input_sizes": [[7]]}])
    later = numbered_calls([{**entry, "collective_seq_id": 8, "input_sizes": [[7]]}])
    assert numbered_calls([{**entry, "is_p2p": True}]) == {}
    for first, second, differ in (
        (sums, sums, False), (sums, more, True), (sums, others, True), (gathers[0], gathers[1], False),
        (sums, elsewhere, False), (sums, later, False),
    ):  # fmt: skip
        hang = Hang([report(0, calls=first, exchanges="a"), report(1, calls=second, exchanges="b")], [])
        assert is_mismatch(hang) is differ
        assert describe_hang(hang).startswith("the processes call different collectives: rank 0 at step 4") is differ
    assert not is_mismatch(Hang([report(0, calls=sums), report(1, calls=more)], [report(1)]))


def test_no_culprit_while_any_process_makes_progress() -> None:
    assert blamed(report(0), report(1, USERS, still=5)) == []
    assert blamed(report(0), report(1, USERS, still=30)) == [1]


CULPRITS: dict[str, tuple[list[ProcessReport], list[int]]] = {
    "long work of all at the same place is no hang": ([report(0, USERS), report(1, USERS)], []),
    "neither is waiting of all": ([report(0), report(1)], []),
    "the one a step behind": ([report(0), report(1, step=3, phase="checkpoint"), report(2)], [1]),
    "the one a phase behind": ([report(0), report(1, phase="data"), report(2)], [1]),
    # A process that serves the parameters has made fewer steps than the one it waits for.
    "the one in user code": ([report(0, OURS, step=1), report(1, USERS, step=5), report(2, step=4)], [1]),
    "who writes the checkpoint": ([report(0, OURS, phase="checkpoint"), report(1, phase="checkpoint")], [0]),
    "several": ([report(0, USERS), report(1, USERS), report(2)], [0, 1]),
}


@pytest.mark.parametrize("who", CULPRITS)
def test_process_that_others_wait_for_is_the_culprit(who: str) -> None:
    reports, ranks = CULPRITS[who]
    assert blamed(*reports) == ranks


def test_a_silent_process_is_the_culprit() -> None:
    assert blamed(report(0, USERS, step=1), report(1, still=0, step=9), silent={1}) == [1]


def test_all_processes_in_a_collective_means_a_cut_network() -> None:
    exchanging: dict[str, Any] = {"exchanges": "gloo:all_reduce, no. 7, of [12] Float"}
    assert is_network_cut([report(0, **exchanging), report(1, **exchanging)], timeout_seconds=30)
    assert not is_network_cut([report(0, **exchanging), report(1)], 30), "one has nothing to wait for"
    assert not is_network_cut([report(0, **exchanging), report(1, USERS, **exchanging)], 30), "one computes"
    assert not is_network_cut([report(0, **exchanging), report(1, still=5, **exchanging)], 30), "one has just moved"


def test_network_cut_message_shows_where_each_process_waits() -> None:
    exchanging: dict[str, Any] = {"place": "the backward pass", "exchanges": "gloo:all_reduce, no. 7, of [12] Float"}
    text = describe_hang(Hang([report(0, **exchanging), report(1, host="other", **exchanging)], []))
    assert text.startswith(
        "all 2 processes have waited for each other for 30 s: rank 0, 1 at step 4, update (the backward pass; "
        "gloo:all_reduce, no. 7, of [12] Float); the network between them is cut or too slow (node, other). "
    )


def test_hang_message_names_the_culprit_and_where_others_wait() -> None:
    hung = report(1, USERS, phase="forward and backward", place="task.py, line 7, loss")
    others = [report(0, place="the collective all_reduce"), report(2, place="the collective all_reduce")]
    text = describe_hang(Hang([others[0], hung, others[1]], [hung]))
    assert text.startswith(
        "rank 1 on node (process 41) has made no progress for 30 s from step 4, forward and backward "
        "(task.py, line 7, loss). "
        "Waiting for it: rank 0, 2 at step 4, update (the collective all_reduce). "
    )
    assert "raise train.timeout_seconds" in text


def test_a_silent_process_is_reported_as_such() -> None:
    text = describe_hang(Hang([report(0), report(1)], [report(1)], {1: ""}))
    assert "rank 1 on node (process 41) does not answer: stopped, stuck in native code" in text
    text = describe_hang(Hang([report(0), report(1)], [report(1)], {1: "it is stopped (SIGSTOP)"}))
    assert "rank 1 on node (process 41) does not answer: it is stopped (SIGSTOP); last seen at step 4" in text


def test_place_is_the_innermost_frame_of_user_code(tmp_path: Path) -> None:
    activity, place = locate(sys._getframe(), Path(__file__).parent)
    assert activity == USERS
    assert place.startswith("test_hang_report.py, line ")
    assert place.endswith("test_place_is_the_innermost_frame_of_user_code")
    assert locate(sys._getframe(), tmp_path)[0] == OURS


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/lib/torch/distributed/distributed_c10d.py", "the collective all_reduce"),
        ("/lib/horovod/torch/mpi_ops.py", "the collective all_reduce"),
        ("/lib/torch/autograd/graph.py", "the backward pass"),
    ],
)
def test_a_collective_below_the_users_code_is_waiting(file: str, place: str) -> None:
    """A sharded model gathers its weights inside the user's forward()."""
    scope: dict[str, Any] = {"sys": sys}
    exec(compile("def all_reduce(): return sys._getframe()", file, "exec"), scope)
    assert locate(scope["all_reduce"](), Path(__file__).parent) == (WAITING, place)


def test_thread_without_a_frame_has_no_place(tmp_path: Path) -> None:
    assert threading.main_thread().ident is not None
    assert locate(None, tmp_path) == (OURS, "")
