"""Memory that a training step frees and the next one asks for again, in the C library and in Python."""

from __future__ import annotations

import ctypes
import gc
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def keep_freed_memory() -> bool:
    """Reuse freed memory instead of giving it back to the system at every step; whether the C library can do that.

    Activations and gradients are freed and allocated once a step. Depending on what else lies in the heap, glibc gives
    them back, and the kernel hands out zeroed pages for the next step, a fault for each: measured as up to a quarter of
    a small net's step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def forget_what_lasts() -> None:
    """Leave model, optimizer and modules out of the search for garbage: it would walk over them all again and again."""
    gc.collect()
    gc.freeze()
