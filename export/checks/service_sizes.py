"""Compare the file with torch at the batch sizes that a service can form, several times and in another order.

A service merges waiting requests up to `serve.batch_rows` and accepts requests up to `serve.max_batch_size`. Rows do
not depend on each other, which export/checks/parity.py shows at several sizes, so torch computes each row once.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.checks.cases import to_feed
from export.compare import Arrays, Case, Comparison, Graph, Rows, combined_row, compare
from export.sessions import DEFAULT_PLACE
from export.tolerance import Scales
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Export, Serve
from pipeline.contract.task import Task
from pipeline.system.errors import StageError

_SMALL = 64  # every size up to here
_AGAIN = 8  # sizes, about, that are compared once more
_MIN_SECONDS = 0.5  # of comparing sizes, however quick the test set was
_LONGEST_BATCH_SECONDS = 60.0  # larger ones are left out: by their time, and before they take all memory
_ROWS = 256  # of the test set that batches are made of
_MEMORY = ("alloc", "memory")  # words of an error that is about it
_KIND = "sizes of a service"


@dataclass(frozen=True)
class ServedSizes:
    """The largest batch that is merged, and the largest request."""

    merged: int
    request: int

    @classmethod
    def from_settings(cls, serve: Serve) -> ServedSizes:
        return cls(serve.batch_rows, serve.max_batch_size)

    @property
    def largest(self) -> list[int]:
        """Return the limits and their neighbours, which are compared in any case."""
        limits = {self.merged, self.request}
        sizes = {size + step for size in limits for step in (-1, 0, 1)}
        return sorted(size for size in sizes if 0 < size <= max(limits))

    @property
    def others(self) -> list[int]:
        """Return the other sizes that a service can form: small ones, then multiples of high powers of two first.

        So each further size halves a gap between those before it; the neighbours of powers of two come with them.
        """
        top = max(self.merged, self.request)
        powers = [1 << exponent for exponent in range(top.bit_length() + 1)]
        near = {power + step for power in powers for step in (-1, 0, 1)}
        first = sorted(size for size in {*range(1, _SMALL + 1), *near} if 0 < size <= top)
        rest = sorted(range(_SMALL + 1, top + 1), key=lambda size: -(size & -size))
        return [size for size in dict.fromkeys((*first, *rest)) if size not in self.largest]


class SizeComparison:
    """Runs of one file at served sizes: `first` in ascending order, then in another, `again` after all other checks."""

    def __init__(
        self, task: Task, samples: Samples, reference: Arrays, config: Export, served: ServedSizes, scales: Scales
    ) -> None:
        rows = min(_ROWS, len(samples))
        self._inputs = to_feed(task, samples.batch(range(rows)))
        self._expected = {name: array[:rows] for name, array in reference.items()}
        self._rows, self._config, self._scales, self._served = rows, config, scales, served
        self._parts: list[Comparison] = []
        self._seconds_per_row, self._budget = 0.0, _MIN_SECONDS
        self.sizes: set[int] = set()
        self.left_out: list[str] = []

    def first(self, graph: Graph, seconds: float) -> None:
        """Compare every size, and once more in another order all but the neighbours of large powers of two.

        Sizes that are not limits are compared only as long as `seconds` last. Few get the other order in `again`.
        """
        self._warm(graph)
        chosen = self._affordable(seconds)
        limits = {*self._served.largest, *(1 << exponent for exponent in range(max(chosen, default=1).bit_length()))}
        order = [size for size in chosen if len(chosen) > _AGAIN and (size <= _SMALL or size in limits)]
        random.Random(0).shuffle(order)
        for number, size in enumerate((*chosen, *order)):
            self._compare(graph, size, number)

    def again(self, graph: Graph) -> None:
        """Compare some sizes that are not too long once more, later and in another session."""
        sizes = [size for size in sorted(self.sizes) if self._seconds(size) <= self._budget]
        for number, size in enumerate(reversed(sizes[:: max(1, len(sizes) // _AGAIN)])):
            self._compare(graph, size, number + 1)

    def rows(self) -> Rows:
        """Return one row for parity.json that names the worst size."""
        return [combined_row(self._parts, _KIND, DEFAULT_PLACE)] if self._parts else []

    def _warm(self, graph: Graph) -> None:
        size = max(1, min(self._rows, self._served.merged, max(self._config.batch_sizes)))
        feed, runs = self._case(size, 0).feed, list[float]()
        while not runs or (len(runs) < 4 and sum(runs) < _MIN_SECONDS):  # one short run may be interrupted
            runs.append(timeit.timeit(lambda: graph(feed), number=1))
        self._seconds_per_row = min(runs) / size

    def _affordable(self, seconds: float) -> list[int]:
        """Return the limits that are not too long, and as many of the other sizes, small ones first, as fit."""
        chosen = [size for size in self._served.largest if self._seconds(size) <= _LONGEST_BATCH_SECONDS]
        if long := sorted(set(self._served.largest) - set(chosen)):
            self.left_out.append(
                f"batches of {_list_sizes(long)} test samples: one takes about {self._seconds(long[-1]):.0f} s here; "
                "serve.max_batch_size can be lower"
            )
        left = 2 * sum(map(self._seconds, chosen))
        self._budget, without = max(seconds, _MIN_SECONDS), list[int]()
        for size in self._served.others:
            left += 2 * self._seconds(size)
            (chosen if left <= self._budget else without).append(size)
        if without:
            self.left_out.append(f"batches of {_list_sizes(without)} test samples: they would take longer than the test set")  # fmt: skip  # noqa: E501
        return sorted(chosen)

    def _seconds(self, size: int) -> float:
        return self._seconds_per_row * size

    def _case(self, size: int, start: int) -> Case:
        index = (np.arange(size) + start) % self._rows
        feed = {name: array[index] for name, array in self._inputs.items()}
        expected = {name: array[index] for name, array in self._expected.items()}
        return Case(_KIND, f"batch {size} of test samples", feed, expected)

    def _compare(self, graph: Graph, size: int, start: int) -> None:
        try:
            part = compare(graph, self._case(size, start), self._config, self._scales)
        except StageError as error:
            if size <= max(self._config.batch_sizes) or not any(word in str(error).lower() for word in _MEMORY):
                raise
            self.left_out.append(f"batches of {size} test samples: too little memory here")
            return
        self.sizes.add(size)
        self._parts.append(part)


def _list_sizes(sizes: Sequence[int]) -> str:
    if len(sizes) > 6:
        return f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)"
    return ", ".join(map(str, sizes))
