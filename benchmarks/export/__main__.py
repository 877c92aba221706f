"""`python -m benchmarks.export`: a mixture of experts as a loop over those that are hit, beside gathered weights."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.export.experts import FORMS, Cost, table
from pipeline.system.errors import PipelineError, ResourceError

EXPERTS = (4, 16, 64)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    try:
        costs = [_measure(form, experts, options.hidden) for experts in options.experts for form in FORMS]
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps([asdict(cost) for cost in costs], indent=2) if options.output == "json" else table(costs))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.export", description="time and memory of experts in ONNX Runtime"
    )
    parser.add_argument("--experts", type=int, nargs="+", default=EXPERTS, help="how many there are; 4 are active")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model; an expert is half as wide")
    parser.add_argument("--output", "-o", choices=("text", "json"), default="text")
    return parser.parse_args(argv)


def _measure(form: str, experts: int, hidden: int) -> Cost:
    """Run in a separate process: the peak memory of a process never falls."""
    argv = [sys.executable, "-m", "benchmarks.export.experts", form, str(experts), str(hidden)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode:
        raise ResourceError(f"{form} with {experts} experts: {' '.join(result.stderr.split())[-400:]}")
    return Cost(**json.loads(result.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
