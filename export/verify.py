"""Convert a model to ONNX and verify that the file computes what the model computes.

`verify_model` is the entry: it writes the file, optimizes it if configured, and compares it with torch. A file cannot
be verified if torch's own outputs are NaN, differ between calls, or depend on the rest of the batch;
`find_nondeterminism` distinguishes these from a wrong file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from export.bundle import ModelProperties
from export.fault_search import explain_difference
from export.language_model import (
    choose_prompts,
    convert_language,
    language_export_input,
    language_feeds,
    make_generation,
    verify_greedy,
    verify_language,
    verify_random,
)
from export.names import name_output_axes
from export.optimize import (
    Optimization,
    check_file,
    check_random,
    convert_fused,
    fit_runtime,
    optimize_file,
    read_versions,
    remove_model,
    remove_plain,
    restore_plain,
)
from export.padding import PaddingEffect, measure_padding
from export.parity import (
    Arrays,
    MetricLimits,
    evaluated_outputs,
    is_different,
    named_arrays,
    open_session,
    require_equal,
    rows_with,
    run,
    torch_outputs,
    verify,
    verify_untraced,
)
from export.parity_everywhere import Coverage, random_batch, runtime_setups, tolerance, verify_everywhere
from export.service_sizes import ServedSizes, SizeComparison
from export.to_onnx import (
    ExportResult,
    check_dynamic_axes,
    convert,
    max_axis_sizes,
    measure_shapes,
    tensor_specs,
    untraced_batches,
)
from export.tolerance import Scales, allowed_error, is_within, measure_scales
from export.unseen_inputs import UnseenInputs
from export.weights_check import WeightsComparison, compare_weights
from pipeline.contract.data import Samples, example_batch, forward
from pipeline.contract.golden import Decoder
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation
from pipeline.contract.task import Generates, HasAxes, Task, declared_axes
from pipeline.system.errors import StageError


@dataclass(frozen=True)
class Verification:
    """All comparisons of a file with its model, passed or not."""

    comparisons: Sequence[dict[str, Any]]
    properties: ModelProperties
    nondeterminism: str  # why torch's own outputs cannot be compared with a file
    config: Export
    greedy: dict[str, Any] | None = None
    cause: str = ""  # the first wrong node, or the module that was traced differently
    coverage: Coverage = field(default_factory=Coverage)
    file: dict[str, Any] = field(default_factory=dict)  # properties of the file, for parity.json
    padding: PaddingEffect = field(default_factory=PaddingEffect)
    weights: WeightsComparison = field(default_factory=WeightsComparison)

    @property
    def equal(self) -> bool:
        return not self.nondeterminism and not _has_differences(self.all_rows) and not self.weights.different

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        return [*self.comparisons, *self.coverage.rows]

    def require(self) -> None:
        """Raise unless the file is the model."""
        if self.nondeterminism:
            raise StageError(f"no ONNX file can be the model: {self.nondeterminism}")
        require_equal(self.all_rows, self.config, self.cause)
        if self.weights.different:
            raise StageError(f"the ONNX file is not the model: {'; '.join(self.weights.different[:3])}")


def verify_model(
    task: Task,
    model: nn.Module,
    test: Samples,
    config: Export,
    path: Path,
    served: ServedSizes | None = None,
    limits: MetricLimits | None = None,
) -> Verification:
    """Write `path` and compare it with the model; use the plain file if the optimized one differs.

    `served`: the batches of the service; the export step gives them. `limits`: `evaluate.require`.
    """
    check_mode(model)
    check_positions(task, model)
    written: ExportResult | None
    optimised: Optimization | None
    if isinstance(task, Generates):
        language = task.language_model(model)
        generation = make_generation(task, language)
        properties = language_model_properties(generation)
        write = partial(convert_language, language, generation, config, path)
    else:
        properties = task_properties(task)
        write = partial(_convert_samples, task, model, test, config, path)
    if properties.generation and config.optimize == "transformers":
        written, optimised = convert_fused(language_export_input(language, properties.generation), config, path)
        restore = write
    else:
        written = write()
        optimised = optimize_file(path, model, config)
        restore = partial(restore_plain, path, written)
    subject = Subject(task, model, test, config, path, written or write(), properties, served, limits or {})
    optimized_result, reason = _verify_optimized(subject, optimised)
    if reason and optimised is not None:
        print(f"export.optimize={config.optimize} is not used: {reason}")
        if optimised.used != "none":
            remove_model(path)
            subject = replace(subject, written=restore())
            optimised = Optimization(config.optimize, "none", {}, reason)
    lowered, verification = optimized_result or (fit_runtime(path), verify_file(subject))
    remove_plain(path)
    verification = replace(verification, file=_file_facts(path, optimised, lowered))
    is_padded = verification.equal and properties.generation is None
    return _measure_padding(subject, verification) if is_padded else verification


def _convert_samples(task: Task, model: nn.Module, test: Samples, config: Export, path: Path) -> ExportResult:
    written = convert(model, task, example_batch(task, test), config, path)
    if isinstance(task, HasAxes):
        name_output_axes(path, declared_axes(task), measure_shapes(task, model, test))
    return written


def _measure_padding(subject: Subject, verification: Verification) -> Verification:
    axes = {spec.name: spec.shape for spec in tensor_specs(subject.path)[1]}
    compute = partial(evaluated_outputs, subject.task, subject.model)
    effect = measure_padding(subject.task, compute, subject.test, axes, subject.config)
    return replace(verification, padding=effect, properties=replace(verification.properties, padding=effect.text))


@dataclass(frozen=True)
class Subject:
    """A file and everything it is compared with."""

    task: Task
    model: nn.Module
    test: Samples
    config: Export
    path: Path
    written: ExportResult
    properties: ModelProperties
    served: ServedSizes | None = None  # None: only export.batch_sizes and the test set are compared
    limits: MetricLimits = field(default_factory=dict)


def _verify_optimized(subject: Subject, optimised: Optimization | None) -> tuple[tuple[str, Verification] | None, str]:
    """Verify the optimized file. Return the runtime settings and the verification, or None and the reason."""
    if optimised is None or optimised.used == "none":
        return None, "" if optimised is None else optimised.reason
    try:
        lowered, verification = fit_runtime(subject.path), verify_file(subject)
    except StageError as error:  # fusions write operators that ONNX's own rules do not know, for one
        return None, str(error)
    if verification.equal or verification.nondeterminism:
        return (lowered, verification), ""
    return None, f"the optimized file differs from the model: {_describe_worst(verification)}" + (
        f"; {verification.cause}" if verification.cause else ""
    )


def verify_file(subject: Subject) -> Verification:
    """Compare the file with the model in every way that applies to its kind."""
    check_file(subject.path)
    is_language_model = isinstance(subject.task, Generates)
    verification = _verify_language_model(subject) if is_language_model else _verify_samples(subject)
    if not verification.nondeterminism:  # that of torch itself is explained
        check_random(subject.path)
    return verification


def _verify_samples(subject: Subject) -> Verification:
    task, model, test, config, path = subject.task, subject.model, subject.test, subject.config, subject.path
    check_dynamic_axes(tensor_specs(path)[0], task)  # report a fixed axis here, before other sizes fail on it
    reference = torch_outputs(task, model, test, max(config.batch_sizes))
    scales, started = measure_scales(reference), time.perf_counter()
    comparisons = verify(task, model, test, path, config, reference, subject.limits)
    seconds = time.perf_counter() - started
    if isinstance(task, HasAxes):
        comparisons += verify_untraced(task, model, test, path, config, scales)
    verification = Verification(comparisons, subject.properties, "", config)
    if verification.equal:
        coverage = verify_everywhere(task, model, test, path, config, scales)
        verification = replace(verification, coverage=coverage, weights=_compare_weights(subject))
    if verification.equal and subject.served is not None:
        beyond = _verify_beyond(subject, subject.served, reference, scales, seconds)
        rows, left_out = verification.coverage.rows + beyond.rows, verification.coverage.left_out + beyond.left_out
        verification = replace(verification, coverage=Coverage(rows, left_out))
    if verification.equal:
        return verification
    nondeterminism = find_nondeterminism(task, model, test, config)
    return replace(
        verification,
        nondeterminism=nondeterminism,
        cause="" if nondeterminism else explain_difference(subject.written, path, feeds(task, test), config),
    )


def _compare_weights(subject: Subject) -> WeightsComparison:
    return compare_weights(subject.path, subject.written.traced.module)


def _verify_beyond(
    subject: Subject, served: ServedSizes, reference: Arrays, scales: Scales, seconds: float
) -> Coverage:
    """Compare at the sizes of the service and on inputs that the test set lacks, each in about `seconds`."""
    task, test, config, session = subject.task, subject.test, subject.config, open_session(subject.path, False)
    sizes = SizeComparison(task, test, reference, config, served, scales)
    sizes.first(partial(run, session), seconds)
    unseen = UnseenInputs(task, subject.model, test, config, scales).verify(partial(run, session), seconds)
    sizes.again(partial(run, open_session(subject.path, False)))
    return Coverage([*sizes.rows(), *unseen.rows], [*sizes.left_out, *unseen.left_out])


def _verify_language_model(subject: Subject) -> Verification:
    task: Any = subject.task
    model, generation, config, test = (
        task.language_model(subject.model),
        subject.properties.generation,
        subject.config,
        subject.test,
    )
    assert generation is not None
    specs = {spec.name: spec for spec in tensor_specs(subject.path)[0]}

    def decoder_in(session: Any) -> Decoder:
        return Decoder(lambda feed: run(session, feed), generation, specs)

    decoder = decoder_in(open_session(subject.path))
    comparisons = verify_language(model, decoder, test, config, partial(evaluated_outputs, task, subject.model))
    verification = Verification(comparisons, subject.properties, "", config)
    if verification.equal:
        setups, left_out = runtime_setups()
        rows = []
        for setup in setups:
            setup_decoder = decoder_in(setup.open(subject.path))
            row = verify_random(model, setup_decoder, partial(tolerance, setup, config), setup.text)
            rows.append({**row, "inputs": "random inputs", "place": setup.text})
        weights = _compare_weights(subject)
        verification = replace(verification, coverage=Coverage(rows, left_out), weights=weights)
    if not verification.equal:  # no need to compare generated texts
        nondeterminism = find_nondeterminism(task, subject.model, test, config)
        cause = (
            ""
            if nondeterminism
            else explain_difference(subject.written, subject.path, language_feeds(model, decoder, test), config)
        )
        return replace(verification, nondeterminism=nondeterminism, cause=cause)
    prompts = choose_prompts(task.prompting().prompts, test, generation)
    return replace(verification, greedy=asdict(verify_greedy(model, decoder, prompts, config)))


def task_properties(task: Task) -> ModelProperties:
    return ModelProperties(axes=max_axis_sizes(task))


def language_model_properties(generation: Generation) -> ModelProperties:
    limits = dict.fromkeys(("sequence", "total"), generation.positions_limit)
    return ModelProperties(axes=limits, generation=generation)


def _file_facts(path: Path, optimised: Optimization | None, lowered: str) -> dict[str, Any]:
    versions = read_versions(path)
    return {
        "opset": versions["opset"],
        "ir_version": versions["IR version"],
        **({"lowered": lowered} if lowered else {}),
        **({"optimize": asdict(optimised)} if optimised is not None else {}),
    }


def _has_differences(comparisons: Sequence[Mapping[str, Any]]) -> bool:
    return any(map(is_different, comparisons))


def _describe_worst(verification: Verification) -> str:
    worst = max(verification.all_rows, key=lambda row: (row["beyond_tolerance"], row["max_abs_error"]))
    beyond, error = worst["beyond_tolerance"], worst["max_abs_error"]
    return f"{beyond} elements beyond tolerance, off by {error:.3g} in {worst['worst']}"


def check_mode(model: nn.Module) -> None:
    """Reject modules that stay in training mode: dropout would be random and running statistics would change."""
    model.eval()
    if training := [name or type(model).__name__ for name, module in model.named_modules() if module.training]:
        raise StageError(
            f"{', '.join(training[:4])}: still in training mode after eval(); it would be exported with its dropout "
            "and running statistics; do not override train() in the model"
        )


def check_positions(task: Task, model: nn.Module) -> None:
    """Reject a `longest` beyond the positions the model was configured for."""
    configs = (getattr(module, "config", None) for module in model.modules())
    maximum = next(
        (positions for config in configs if isinstance(positions := getattr(config, _POSITIONS, None), int)), None
    )
    for axis, size in max_axis_sizes(task).items():
        if maximum is not None and size > maximum:
            raise StageError(f"`longest` allows {size} for axis `{axis}`, but the model's configuration ends at {maximum} ({_POSITIONS})")  # fmt: skip  # noqa: E501


def feeds(task: Task, test: Samples) -> Iterator[Arrays]:
    """Yield inputs for the fault search: one sample, several, the start of the test set, and untraced shapes."""
    batches = [test.batch([0]), test.batch(range(min(2, len(test)))), *islice(test.batches(range(len(test)), 64), 16)]
    if isinstance(task, HasAxes):
        batches += [untraced.batch for untraced in untraced_batches(task, test)]
    batches += [random_batch(task, test, rows, rows) for rows in (1, 7)]
    for batch in batches:
        yield {name: batch[name].numpy() for name in task.inputs}


_POSITIONS = "max_position_embeddings"


Array = np.ndarray[Any, Any]

_REPEATED_SAMPLES = 4  # samples that are run twice, and one by one
_BATCH = 64


def find_nondeterminism(task: Task, model: nn.Module, test: Samples, config: Export) -> str:
    """Return why torch's outputs are not reproducible, or nothing if the same samples give the same numbers."""
    first = _torch_outputs(task, model, test, range(min(_REPEATED_SAMPLES, len(test))))
    second = _torch_outputs(task, model, test, range(min(_REPEATED_SAMPLES, len(test))))
    if changed := _quote_names(name for name in first if not np.array_equal(first[name], second[name], equal_nan=True)):
        return (
            f"torch returns different values of {changed} for the same input; look for functional dropout without "
            "training=self.training, or noise in a router"
        )
    return _nan_outputs(task, model, test) or _depends_on_batch(task, model, test, config, first)


@torch.no_grad()
def _nan_outputs(task: Task, model: nn.Module, test: Samples) -> str:
    """Return where torch returns NaN for a sample without missing numbers; empty if nowhere."""
    for start in range(0, len(test), _BATCH):
        batch = test.batch(range(start, min(start + _BATCH, len(test))))
        missing = rows_with(np.isnan, [batch[name].numpy() for name in task.inputs])
        for name, answer in named_arrays(task, forward(model, task, batch)).items():
            if (broken := np.isnan(answer).reshape(len(answer), -1).any(axis=1) & ~missing).any():
                sample = start + int(broken.argmax())
                return (
                    f"torch itself returns NaN in `{name}` for test sample {sample}, so no file can equal it; look "
                    "for a division by zero, or a root or logarithm of a number that is not positive"
                )
    return ""


def _depends_on_batch(task: Task, model: nn.Module, test: Samples, config: Export, batched: Arrays) -> str:
    single = [
        _torch_outputs(task, model, test, range(row, row + 1)) for row in range(min(_REPEATED_SAMPLES, len(test)))
    ]
    changed = [
        name for name, answer in batched.items() if not _is_close([outputs[name] for outputs in single], answer, config)
    ]
    if not changed:
        return ""
    return (
        f"torch's {_quote_names(changed)} for a sample depends on the other samples in the batch, and a service "
        "batches requests of different clients; compute nothing along the first axis, and no Python number (as "
        "by .item()) from the whole batch"
    )


def _is_close(single: Sequence[Array], batched: Array, config: Export) -> bool:
    if any(outputs.shape != (1, *batched.shape[1:]) for outputs in single):
        return False
    joined = np.concatenate(single)
    is_near = is_within(joined, batched, allowed_error(batched, config))
    return bool((is_near | (np.isnan(joined) & np.isnan(batched))).all())


@torch.no_grad()
def _torch_outputs(task: Task, model: nn.Module, test: Samples, rows: range) -> Arrays:
    return named_arrays(task, forward(model, task, test.batch(rows)))


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
