"""Where a classifier errs: the confusion matrix, and precision, recall and F1 of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Integers = np.ndarray[Any, Any]


def confusion(actual: Integers, predicted: Integers, count: int) -> Integers:
    """Rows are true classes, columns predicted ones."""
    return np.bincount(actual * count + predicted, minlength=count * count).reshape(count, count)


def per_class(matrix: Integers, classes: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """A ratio with nothing to divide by is None: the recall of a class never seen, the precision of one never said."""
    right = np.diag(matrix)
    seen, claimed = matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall, f1 = _ratio(right, claimed), _ratio(right, seen), _ratio(2 * right, seen + claimed)
    return {
        str(name): {
            "samples": int(seen[i]),
            "precision": precision[i],
            "recall": recall[i],
            "f1": f1[i],
        }
        for i, name in enumerate(classes)
    }


def _ratio(part: Integers, whole: Integers) -> list[float | None]:
    return [float(one / all_) if all_ else None for one, all_ in zip(part.tolist(), whole.tolist(), strict=True)]
