"""`pipe plan` in this process without a process that estimates memory, which imports torch and takes seconds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

ESTIMATE = dict.fromkeys(("bytes", "weights", "gradients", "optimizer", "activations", "limit"), 1 << 20)


def fixed_memory_estimate() -> Any:
    """Return a context in which `pipe plan` prints this estimate."""
    return patch("pipeline.cli.run.plan_memory", lambda *_: ESTIMATE)
