"""The columns of `predictions.npz`, one value (or row) per sample under each name."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = dict[str, Array]

CANDIDATE, BASELINE = "candidate.", "baseline."  # before the names of what each said
PREDICTED = "predicted"  # the class index, number or score, beside one column for each metric
PROBABILITIES = "probabilities"  # a row per sample
ACTUAL, QUERY, SLICE = "actual", "query", "slice."  # what is known of the samples themselves
