"""From a model to a file that was proven to be that model, whatever kind of model it is.

Why no file can be a model: torch's own answers are no numbers, change by themselves, or hang on who asks beside.
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

from export.bundle import Said
from export.fault_search import blame
from export.language_model import convert_language, generation_of
from export.language_parity import language_feeds, prompts_of, verify_greedy, verify_language, verify_random
from export.optimize import Optimised, fit_runtime, forget_plain, optimise, put_back, versions_of
from export.optimize import check_file as check_file  # part of the proof
from export.parity import Arrays, judged_by, named_arrays, open_session, require_equal, run, verify, verify_variants
from export.parity_everywhere import Coverage, places, scrambled, tolerance, verify_everywhere
from export.to_onnx import Written, check_free, convert, example, longest_of, tensor_specs, variants
from pipeline.contract.data import Samples, forward
from pipeline.contract.errors import StageError
from pipeline.contract.golden import Decoder
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation
from pipeline.contract.task import Generates, HasAxes, Task


@dataclass(frozen=True)
class Proven:
    """Every comparison, whether it went well or not."""

    comparisons: Sequence[dict[str, Any]]
    said: Said
    chance: str  # why torch's own answers are nothing to hold a file against
    config: Export
    greedy: dict[str, Any] | None = None
    why: str = ""  # the first wrong node, or the module that was traced as another, where that is not chance
    coverage: Coverage = field(default_factory=Coverage)
    file: dict[str, Any] = field(default_factory=dict)  # what parity.json says of the file itself

    @property
    def equal(self) -> bool:
        return not self.chance and not _apart(self.everything)

    @property
    def everything(self) -> list[dict[str, Any]]:
        return [*self.comparisons, *self.coverage.rows]

    def require(self) -> None:
        """Raise unless the file is the model."""
        if self.chance:
            raise StageError(f"no ONNX file can be the model: {self.chance}")
        require_equal(self.everything, self.config, self.why)


def prove(task: Task, model: nn.Module, test: Samples, config: Export, path: Path) -> Proven:
    """Write `path` and hold it against the model; an optimised file that is not equal gives way to the plain one."""
    check_mode(model)
    check_positions(task, model)
    generation = None
    if isinstance(task, Generates):
        language = task.language_model(model)
        generation = generation_of(task, language)
        written = convert_language(language, generation, config, path)
    else:
        written = convert(model, task, example(task, test), config, path)
    said = said_of_samples(task) if generation is None else said_of(generation)
    subject = Subject(task, model, test, config, path, written, said)
    optimised = optimise(path, model, config)
    kept, reason = _held_optimised(subject, optimised)
    if reason and optimised is not None:
        print(f"export.optimize={config.optimize} is not used: {reason}")
        optimised = optimised if optimised.used == "none" else put_back(path, optimised, reason)
    lowered, proven = kept or (fit_runtime(path), held(subject))
    forget_plain(path)
    return replace(proven, file=_of_file(path, optimised, lowered))


@dataclass(frozen=True)
class Subject:
    """A file, and all it is held against."""

    task: Task
    model: nn.Module
    test: Samples
    config: Export
    path: Path
    written: Written
    said: Said


def _held_optimised(one: Subject, found: Optimised | None) -> tuple[tuple[str, Proven] | None, str]:
    """How the runtime was suited and what was proven of an optimised file; or nothing, and why it is not used."""
    if found is None or found.used == "none":
        return None, "" if found is None else found.reason
    try:
        lowered, proven = fit_runtime(one.path), held(one)
    except StageError as error:  # fusions write operators that ONNX's own rules do not know, for one
        return None, str(error)
    if proven.equal or proven.chance:
        return (lowered, proven), ""
    return None, f"optimised it is not the model: {_worst(proven)}" + (f"; {proven.why}" if proven.why else "")


def held(one: Subject) -> Proven:
    """The file, every way it is looked at."""
    check_file(one.path)
    return _language(one) if isinstance(one.task, Generates) else _samples(one)


def _samples(one: Subject) -> Proven:
    task, model, test, config, path = one.task, one.model, one.test, one.config, one.path
    check_free(tensor_specs(path)[0], task)  # a fixed axis is told here, before other sizes fail on it
    comparisons = verify(task, model, test, path, config)
    if isinstance(task, HasAxes):
        comparisons += verify_variants(task, model, test, path, config)
    found = Proven(comparisons, one.said, "", config)
    if found.equal:
        found = replace(found, coverage=verify_everywhere(task, model, test, path, config))
    if found.equal:
        return found
    chance = by_chance(task, model, test, config)
    return replace(found, chance=chance, why="" if chance else blame(one.written, path, feeds(task, test), config))


def _language(one: Subject) -> Proven:
    task: Any = one.task
    model, generation, config, test = task.language_model(one.model), one.said.generation, one.config, one.test
    assert generation is not None
    specs = {spec.name: spec for spec in tensor_specs(one.path)[0]}

    def decoder_in(session: Any) -> Decoder:
        return Decoder(lambda feed: run(session, feed), generation, specs)

    decoder = decoder_in(open_session(one.path))
    comparisons = verify_language(model, decoder, test, config, partial(judged_by, task, one.model))
    found = Proven(comparisons, one.said, "", config)
    if found.equal:
        here, without = places()
        rows = []
        for place in here:
            there = decoder_in(place.open(one.path))
            row = verify_random(model, there, partial(tolerance, place, config), place.text)
            rows.append({**row, "inputs": "random inputs", "place": place.text})
        found = replace(found, coverage=Coverage(rows, without))
    if not found.equal:  # what it would generate is of no interest any more
        chance = by_chance(task, one.model, test, config)
        why = "" if chance else blame(one.written, one.path, language_feeds(model, decoder, test), config)
        return replace(found, chance=chance, why=why)
    prompts = prompts_of(task.prompting().prompts, test, generation)
    return replace(found, greedy=asdict(verify_greedy(model, decoder, prompts, config)))


def said_of_samples(task: Task) -> Said:
    return Said(axes=longest_of(task))


def said_of(generation: Generation) -> Said:
    limits = dict.fromkeys(("sequence", "total"), generation.positions_limit)
    return Said(axes=limits, generation=generation)


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


def _worst(proven: Proven) -> str:
    worst = max(proven.everything, key=lambda found: (found["beyond_tolerance"], found["max_abs_error"]))
    beyond, error = worst["beyond_tolerance"], worst["max_abs_error"]
    return f"{beyond} elements beyond tolerance, off by {error:.3g} in {worst['worst']}"


def check_mode(model: nn.Module) -> None:
    """A part that stays in training mode drops at random, and changes what it should only read."""
    model.eval()
    if training := [name or type(model).__name__ for name, module in model.named_modules() if module.training]:
        raise StageError(
            f"{', '.join(training[:4])}: still in training mode after eval(); it would be exported with its dropout "
            "and running statistics; do not override train() in the model"
        )


def check_positions(task: Task, model: nn.Module) -> None:
    """What the bundle promises to take is what the model knows."""
    configs = (getattr(module, "config", None) for module in model.modules())
    known = next((most for config in configs if isinstance(most := getattr(config, _POSITIONS, None), int)), None)
    for axis, size in longest_of(task).items():
        if known is not None and size > known:
            raise StageError(f"`longest` allows {size} for axis `{axis}`, but the model's configuration ends at {known} ({_POSITIONS})")  # fmt: skip  # noqa: E501


def feeds(task: Task, test: Samples) -> Iterator[Arrays]:
    """What a fault is looked for with: one sample, some, the test set's beginning, and shapes that were not traced."""
    batches = [test.batch([0]), test.batch(range(min(2, len(test)))), *islice(test.batches(range(len(test)), 64), 16)]
    if isinstance(task, HasAxes):
        batches += [one.batch for one in variants(task, test)]
    batches += [scrambled(task, test, rows, rows) for rows in (1, 7)]
    for batch in batches:
        yield {name: batch[name].numpy() for name in task.inputs}


_POSITIONS = "max_position_embeddings"


Array = np.ndarray[Any, Any]

_FEW = 4  # samples that are asked twice, and one by one
_BATCH = 64


def by_chance(task: Task, model: nn.Module, test: Samples, config: Export) -> str:
    """Nothing where the same samples are answered by the same numbers, together or alone."""
    first = _answers(task, model, test, range(min(_FEW, len(test))))
    again = _answers(task, model, test, range(min(_FEW, len(test))))
    if moved := _named(name for name in first if not np.array_equal(first[name], again[name], equal_nan=True)):
        return (
            f"torch answers {moved} differently each time it is asked the same; look for functional dropout without "
            "training=self.training, or noise in a router"
        )
    return _no_number(task, model, test) or _company(task, model, test, config, first)


def _no_number(task: Task, model: nn.Module, test: Samples) -> str:
    for start in range(0, len(test), _BATCH):
        found = _answers(task, model, test, range(start, min(start + _BATCH, len(test))))
        for name, answer in found.items():
            if (broken := np.isnan(answer).reshape(len(answer), -1).any(axis=1)).any():
                sample = start + int(broken.argmax())
                return (
                    f"torch itself answers `{name}` of test sample {sample} with NaN, and nothing equals that; look "
                    "for a division by zero, or a root or logarithm of what is not positive"
                )
    return ""


def _company(task: Task, model: nn.Module, test: Samples, config: Export, together: Arrays) -> str:
    alone = [_answers(task, model, test, range(row, row + 1)) for row in range(min(_FEW, len(test)))]
    moved = [name for name, answer in together.items() if not _alike([one[name] for one in alone], answer, config)]
    if not moved:
        return ""
    return (
        f"torch answers {_named(moved)} of a sample otherwise when others are beside it in the batch, and a service "
        "puts strangers' requests into one; compute nothing along the first axis, and no python number (as by .item()) "
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
