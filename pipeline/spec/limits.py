"""What a bundle says of its service: how much it takes, and how it runs the model."""

from __future__ import annotations

from typing import Literal

from pipeline.spec.frozen import Frozen


class Limits(Frozen):
    max_batch_size: int
    max_body_bytes: int
    max_waiting: int = 1024
    deadline_seconds: float = 0.0  # of requests that name none; 0: none


class Runtime(Frozen):
    """How the service should run the model unless told otherwise at its start."""

    provider: Literal["auto", "cpu", "cuda"]
    threads: int
    batch_rows: int = 32
    batch_delay_ms: float = 0.0


SEALED = (*Limits.model_fields, *Runtime.model_fields)  # words of the serve section that travel in the bundle
