"""The order of the splits in time: a model must not learn from what came after the samples it is judged on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pipeline.contract.data import Samples
from pipeline.contract.errors import ConfigError
from pipeline.data_checks.profile import Floats
from pipeline.data_checks.rules import CheckResult, Severity

_ROWS = 4096


def check_time_order(splits: Mapping[str, Samples], column: str, severity: Severity) -> Iterator[CheckResult]:
    """Yield a failure for each split with samples that are earlier than the newest training sample."""
    if not column:
        return
    newest = float(np.nanmax(_times(splits["train"], column)))
    for split in (name for name in splits if name != "train"):
        times = _times(splits[split], column)
        early = int((times < newest).sum())
        if early:
            detail = (
                f"{early} of {len(times)} samples are earlier than the newest training sample ({newest:.10g}); to fix "
                "it: split by time, so that training ends before the others begin, or set prepare.leaks=warn"
            )
            yield CheckResult("time_order", f"{split}.{column}", severity, False, detail, float(early), 0.0)


def _times(samples: Samples, column: str) -> Floats:
    parts = []
    for batch in samples.batches(range(len(samples)), _ROWS):
        if column not in batch:
            raise ConfigError(
                f"prepare.time_column: data({samples.split!r}) has no column {column} ({', '.join(batch)})"
            )
        if batch[column].ndim != 1:
            raise ConfigError(f"prepare.time_column: {column} must be one number per sample")
        parts.append(batch[column].to("cpu").double().numpy())
    return np.concatenate(parts)
