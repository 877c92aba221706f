"""`python -m benchmarks.train`: run the requested tables and print them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from benchmarks.train import exact, gpu, link, loops, saving
from benchmarks.train.workloads import TEXTS, WORKLOADS
from pipeline.system.errors import PipelineError

TABLES = ("loops", "link", "exact", "saving", "gpu")
OF_TEXTS = ("loops", "packing", "gpu")  # with --model


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    makers: dict[str, Callable[[], tuple[dict[str, Any], str]]] = {
        "loops": lambda: _loops(options),
        "link": lambda: _link(options),
        "exact": lambda: _exact(options),
        "saving": lambda: _saving(options),
        "gpu": lambda: _gpu(options),
        "packing": lambda: _packing(options),
    }
    results, texts = {}, []
    try:
        for name in options.table or (OF_TEXTS if options.model else TABLES):
            results[name], text = makers[name]()
            texts.append(text)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(results, indent=2) if options.output == "json" else "\n\n".join(texts))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description="how fast training is, beside its peers"
    )
    parser.add_argument(
        "--table", action="append", choices=(*TABLES, "packing"), help="only this table; may be given again"
    )
    parser.add_argument("--model", choices=(TEXTS,), help="a language model in `loops`, `packing` and `gpu`, no peers")
    parser.add_argument(
        "--workload", action="append", choices=list(WORKLOADS), help="only this one, in all but `link` and `gpu`"
    )
    parser.add_argument(
        "--processes", action="append", type=int, help="numbers of processes, in all but `link` and `gpu`"
    )
    parser.add_argument("--threads", type=int, default=0, help="threads of each process, in `loops`: cores shared out")
    parser.add_argument("--heats", type=int, default=loops.FULL.heats, help="starts of every loop anew")
    parser.add_argument("--laps", type=int, default=loops.FULL.laps, help="laps of every loop in a heat")
    parser.add_argument("--no-peers", action="store_true", help="ours and the bare loop alone, in `loops`")
    parser.add_argument("--quick", action="store_true", help="a few laps, to see that it works; the ratios mean little")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how results are printed")
    options = parser.parse_args(argv)
    if options.model and (wrong := [name for name in options.table or () if name not in OF_TEXTS]):
        parser.error(f"--model goes with the tables {', '.join(OF_TEXTS)}, not with {', '.join(wrong)}")
    return options


def _loops(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    size = _size(options)
    workloads = options.workload or (["digits"] if options.quick else list(WORKLOADS))
    workloads, peers = ([options.model], False) if options.model else (workloads, not options.no_peers)
    results = loops.loops(size, workloads, options.processes or [1, 2], options.threads, peers=peers)
    return results, loops.text(results)


def _packing(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from benchmarks.train import packed  # here, not above: it takes a tokenizer, which the other tables do without

    results = packed.packed(_size(options), options.processes or [1, 2], options.threads or 1)
    return results, packed.text(results)


def _exact(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    workloads = options.workload or exact.WORKED
    results = exact.exact(_size(options), workloads, options.processes or exact.PROCESSES)
    return results, exact.text(results)


def _saving(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    workloads = options.workload or saving.WORKED
    results = saving.saving(_size(options), workloads, options.processes or saving.PROCESSES)
    return results, saving.text(results)


def _size(options: argparse.Namespace) -> loops.Size:
    return loops.QUICK if options.quick else replace(loops.FULL, heats=options.heats, laps=options.laps)


def _link(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    results = link.link(quick=options.quick)
    return results, link.text(results)


def _gpu(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    results = gpu.gpu(quick=options.quick, net=options.model or "gpt2")
    return results, gpu.text(results)


def _leave(number: int, _frame: FrameType | None) -> None:
    """Handle the signal like Ctrl-C, so that processes and namespaces are removed first."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
