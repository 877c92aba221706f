"""Compare a variant with torch on the test set: at each batch size, and at shapes that were never traced."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from export.checks.cases import shape_cases, to_feed, torch_outputs
from export.checks.parity import graph_outputs
from export.compare import Arrays, Attempts, Graph
from export.conversion.to_onnx import tensor_specs
from export.sessions import open_graph, open_session, run
from export.variants.judge import Answers, BatchSizeResult, Deviation, compare_scores, measure_deviation, output_scale
from export.variants.quantize import calibration_feeds
from pipeline.contract.data import Samples, as_task_outputs
from pipeline.contract.task import Batch, HasAxes, Task
from pipeline.statistics.scores import Columns, actual_columns, score_batch

_FAULT_SEARCH_SAMPLES = 32  # test samples


@dataclass(frozen=True)
class SampleComparison:
    """Compares files with torch on the test set."""

    task: Task
    model: nn.Module
    test: Samples
    path: Path  # the file that was verified at all batch sizes and shapes
    batch_sizes: Sequence[int]
    named: Collection[str] = ()  # metrics that decide

    @cached_property
    def _outputs(self) -> Arrays:
        """The outputs of torch."""
        return torch_outputs(self.task, self.model, self.test, max(self.batch_sizes))

    @cached_property
    def scale(self) -> Mapping[str, float]:
        return {name: output_scale(array) for name, array in self._outputs.items() if array.dtype.kind == "f"}

    @cached_property
    def columns(self) -> Columns:
        samples = self._all_samples()
        return self._score(samples, self._outputs) | actual_columns(self.task, samples, len(self.test))

    def answers(self, path: Path) -> Answers:
        if path == self.path:
            return Answers([self._at_size(path, max(self.batch_sizes))], [])
        return Answers([self._at_size(path, size) for size in self.batch_sizes], self._untraced_deviations(path))

    def calibration_feeds(self, count: int) -> Sequence[Arrays]:
        return calibration_feeds(self.task, tensor_specs(self.path)[0], count)

    def timed_feed(self, rows: int) -> Arrays:
        return to_feed(self.task, self.test.batch([index % len(self.test) for index in range(rows)]))

    def fault_feed(self) -> Arrays:
        return to_feed(self.task, self.test.batch(range(min(_FAULT_SEARCH_SAMPLES, len(self.test)))))

    def kernel_differences(self, path: Path) -> float:
        """Return the largest difference between integer kernels and float kernels for a quantized file."""
        graphs = (open_graph(path), partial(run, open_session(path, optimized=False)))
        expected, actual = (self._run(graph, max(self.batch_sizes)) for graph in graphs)
        units = {name: 1.0 for name, array in expected.items() if array.dtype.kind == "f"}
        return measure_deviation(expected, actual, units).largest

    def _at_size(self, path: Path, size: int) -> BatchSizeResult:
        outputs = self._run(open_graph(path), size)
        deviation = measure_deviation(self._outputs, outputs, self.scale)
        scores = self._score(self._all_samples(), outputs)
        return BatchSizeResult(size, deviation, compare_scores(self.task, scores, self.columns, self.named))

    def _untraced_deviations(self, path: Path) -> list[Deviation]:
        """Return the deviations at untraced lengths and paddings, if the task has dynamic axes."""
        if not isinstance(self.task, HasAxes):
            return []
        graph, deviations = open_graph(path), []
        for case in shape_cases(self.task, self.model, self.test, Attempts()):  # failures are reported already
            expected, actual = (case.unpadded(outputs) for outputs in (case.expected, graph(case.feed)))
            deviations.append(measure_deviation(expected, actual, self.scale))
        return deviations

    def _run(self, graph: Graph, size: int) -> Arrays:
        return graph_outputs(graph, self.task, self.test, size)

    def _all_samples(self) -> Batch:
        return self.test.batch(range(len(self.test)))

    def _score(self, batch: Batch, outputs: Arrays) -> Columns:
        tensors = as_task_outputs(self.task, {name: torch.from_numpy(array) for name, array in outputs.items()})
        return score_batch(self.task, lambda _: tensors, batch)
