"""One process of one contestant: `python -m benchmarks.train.racer CONTESTANT WORKLOAD LAP`, run by the race."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.train.gate import Finished, Gate
from benchmarks.train.workloads import Workload, workload
from pipeline.system.processes import Rank

Contestant = Callable[[Workload, Rank, Gate, Path], None]


def contestant(name: str) -> Contestant:
    """Return the training loop of a contestant; peers are imported only in their own environments."""
    if name in ("ours", "exact"):
        from benchmarks.train.ours import ours

        return functools.partial(ours, elastic_shards=4) if name == "exact" else ours
    if name in ("copying", "saving"):
        from benchmarks.train.copying import Copying
        from benchmarks.train.ours import ours

        return functools.partial(ours, checkpoint_every=1, make_store=Copying if name == "copying" else None)
    if name in ("bare", "tuned", "padded"):
        from benchmarks.train import bare

        hand_written: Contestant = getattr(bare, name)
        return hand_written
    from benchmarks.train import peers

    peer: Contestant = getattr(peers, name)
    return peer


def main() -> int:
    name, workload_name, lap = sys.argv[1:]
    rank = Rank.from_env()
    with tempfile.TemporaryDirectory() as folder:
        try:
            contestant(name)(replace(workload(workload_name), lap=int(lap)), rank, Gate(), Path(folder))
        except Finished:
            return 0
        except Exception:
            traceback.print_exc()
            return 1
    return 1  # laps have no end of their own


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a process that joined gloo may hang when it is taken down
