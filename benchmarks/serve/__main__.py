"""`python -m benchmarks.serve`: closed loop, open loop, overload, start times, attacks, and what suits a pod."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.serve import attacks, capacity, load, openloop, providers, race, table
from benchmarks.serve.contenders import CONTENDERS, Contender
from benchmarks.serve.workloads import WORKLOADS
from pipeline.system.errors import PipelineError, ResourceError

TABLES = ("closed", "open", "overload", "starts")
WITHOUT_CLIENTS = {"starts", "providers", "attacks"}  # they need no load generator


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found: dict[str, Any] = {}
    texts: list[str] = []
    try:
        if options.model:
            return _texts(options)
        tables = options.table or TABLES
        if not WITHOUT_CLIENTS.issuperset(tables) and (absent := load.missing()):
            raise ResourceError(f"{' and '.join(absent)}: not found; install wrk and nghttp2-client")
        for name in tables:
            _MEASURES[name](options, found, texts)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found, indent=2) if options.output == "json" else "\n\n".join(texts))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve", description="how fast the service is, beside its peers"
    )
    parser.add_argument("--table", action="append", choices=list(_MEASURES), help="only this table; may be given again")
    parser.add_argument("--model", choices=("deepseek",), help="a language model's tokens a second, and nothing else")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="only this model")
    parser.add_argument("--only", action="append", choices=[one.name for one in CONTENDERS], help="only this service")
    parser.add_argument("--clients", action="append", type=int, help="only so many clients at once")
    parser.add_argument(
        "--rounds", type=int, default=race.FULL.rounds, help="rounds in which each contender has one turn"
    )
    parser.add_argument("--seconds", type=float, default=race.FULL.seconds, help="of one turn")
    parser.add_argument("--overload-seconds", type=float, default=60.0, help="of twice the capacity")
    parser.add_argument("--attack", action="append", help="of the table attacks: only this one; may be given again")
    parser.add_argument("--bundle", type=Path, help="of the table capacity: this bundle instead of the workloads")
    parser.add_argument("--deadline-ms", type=float, default=100.0, help="of the table capacity")
    parser.add_argument("--quick", action="store_true", help="short and digits only: that it works, no more")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how results are printed")
    return parser.parse_args(argv)


def _texts(options: argparse.Namespace) -> int:
    """Compare the service with the bare runtime, without load generators and peers."""
    from benchmarks.serve import texts  # here, not above: it takes a tokenizer, which the other tables do without

    rows = texts.measure(texts.QUICK if options.quick else texts.FULL)
    print(
        json.dumps({"texts": [asdict(row) for row in rows]}, indent=2) if options.output == "json" else texts.text(rows)
    )
    return 0


def _contenders(options: argparse.Namespace) -> list[Contender]:
    return [one for one in CONTENDERS if not options.only or one.name in options.only]


def _closed(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    size = race.QUICK if options.quick else replace(race.FULL, rounds=options.rounds, seconds=options.seconds)
    if options.clients:
        size = replace(size, concurrency=tuple(options.clients))
    rows, starts = [], []
    for name in options.workload or (["digits"] if options.quick else list(WORKLOADS)):
        more, begun = race.race(WORKLOADS[name], _contenders(options), size)
        rows += more
        starts += begun
    found["closed"] = [asdict(row) for row in rows]
    found["starts"] = [asdict(one) for one in starts]
    texts += [table.closed_loop(rows), table.starts(starts)]


def _starts(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    """Start the services in turn, without load generators."""
    names = options.workload or ["digits"]
    starts = [
        start for name in names for start in race.race_starts(WORKLOADS[name], _contenders(options), options.rounds)
    ]
    found["starts in turn"] = [asdict(start) for start in starts]
    texts.append(table.starts(starts))


def _open(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    names = options.workload or (["digits"] if options.quick else ["digits", "conv"])
    rows = [row for name in names for row in openloop.rates(WORKLOADS[name], 1 if options.quick else 10)]
    found["open"] = [asdict(row) for row in rows]
    texts.append(openloop.text(rows))


def _overload(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    seconds = 5.0 if options.quick else options.overload_seconds
    names = options.workload or ["conv"]
    rows = [openloop.overload(WORKLOADS[name], seconds) for name in names]
    found["overload"] = [asdict(row) for row in rows]
    texts.append(openloop.overload_text(rows))


def _providers(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    names = options.workload or (["digits"] if options.quick else list(WORKLOADS))
    rows = [
        row for name in names for row in providers.measure(WORKLOADS[name], 0.1 if options.quick else options.seconds)
    ]
    found["providers"] = [asdict(row) for row in rows]
    texts.append(providers.text(rows))


def _capacity(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    seconds = 1.0 if options.quick else options.seconds
    with tempfile.TemporaryDirectory() as folder:
        names = [] if options.bundle else options.workload or (["digits"] if options.quick else list(WORKLOADS))
        bundles = {name: WORKLOADS[name].bundle(Path(folder) / name) for name in names}
        rows = [
            capacity.measure(name, bundle, options.deadline_ms, seconds)
            for name, bundle in (bundles or {str(options.bundle): options.bundle}).items()
        ]
    found["capacity"] = [asdict(row) for row in rows]
    texts.append(capacity.text(rows))


def _attacks(options: argparse.Namespace, found: dict[str, Any], texts: list[str]) -> None:
    rows = attacks.measure(1.0 if options.quick else options.seconds, options.attack or [])
    found["attacks"] = [asdict(row) for row in rows]
    texts.append(attacks.text(rows))


_MEASURES = {
    "closed": _closed,
    "open": _open,
    "overload": _overload,
    "starts": _starts,
    "providers": _providers,
    "capacity": _capacity,
    "attacks": _attacks,
}


def _leave(number: int, _frame: FrameType | None) -> None:
    """Handle the signal like Ctrl-C; a second signal does not interrupt ending the processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
