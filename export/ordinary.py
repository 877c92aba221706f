"""Export an ordinary model: one batch in, one batch of outputs out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.checks.cases import (
    Batch,
    Inputs,
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
from export.checks.weights_check import WeightsComparison, compare_weights
from export.compare import Array, Arrays, Attempts, Case, Graph, Rows, compare, compare_kinds
from export.conversion.names import name_output_axes
from export.conversion.optimize import Written, write_optimized
from export.conversion.padding import MASK, PaddingEffect, measure_padding
from export.conversion.shapes import check_dynamic_axes, every_length, measure_shapes, untraced_batches
from export.conversion.to_onnx import ExportResult, convert, export_input, tensor_specs
from export.conversion.trace import ExportInput, find_python_length, is_equal
from export.golden import GoldenInputs, sample_inputs
from export.other_formats import write_pt2, write_saved_model
from export.report import LastCheck, Report
from export.sessions import DEFAULT_PLACE, open_graph
from export.subject import ModelProperties, RunFeeds, Subject
from export.tolerance import Scales, measure_scales
from export.variants.quantize import CONVERTERS, Converter
from export.variants.samples import SampleComparison
from pipeline.contract.config import Config
from pipeline.contract.data import Samples, example_batch, exceeded_limit, forward, is_stream, open_split
from pipeline.contract.given import ExportedProgram
from pipeline.contract.signature import Signature
from pipeline.contract.task import HasAxes, Task, declared_axes, max_axis_sizes
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


_SPLITS = ("train", "validation")
_BATCH, _SHORT_BATCH = 64, 8  # samples, and random ones of a slow model
_MAX_VALUES = 1 << 20  # of a random batch
_MAX_SAMPLES = 2048  # of a split; the budget of time may allow fewer
_MAX_STREAMED = 1024  # samples from the beginning of a stream
_WIDENED = 0.05  # of the range of a float, at both ends
_FEW_VALUES = 16  # distinct integers that are drawn from; beyond, any integer between the smallest and the largest
_RANDOM_BATCHES = 2
_MAX_COLUMNS = 512  # each drawn from a range of its own
_MIN_SECONDS = 0.5  # for all of this, however quick the test set was


@dataclass(frozen=True)
class Vocabulary:
    """Ids of an input, or of one of its columns, which an embedding of so many rows looks up."""

    name: str
    column: int | None
    size: int

    @property
    def text(self) -> str:
        return f"`{self.name}`" if self.column is None else f"column {self.column} of `{self.name}`"


@dataclass(frozen=True)
class UnseenInputs:
    """The inputs for a task's model that its test set lacks."""

    task: Task
    model: nn.Module
    test: Samples
    row_seconds: float = 0.0  # of a sample of the test set in ONNX Runtime

    def cases(self, seconds: float, attempts: Attempts) -> Iterator[Case]:
        """Yield at least one case of each kind, and as many as fit into its share of `seconds`."""
        share, pool = max(seconds, _MIN_SECONDS) / 4, [self.test.batch(_spread(len(self.test), _BATCH))]
        rows = max(_SHORT_BATCH, min(_BATCH, int(share / max(self.row_seconds, 1e-9))))
        for inputs in self._inputs(pool, attempts.left_out, rows):
            yield from make_cases(self.task, self.model, inputs, self.test, attempts, share)

    def _inputs(self, pool: list[dict[str, Tensor]], left_out: list[str], rows: int) -> Iterator[Inputs]:
        for split in _SPLITS:
            yield self._split_inputs(split, pool, left_out)
        yield self._random_inputs({name: [batch[name] for batch in pool] for name in self.task.inputs}, rows)
        for vocabulary in self.vocabularies:
            yield self._every_id(vocabulary)

    def _split_inputs(self, split: str, pool: list[dict[str, Tensor]], left_out: list[str]) -> Inputs:
        samples = _open_few(self.task, split)
        indices = _spread(len(samples), _MAX_SAMPLES)
        steps = max(1, len(indices) // _BATCH)
        for start in range(steps):  # so that each batch is spread over the whole split
            batch = samples.batch(indices[start::steps])
            if all(is_equal(batch[name], pool[0][name]) for name in self.task.inputs):
                continue  # as in projects without data, whose splits are one
            if limit := exceeded_limit(self.task, batch):
                left_out.append(f"{split} samples: {limit}")
                continue
            pool.append(batch)
            yield f"{split} samples", f"batch {len(indices[start::steps])} of {split} samples", batch

    def _random_inputs(self, pool: Mapping[str, list[Tensor]], rows: int) -> Inputs:
        size = sum(values[0].numel() for values in self.test.batch([0]).values())
        rows = max(1, min(rows, _MAX_VALUES // size))
        for seed in range(_RANDOM_BATCHES):
            batch = self.test.batch([index % len(self.test) for index in range(rows)])
            generator = np.random.default_rng(seed)
            names = [name for name in self.task.inputs if name != MASK]
            columns = {name: _draw(name, pool[name], batch[name], self.vocabularies, generator) for name in names}
            yield "random inputs of whole ranges", f"batch {rows} of random inputs", {**batch, **columns}

    def _every_id(self, vocabulary: Vocabulary) -> Inputs:
        """Yield batches that hold each id of a vocabulary once, with real values in the other inputs."""
        ids = np.random.default_rng(0).permutation(vocabulary.size)
        start = 0
        while start < len(ids):
            batch = self.test.batch([index % len(self.test) for index in range(_BATCH)])
            column = batch[vocabulary.name].clone()
            part = column if vocabulary.column is None else column[..., vocabulary.column]
            chosen = np.resize(ids[start : start + part.numel()], part.numel())
            part.copy_(torch.from_numpy(chosen).reshape(part.shape).to(part.dtype))
            start += part.numel()
            batch[vocabulary.name] = column
            if MASK in batch and vocabulary.name != MASK:
                batch[MASK] = torch.ones_like(batch[MASK])
            kind = f"every id of {vocabulary.text}"
            yield kind, f"ids up to {vocabulary.size - 1} of {vocabulary.text}", batch

    @cached_property
    def vocabularies(self) -> list[Vocabulary]:
        """Return the inputs that index embeddings, found by what the model's embeddings receive for real samples."""
        batch = self.test.batch(_spread(len(self.test), _BATCH))
        found: dict[tuple[str, int | None], int] = {}

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            for key in _places(self.task, batch, arguments[0] if arguments else None):
                size: Any = module.num_embeddings
                found[key] = min(found.get(key, size), size)

        embeddings = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        hooks = [module.register_forward_pre_hook(note) for module in embeddings]
        try:
            if embeddings:
                with torch.no_grad():
                    forward(self.model, self.task, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [Vocabulary(*key, size) for key, size in found.items()]


def _places(task: Task, batch: Batch, ids: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the inputs, or columns of inputs, that are the ids that an embedding got."""
    if not isinstance(ids, Tensor) or not ids.numel():
        return
    for name in task.inputs:
        values = batch[name]
        if values.dtype == torch.bool or bool((values != values.long()).any()):
            continue
        if values.shape == ids.shape and torch.equal(values.long(), ids.long()):
            yield name, None
        elif values.ndim > 1 and values[..., 0].numel() == ids.numel():
            for column in range(values.shape[-1]):
                if torch.equal(values[..., column].long().reshape(-1), ids.long().reshape(-1)):
                    yield name, column


def _spread(samples: int, count: int) -> list[int]:
    """Return evenly spaced indices."""
    count = min(samples, count)
    return [index * samples // count for index in range(count)]


def _open_few(task: Task, split: str) -> Samples:
    """Open a split; of a stream, only the beginning is read."""
    source: Any = task.data(split)
    if not is_stream(source):
        return open_split(task, split)
    items = [item() if callable(item) else item for item in islice(iter(source), _MAX_STREAMED)]
    return Samples(split, items, getattr(task, "collate", None))


def _draw(
    name: str, seen: list[Tensor], real: Tensor, vocabularies: list[Vocabulary], generator: np.random.Generator
) -> Tensor:
    """Return random values in the shape of `real`, of the range that was seen; ids of the whole vocabulary."""
    sizes = {vocabulary.column: vocabulary.size for vocabulary in vocabularies if vocabulary.name == name}
    is_mixed = any(column.shape[1:] != real.shape[1:] for column in seen)
    if real.ndim != 2 or None in sizes or is_mixed or real.shape[1] > _MAX_COLUMNS:
        values = np.concatenate([column.numpy().ravel() for column in seen])
        return torch.from_numpy(_draw_range(values, tuple(real.shape), sizes.get(None), generator)).to(real.dtype)
    columns = []
    for index in range(real.shape[1]):
        values = np.concatenate([column[:, index].numpy() for column in seen])
        columns.append(_draw_range(values, (len(real),), sizes.get(index), generator))
    return torch.from_numpy(np.stack(columns, axis=1)).to(real.dtype)


def _draw_range(
    values: np.ndarray[Any, Any], shape: tuple[int, ...], size: int | None, generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Draw from the vocabulary, from few distinct values, or from the range of the values."""
    if size is not None:
        return generator.integers(0, size, shape)
    known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not known.size:
        return np.full(shape, values.flat[0])
    is_whole = known.dtype.kind != "f" or bool((known == np.round(known)).all())
    distinct = np.unique(known)
    if is_whole and (known.dtype.kind in "bf" or len(distinct) <= _FEW_VALUES):
        return generator.choice(distinct, shape)
    low, high = distinct[0], distinct[-1]
    if is_whole:
        return generator.integers(int(low), int(high), shape, endpoint=True)
    wide = float(high) - float(low)
    return generator.uniform(float(low) - _WIDENED * wide, float(high) + _WIDENED * wide, shape)
