"""Convert a model to ONNX and verify that the file computes what the model computes.

`verify_model` is the entry: it writes the file, optimizes it if configured, and compares it with torch. A file cannot
be verified if torch's own outputs are NaN, differ between calls, or depend on the rest of the batch;
`find_nondeterminism` distinguishes these from a wrong file.
"""

from __future__ import annotations

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
    convert_language,
    generation_of,
    language_feeds,
    prompts_of,
    verify_greedy,
    verify_language,
    verify_random,
)
from export.optimize import Optimised, check_file, fit_runtime, forget_plain, optimise, put_back, versions_of
from export.parity import (
    Arrays,
    evaluated_outputs,
    named_arrays,
    open_session,
    require_equal,
    run,
    verify,
    verify_variants,
)
from export.parity_everywhere import Coverage, places, scrambled, tolerance, verify_everywhere
from export.to_onnx import Written, check_free, convert, example, longest_of, tensor_specs, variants
from pipeline.contract.data import Samples, forward
from pipeline.contract.errors import StageError
from pipeline.contract.golden import Decoder
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation
from pipeline.contract.task import Generates, HasAxes, Task


@dataclass(frozen=True)
class Verification:
    """All comparisons of a file with its model, passed or not."""

    comparisons: Sequence[dict[str, Any]]
    properties: ModelProperties
    nondeterminism: str  # why torch's own outputs cannot be compared with a file
    config: Export
    greedy: dict[str, Any] | None = None
    why: str = ""  # the first wrong node, or the module that was traced differently
    coverage: Coverage = field(default_factory=Coverage)
    file: dict[str, Any] = field(default_factory=dict)  # properties of the file, for parity.json

    @property
    def equal(self) -> bool:
        return not self.nondeterminism and not _apart(self.everything)

    @property
    def everything(self) -> list[dict[str, Any]]:
        return [*self.comparisons, *self.coverage.rows]

    def require(self) -> None:
        """Raise unless the file is the model."""
        if self.nondeterminism:
            raise StageError(f"no ONNX file can be the model: {self.nondeterminism}")
        require_equal(self.everything, self.config, self.why)


def verify_model(task: Task, model: nn.Module, test: Samples, config: Export, path: Path) -> Verification:
    """Write `path` and compare it with the model; fall back to the plain file if the optimized one differs."""
    check_mode(model)
    check_positions(task, model)
    generation = None
    if isinstance(task, Generates):
        language = task.language_model(model)
        generation = generation_of(task, language)
        written = convert_language(language, generation, config, path)
    else:
        written = convert(model, task, example(task, test), config, path)
    properties = properties_of_task(task) if generation is None else properties_of_language_model(generation)
    subject = Subject(task, model, test, config, path, written, properties)
    optimised = optimise(path, model, config)
    kept, reason = _verify_optimized(subject, optimised)
    if reason and optimised is not None:
        print(f"export.optimize={config.optimize} is not used: {reason}")
        optimised = optimised if optimised.used == "none" else put_back(path, optimised, reason)
    lowered, proven = kept or (fit_runtime(path), verify_file(subject))
    forget_plain(path)
    return replace(proven, file=_of_file(path, optimised, lowered))


@dataclass(frozen=True)
class Subject:
    """A file and everything it is compared with."""

    task: Task
    model: nn.Module
    test: Samples
    config: Export
    path: Path
    written: Written
    properties: ModelProperties


def _verify_optimized(one: Subject, found: Optimised | None) -> tuple[tuple[str, Verification] | None, str]:
    """Verify the optimized file. Return the runtime settings and the verification, or None and the reason."""
    if found is None or found.used == "none":
        return None, "" if found is None else found.reason
    try:
        lowered, proven = fit_runtime(one.path), verify_file(one)
    except StageError as error:  # fusions write operators that ONNX's own rules do not know, for one
        return None, str(error)
    if proven.equal or proven.nondeterminism:
        return (lowered, proven), ""
    return None, f"the optimized file differs from the model: {_worst(proven)}" + (
        f"; {proven.why}" if proven.why else ""
    )


def verify_file(one: Subject) -> Verification:
    """Compare the file with the model in every way that applies to its kind."""
    check_file(one.path)
    return _language(one) if isinstance(one.task, Generates) else _samples(one)


def _samples(one: Subject) -> Verification:
    task, model, test, config, path = one.task, one.model, one.test, one.config, one.path
    check_free(tensor_specs(path)[0], task)  # report a fixed axis here, before other sizes fail on it
    comparisons = verify(task, model, test, path, config)
    if isinstance(task, HasAxes):
        comparisons += verify_variants(task, model, test, path, config)
    found = Verification(comparisons, one.properties, "", config)
    if found.equal:
        found = replace(found, coverage=verify_everywhere(task, model, test, path, config))
    if found.equal:
        return found
    nondeterminism = find_nondeterminism(task, model, test, config)
    return replace(
        found,
        nondeterminism=nondeterminism,
        why="" if nondeterminism else explain_difference(one.written, path, feeds(task, test), config),
    )


def _language(one: Subject) -> Verification:
    task: Any = one.task
    model, generation, config, test = task.language_model(one.model), one.properties.generation, one.config, one.test
    assert generation is not None
    specs = {spec.name: spec for spec in tensor_specs(one.path)[0]}

    def decoder_in(session: Any) -> Decoder:
        return Decoder(lambda feed: run(session, feed), generation, specs)

    decoder = decoder_in(open_session(one.path))
    comparisons = verify_language(model, decoder, test, config, partial(evaluated_outputs, task, one.model))
    found = Verification(comparisons, one.properties, "", config)
    if found.equal:
        here, without = places()
        rows = []
        for place in here:
            there = decoder_in(place.open(one.path))
            row = verify_random(model, there, partial(tolerance, place, config), place.text)
            rows.append({**row, "inputs": "random inputs", "place": place.text})
        found = replace(found, coverage=Coverage(rows, without))
    if not found.equal:  # no need to compare generated texts
        nondeterminism = find_nondeterminism(task, one.model, test, config)
        why = (
            ""
            if nondeterminism
            else explain_difference(one.written, one.path, language_feeds(model, decoder, test), config)
        )
        return replace(found, nondeterminism=nondeterminism, why=why)
    prompts = prompts_of(task.prompting().prompts, test, generation)
    return replace(found, greedy=asdict(verify_greedy(model, decoder, prompts, config)))


def properties_of_task(task: Task) -> ModelProperties:
    return ModelProperties(axes=longest_of(task))


def properties_of_language_model(generation: Generation) -> ModelProperties:
    limits = dict.fromkeys(("sequence", "total"), generation.positions_limit)
    return ModelProperties(axes=limits, generation=generation)


def _of_file(path: Path, optimised: Optimised | None, lowered: str) -> dict[str, Any]:
    versions = versions_of(path)
    return {
        "opset": versions["opset"],
        "ir_version": versions["IR version"],
        **({"lowered": lowered} if lowered else {}),
        **({"optimize": asdict(optimised)} if optimised is not None else {}),
    }


def _apart(comparisons: Sequence[Mapping[str, Any]]) -> bool:
    return any(found["beyond_tolerance"] or found["unexplained_flips"] for found in comparisons)


def _worst(proven: Verification) -> str:
    worst = max(proven.everything, key=lambda found: (found["beyond_tolerance"], found["max_abs_error"]))
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
    known = next((most for config in configs if isinstance(most := getattr(config, _POSITIONS, None), int)), None)
    for axis, size in longest_of(task).items():
        if known is not None and size > known:
            raise StageError(f"`longest` allows {size} for axis `{axis}`, but the model's configuration ends at {known} ({_POSITIONS})")  # fmt: skip  # noqa: E501


def feeds(task: Task, test: Samples) -> Iterator[Arrays]:
    """Yield inputs for the fault search: one sample, several, the start of the test set, and untraced shapes."""
    batches = [test.batch([0]), test.batch(range(min(2, len(test)))), *islice(test.batches(range(len(test)), 64), 16)]
    if isinstance(task, HasAxes):
        batches += [one.batch for one in variants(task, test)]
    batches += [scrambled(task, test, rows, rows) for rows in (1, 7)]
    for batch in batches:
        yield {name: batch[name].numpy() for name in task.inputs}


_POSITIONS = "max_position_embeddings"


Array = np.ndarray[Any, Any]

_REPEATED_SAMPLES = 4  # samples that are run twice, and one by one
_BATCH = 64


def find_nondeterminism(task: Task, model: nn.Module, test: Samples, config: Export) -> str:
    """Return why torch's outputs are not reproducible, or nothing if the same samples give the same numbers."""
    first = _answers(task, model, test, range(min(_REPEATED_SAMPLES, len(test))))
    again = _answers(task, model, test, range(min(_REPEATED_SAMPLES, len(test))))
    if moved := _named(name for name in first if not np.array_equal(first[name], again[name], equal_nan=True)):
        return (
            f"torch returns different values of {moved} for the same input; look for functional dropout without "
            "training=self.training, or noise in a router"
        )
    return _nan_outputs(task, model, test) or _depends_on_batch(task, model, test, config, first)


def _nan_outputs(task: Task, model: nn.Module, test: Samples) -> str:
    for start in range(0, len(test), _BATCH):
        found = _answers(task, model, test, range(start, min(start + _BATCH, len(test))))
        for name, answer in found.items():
            if (broken := np.isnan(answer).reshape(len(answer), -1).any(axis=1)).any():
                sample = start + int(broken.argmax())
                return (
                    f"torch itself returns NaN in `{name}` for test sample {sample}, so no file can equal it; look "
                    "for a division by zero, or a root or logarithm of a number that is not positive"
                )
    return ""


def _depends_on_batch(task: Task, model: nn.Module, test: Samples, config: Export, together: Arrays) -> str:
    alone = [_answers(task, model, test, range(row, row + 1)) for row in range(min(_REPEATED_SAMPLES, len(test)))]
    moved = [name for name, answer in together.items() if not _alike([one[name] for one in alone], answer, config)]
    if not moved:
        return ""
    return (
        f"torch's {_named(moved)} for a sample depends on the other samples in the batch, and a service batches "
        "requests of different clients; compute nothing along the first axis, and no Python number (as by .item()) "
        "from the whole batch"
    )


def _alike(alone: Sequence[Array], together: Array, config: Export) -> bool:
    return all(one.shape == (1, *together.shape[1:]) for one in alone) and bool(
        np.allclose(np.concatenate(alone), together, rtol=config.rtol, atol=config.atol)
    )


@torch.no_grad()
def _answers(task: Task, model: nn.Module, test: Samples, rows: range) -> Arrays:
    return named_arrays(task, forward(model, task, test.batch(rows)))


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
