"""`python -m benchmarks.architectures`: send each architecture of transformers, timm and torchvision to `pipe export`.

Each is made from a tiny configuration with random weights, without the network. The rows go to architectures.jsonl,
and those that are there are not run again; docs/architectures.md is written from them.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.architectures.export import run_row, start_process
from benchmarks.architectures.names import list_architectures
from benchmarks.architectures.table import ROOT, ROWS, TABLE, by_library, make_table, passes, read_rows, write_rows
from pipeline.system.torchvision_operators import declare_torchvision_operators


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", help="as transformers:bert; default: all that have no row")
    parser.add_argument("--again", choices=("failed",), help="also run those that failed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the results, one JSON object a line")
    parser.add_argument("--table", type=Path, help=f"also write the document, as {TABLE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    declare_torchvision_operators()
    kinds, rows = list_architectures(), read_rows(options.rows)[1]
    left = [name for name in kinds if name not in rows or (options.again and not passes(rows[name]))]
    left.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())  # so that a part is like the whole
    left = options.names or left
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, start_process) as pool:
        running = [pool.submit(run_row, name, kinds[name]) for name in left]
        for count, future in enumerate(as_completed(running), 1):
            row = future.result()
            rows[row["name"]] = row
            write_rows(rows, options.rows)
            print(f"{count}/{len(left)} {row['name']}: {row.get('reason') or 'ok'} ({row['seconds']} s)", flush=True)
    for library, members in by_library(rows).items():
        print(f"{library}: {sum(map(passes, members))} of {len(members)} pass")
    if options.table:
        options.table.write_text(make_table(*read_rows(options.rows)))
        print(options.table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
