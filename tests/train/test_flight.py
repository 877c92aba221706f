from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from train.flight import describe, unfinished

# The second process never comes to the exchange the first one waits in.
WAITER = """
import os, sys, threading, time
import torch, torch.distributed as dist
from train.flight import record_exchanges, unfinished

record_exchanges()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(3))
before = unfinished()
if sys.argv[2] == "0":
    threading.Thread(target=dist.all_reduce, args=(torch.ones(5),), daemon=True).start()
    while not (found := unfinished()):
        time.sleep(0.01)
    print(repr([before, found]), flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_an_exchange_that_is_not_finished_is_told_with_its_number_and_size(tmp_path: Path) -> None:
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
        assert started[0].stdout.readline() == "['', 'gloo:all_reduce, no. 2, of [5] Float']\n"
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_without_a_recorder_nothing_is_told() -> None:
    assert unfinished() == ""


def test_an_exchange_of_several_tensors_names_them_all() -> None:
    entry = {"is_p2p": True, "p2p_seq_id": 4, "profiling_name": "gloo:send", "input_sizes": [[2, 3], [1]]}
    assert describe({**entry, "input_dtypes": ["Float", "Long"]}) == "gloo:send, no. 4, of [2, 3] Float and [1] Long"
