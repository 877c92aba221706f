"""`python -m pipeline.evaluate RUN [--root ROOT]`, as one process or under torchrun."""

from __future__ import annotations

import sys

from pipeline.contract.run import run_step
from pipeline.evaluate.evaluate import evaluate

if __name__ == "__main__":
    sys.exit(run_step("evaluate", evaluate, sys.argv[1:]))
