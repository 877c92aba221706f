"""`python -m evaluate RUN [--root ROOT]`, alone or under torchrun."""

from __future__ import annotations

import sys

from evaluate.evaluation import evaluate
from pipeline.spec.step import run_step

if __name__ == "__main__":
    sys.exit(run_step("evaluate", evaluate, sys.argv[1:]))
