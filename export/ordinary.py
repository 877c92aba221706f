"""Export an ordinary model: one batch in, one batch of outputs out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path

from export.checks.cases import (
    evaluated_outputs,
    make_cases,
    random_batch,
    sample_cases,
    shape_cases,
    to_feed,
    torch_outputs,
)
from export.checks.parity import compare_everywhere, compare_test_set
from export.checks.service_sizes import ServedSizes, SizeComparison
from export.checks.unseen_inputs import UnseenInputs
from export.checks.weights_check import WeightsComparison, compare_weights
from export.compare import Array, Arrays, Attempts, Case, Graph, Rows, compare, compare_kinds
from export.conversion.names import name_output_axes
from export.conversion.optimize import Written, write_optimized
from export.conversion.padding import PaddingEffect, measure_padding
from export.conversion.shapes import check_dynamic_axes, every_length, measure_shapes, untraced_batches
from export.conversion.to_onnx import ExportResult, convert, export_input, tensor_specs
from export.conversion.trace import ExportInput, find_python_length
from export.golden import GoldenInputs, sample_inputs
from export.other_formats import write_pt2, write_saved_model
from export.report import LastCheck, Report
from export.sessions import DEFAULT_PLACE, open_graph
from export.subject import ModelProperties, RunFeeds, Subject
from export.tolerance import Scales, measure_scales
from export.variants.quantize import CONVERTERS, Converter
from export.variants.samples import SampleComparison
from pipeline.contract.config import Config
from pipeline.contract.data import example_batch
from pipeline.contract.given import ExportedProgram
from pipeline.contract.signature import Signature
from pipeline.contract.task import HasAxes, declared_axes, max_axis_sizes
from pipeline.system.errors import StageError

_LENGTH_SECONDS = 10.0  # of comparing lengths, however quick the test set was


class OrdinaryExporter:
    """A model that is compared on the test set, wherever it may run, and on inputs that the test set lacks."""

    original = "torch"  # what the file is compared with
    converters: Mapping[str, Converter] = CONVERTERS
    measures_fp32_alone = True

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.properties = ModelProperties(max_axis_sizes(subject.task), getattr(subject.task, "shortest", {}))

    def export_input(self) -> ExportInput:
        subject = self.subject
        return export_input(subject.model, subject.task, example_batch(subject.task, subject.test))

    def write(self) -> Written:
        return write_optimized(self._convert, self.subject.path, self.subject.model, self.subject.config)

    def _convert(self) -> ExportResult:
        task, model, test, path = self.subject.task, self.subject.model, self.subject.test, self.subject.path
        result = convert(model, task, example_batch(task, test), self.subject.config, path)
        if isinstance(task, HasAxes):
            name_output_axes(path, declared_axes(task), measure_shapes(task, model, test))
        return result

    def phases(self, result: ExportResult) -> Iterator[Report]:
        subject, attempts = self.subject, Attempts()
        task, model, test, config, path = subject.task, subject.model, subject.test, subject.config, subject.path
        try:  # report a fixed axis here, before other sizes fail on it
            check_dynamic_axes(tensor_specs(path)[0], task)
        except StageError as error:
            raise StageError(f"{error}{find_python_length(result.source)}") from error
        reference = torch_outputs(task, model, test, max(config.batch_sizes))
        scales, started = measure_scales(reference), time.perf_counter()
        graph = open_graph(path)
        rows = compare_test_set(graph, task, test, reference, config, subject.limits)
        test_set_seconds = time.perf_counter() - started
        shapes = self._shapes(attempts) if isinstance(task, HasAxes) else []
        yield Report(rows, [asdict(compare(graph, _without_rows(case), config, scales)) for case in shapes])
        cases = [*sample_cases(task, model, test, config, attempts), *shapes]
        everywhere = compare_everywhere(cases, path, config, scales)
        yield everywhere + Report(attempts=attempts, weights=self.compare_weights(result))
        if subject.served is not None:
            yield self._compare_beyond(subject.served, reference, scales, test_set_seconds, attempts)

    def compare_weights(self, result: ExportResult) -> WeightsComparison:
        if isinstance(self.subject.model, ExportedProgram):  # its layers, which optimizations join, are not known
            return WeightsComparison(not_compared=sorted(self.subject.model.state_dict()))
        return compare_weights(self.subject.path, result.source.module)

    def _shapes(self, attempts: Attempts) -> list[Case]:
        """Return cases of shapes that were not traced: two at least, or nothing shows that axes are dynamic."""
        shapes = list(shape_cases(self.subject.task, self.subject.model, self.subject.test, attempts))
        if len({_without_rows(case).text for case in shapes}) < 2:
            raise StageError(
                "fewer than two shapes other than the traced one could be compared; add longer samples to the test data"
                + (f" ({attempts.text})" if attempts.failures else "")
            )
        return shapes

    def _compare_beyond(
        self, served: ServedSizes, reference: Arrays, scales: Scales, seconds: float, attempts: Attempts
    ) -> Report:
        """Compare at the sizes of the service and on inputs that the test set lacks, each in about `seconds`."""
        task, test, config, path = self.subject.task, self.subject.test, self.subject.config, self.subject.path
        graph = open_graph(path, spinning=False)
        sizes = SizeComparison(task, test, reference, config, served, scales)
        sizes.first(graph, seconds)
        row_seconds = seconds / (len(test) * len(config.batch_sizes))
        unseen = UnseenInputs(task, self.subject.model, test, row_seconds).cases(seconds, attempts)
        rows = compare_kinds(graph, unseen, lambda _: config, DEFAULT_PLACE, scales)
        if isinstance(task, HasAxes):
            inputs = (("lengths", text, batch) for text, batch in every_length(task, test))
            cases = make_cases(task, self.subject.model, inputs, test, attempts, max(seconds, _LENGTH_SECONDS))
            rows += compare_kinds(graph, cases, lambda _: config, DEFAULT_PLACE, scales)
        sizes.again(open_graph(path, spinning=False))
        return Report(coverage=[*sizes.rows(), *rows], left_out=sizes.left_out)

    def last_check(self) -> LastCheck:
        """Measure whether padding changes torch's outputs."""
        subject = self.subject
        axes = {spec.name: spec.shape for spec in tensor_specs(subject.path)[1]}
        compute = partial(evaluated_outputs, subject.task, subject.model)
        effect = measure_padding(subject.task, compute, subject.test, axes, subject.config)
        lines = [f"warning: {effect.text}"] if effect.text else []
        if effect.padding and not effect.differing:
            lines.insert(0, f"equal with and without padding, {effect.samples} padded test samples")
        return LastCheck({"padding": asdict(effect)} if effect != PaddingEffect() else {}, lines, effect.text)

    def fault_feeds(self) -> Iterator[Arrays]:
        """Yield one sample, several, the start of the test set, untraced shapes and random inputs."""
        task, test = self.subject.task, self.subject.test
        first = islice(test.batches(range(len(test)), 64), 16)
        batches = [test.batch([0]), test.batch(range(min(2, len(test)))), *first]
        if isinstance(task, HasAxes):
            batches += [untraced.batch for untraced in untraced_batches(task, test)]
        batches += [random_batch(task, test, rows, rows) for rows in (1, 7)]
        for batch in batches:
            yield to_feed(task, batch)

    def write_format(self, name: str, folder: Path) -> tuple[Path, Rows]:
        return {"pt2": write_pt2, "savedmodel": write_saved_model}[name](self, folder)

    def compare_format(self, run_feeds: RunFeeds) -> Rows:
        """Compare on the whole test set at every size, and on the other inputs the bundle's file was compared on."""
        task, model, test, config = self.subject.task, self.subject.model, self.subject.test, self.subject.config
        cases = list(sample_cases(task, model, test, config, Attempts()))
        if isinstance(task, HasAxes):
            cases += shape_cases(task, model, test, Attempts())
        batches = (batch for size in config.batch_sizes for batch in test.batches(range(len(test)), size))
        outputs = iter(run_feeds([*(to_feed(task, batch) for batch in batches), *(case.feed for case in cases)]))

        def run(_: Mapping[str, Array]) -> Arrays:
            return next(outputs)

        reference = torch_outputs(task, model, test, max(config.batch_sizes))
        rows = compare_test_set(run, task, test, reference, config)
        return [*rows, *(asdict(compare(run, case, config)) for case in cases)]

    def open_variants(self, config: Config) -> SampleComparison:
        subject = self.subject
        sizes, named = config.export.batch_sizes, config.evaluate.named_metrics
        return SampleComparison(subject.task, subject.model, subject.test, subject.path, sizes, named)

    def complete(self, properties: ModelProperties, files: Path) -> ModelProperties:  # noqa: ARG002
        return properties

    def check_bundle(self, bundle: Path, signature: Signature) -> None:
        """Check nothing: the bundle has no files that must fit the model."""

    def golden_inputs(self, graph: Graph, signature: Signature, rounding: float) -> GoldenInputs:  # noqa: ARG002
        return sample_inputs(self.subject.task, self.subject.test, signature)


def _without_rows(case: Case) -> Case:
    """Leave the batch size out of the text, which is in the row beside it."""
    return replace(case, text=case.text.partition(", ")[2])
