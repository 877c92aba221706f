"""Compare the file with torch wherever it may run: providers, threads, batch sizes, random inputs, untraced shapes.

The whole test set is compared once, with the settings a service has by default (export/parity.py). Here every other
way to run gets a batch of each size, of real samples and of values drawn at random from the data.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from export.padding import MASK
from export.parity import Arrays, Comparison, has_missing, measure, named_arrays, run, unpadded
from export.to_onnx import untraced_batches
from export.tolerance import Scales, measure_scale
from pipeline.contract.data import Samples, forward
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import HasAxes, Task
from pipeline.system.errors import StageError
from pipeline.system.processes import cuda_problem

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_SUPPORTED_PROVIDERS = (CPU, CUDA)  # providers a service can be configured for
_VALUE_SAMPLES = 256  # samples from whose values random inputs are drawn


@dataclass(frozen=True)
class RuntimeSetup:
    """A provider, its number of threads and precision. `exact`: without TF32, CUDA's default for products."""

    provider: str
    threads: int  # 0: as many as there are cores
    exact: bool = True

    @property
    def text(self) -> str:
        if self.provider == CUDA:
            return "CUDA" if self.exact else "CUDA in TF32"
        return f"CPU, {'1 thread' if self.threads == 1 else 'all threads'}"

    def open(self, path: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self.threads
        settings = {"use_tf32": "0" if self.exact else "1"} if self.provider == CUDA else {}
        session = onnxruntime.InferenceSession(str(path), options, providers=[(self.provider, settings)])
        if session.get_providers()[0] != self.provider:
            raise StageError(f"{self.provider}: ONNX Runtime has it, but cannot load its libraries")
        return session


@dataclass(frozen=True)
class Coverage:
    """Comparisons beyond the test set, and those that were not possible."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One batch and torch's outputs for it."""

    kind: str  # real samples, random inputs or shapes
    text: str
    feed: Arrays
    expected: Arrays
    mask: np.ndarray[Any, Any] | None = None  # where there is no padding


def runtime_setups() -> tuple[list[RuntimeSetup], list[str]]:
    """Return the setups of this machine, and a sentence for each provider that cannot be used."""
    setups, left_out = [RuntimeSetup(CPU, 0), RuntimeSetup(CPU, 1)], []
    available = onnxruntime.get_available_providers()
    if reason := cuda_problem(available):
        left_out.append(f"{CUDA}: {reason}")
    else:
        setups += [RuntimeSetup(CUDA, 0), RuntimeSetup(CUDA, 0, exact=False)]
    left_out += [f"{name}: no service of ours uses it" for name in available if name not in _SUPPORTED_PROVIDERS]
    return setups, left_out


def verify_everywhere(
    task: Task, model: nn.Module, samples: Samples, path: Path, config: Export, scales: Scales | None = None
) -> Coverage:
    """Compare every size and shape with every setup; torch computes each once."""
    setups, left_out = runtime_setups()
    coverage = Coverage(left_out=left_out)
    cases = list(make_cases(task, model, case_inputs(task, samples, config), coverage.left_out))
    for setup in setups:
        session = setup.open(path)
        for kind in dict.fromkeys(case.kind for case in cases):
            cases_of_kind = [case for case in cases if case.kind == kind]
            coverage.rows.append(compare_at(setup, session, cases_of_kind, config, scales))
    return coverage


def compare_at(
    setup: RuntimeSetup,
    session: onnxruntime.InferenceSession,
    cases: Sequence[Case],
    config: Export,
    scales: Scales | None = None,
) -> dict[str, Any]:
    """Combine all cases of one kind into one row that names the worst."""
    parts = []
    for case in cases:
        started = time.perf_counter()
        outputs = run(session, case.feed)
        seconds = time.perf_counter() - started
        limits = tolerance(setup, config, case.expected)
        parts.append(compare_case(case, outputs, limits, seconds, f" ({setup.text})", scales))
    return combined_row(parts, cases[0].kind, setup.text)


def combined_row(parts: Sequence[Comparison], kind: str, place: str) -> dict[str, Any]:
    """Combine comparisons of one kind into a row for parity.json that names the worst."""
    return {**asdict(_combine(parts)), "inputs": kind, "place": place, "batches": len(parts)}


def compare_outputs(cases: Sequence[Case], outputs: Sequence[Arrays], config: Export) -> list[dict[str, Any]]:
    """Compare outputs that were computed elsewhere."""
    return [
        asdict(compare_case(case, case_outputs, config, 0.0)) for case, case_outputs in zip(cases, outputs, strict=True)
    ]


def compare_case(
    case: Case, outputs: Arrays, config: Export, seconds: float, suffix: str = "", scales: Scales | None = None
) -> Comparison:
    pairs = {
        name: tuple(unpadded(arrays[name], case.mask) for arrays in (case.expected, outputs)) for name in case.expected
    }
    rows = len(next(iter(case.feed.values())))
    equal_nan = has_missing(case.feed)
    return measure(pairs, config, rows, seconds, f"{case.text}{suffix}", equal_nan=equal_nan, scales=scales)


def tolerance(setup: RuntimeSetup, config: Export, expected: Arrays) -> Export:
    """Return the tolerances of a setup: TF32 keeps 10 bits of each factor."""
    if setup.exact:
        return config
    shares = [
        max(float(np.ptp(array[np.isfinite(array)])), scale.largest) / scale.spread
        for array in expected.values()
        if array.dtype.kind == "f" and np.isfinite(array).any()
        for scale in [measure_scale(array)]
    ]
    share = max(shares, default=0.0)
    return config.model_copy(update={"rtol": max(config.rtol, _TF32), "atol": max(config.atol, _TF32 * share)})


def random_batch(task: Task, samples: Samples, rows: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of values drawn at random from the data; floats also between the smallest and the largest.

    Masks are kept as they are, and integers stay among the values that occur.
    """
    generator = torch.Generator().manual_seed(seed)
    real = samples.batch([index % len(samples) for index in range(rows)])
    pool = samples.batch(range(min(_VALUE_SAMPLES, len(samples))))
    return {**real, **{name: _random_column(pool[name], real[name], generator) for name in task.inputs if name != MASK}}


def _random_column(pool: Tensor, real: Tensor, generator: torch.Generator) -> Tensor:
    index = torch.randint(pool.numel(), real.shape, generator=generator)
    values = pool.reshape(-1)[index]
    if not real.dtype.is_floating_point:
        return values
    known = pool[~pool.isnan()]
    low, high = (float(bound) for bound in known.aminmax()) if known.numel() else (np.nan, np.nan)
    if not np.isfinite([low, high]).all():
        return values
    uniform = torch.rand(real.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    use_pool = torch.rand(real.shape, generator=generator) < 0.5
    return torch.where(use_pool, values, uniform.to(real.dtype))


def case_inputs(task: Task, samples: Samples, config: Export) -> Iterator[tuple[str, str, Mapping[str, Tensor], Any]]:
    for size in config.batch_sizes:
        rows = range(min(size, len(samples)))
        yield "real samples", f"batch {len(rows)} of test samples", samples.batch(rows), None
        yield "random inputs", f"batch {size} of random inputs", random_batch(task, samples, size, size), None
    if isinstance(task, HasAxes):
        for untraced in untraced_batches(task, samples):
            yield "shapes", f"batch {untraced.rows}, {untraced.text}", untraced.batch, untraced.token_mask


@torch.no_grad()
def make_cases(
    task: Task, model: nn.Module, inputs: Iterable[tuple[str, str, Mapping[str, Tensor], Any]], left_out: list[str]
) -> Iterator[Case]:
    """Yield torch's outputs for each batch; note the batches for which torch fails or returns NaN."""
    for kind, text, batch, mask in inputs:
        try:
            expected = named_arrays(task, forward(model, task, batch))
        except (RuntimeError, IndexError, ValueError) as error:
            left_out.append(f"{text}: torch itself fails ({' '.join(str(error).split())[:160]})")
            continue
        feed = {name: batch[name].numpy() for name in task.inputs}
        has_nan = any(np.isnan(unpadded(array, mask)).any() for array in expected.values())
        if kind != "real samples" and has_nan and not has_missing(feed):
            left_out.append(f"{text}: torch itself returns NaN")
            continue
        yield Case(kind, text, feed, expected, mask)


def _combine(parts: Sequence[Comparison]) -> Comparison:
    worst = max(parts, key=lambda part: (part.beyond_tolerance > 0, part.max_abs_error))
    return replace(
        worst,
        max_rel_error=max(part.max_rel_error for part in parts),
        beyond_tolerance=sum(part.beyond_tolerance for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


_TF32 = 2.0**-7  # eight times the error of one product: sums of many lose more
