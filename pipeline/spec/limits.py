"""What a bundle says of its service: how much it takes, and how it runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipeline.spec.frozen import Frozen


class Limits(Frozen):
    max_batch_size: int
    max_body_bytes: int
    max_waiting: int = 1024
    deadline_seconds: float = 0.0  # of requests that name none; 0: none
    max_cache_bytes: int = 256 << 20  # of a language model, for the keys and values of all texts being written
    axes: Mapping[str, int] = {}  # how long a named axis may be, as the task says it


class Runtime(Frozen):
    """How the service should run the model unless told otherwise at its start."""

    provider: Literal["auto", "cpu", "cuda"]
    threads: int
    batch_rows: int = 32
    batch_delay_ms: float = 0.0


# Words of the serve section that travel in the bundle.
SEALED = tuple(name for name in (*Limits.model_fields, *Runtime.model_fields) if name != "axes")
