"""The exchanges this process has begun and not finished, as torch's flight recorder has them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torch._C import _distributed_c10d as c10d

_KEPT = 64  # the newest exchanges
_TOLD = 3


def record_exchanges() -> None:
    """Before the first one: torch looks once. The recording itself is lost in the noise of an exchange over gloo."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_KEPT))


def unfinished() -> str:
    """Such as `gloo:all_reduce, no. 12, of [151498] Float`; nothing where the recorder knows of none."""
    recorder: Any = c10d  # published without types
    body = json.loads(recorder._dump_fr_trace_json(True, False))
    open_ones = [entry for entry in body.get("entries", []) if not entry["retired"]]
    return "; ".join(map(describe, open_ones[-_TOLD:]))


def describe(entry: Mapping[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    tensors = [f"{shape} {kind}" for shape, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)]
    return f"{entry['profiling_name']}, no. {number}, of {' and '.join(tensors) or 'nothing'}"
