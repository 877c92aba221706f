"""Other forms of the model than ONNX, beside the bundle: each is loaded back and held against torch, as that is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from export.axes import example
from export.convert import traced_of
from export.coverage import answered, questions, rows_of
from export.language import generation_of, traced_language
from export.language_parity import verify_language
from export.parity import Arrays, compare_all, judged_by
from export.saved_model import answers_of_saved_model, why_no_saved_model
from export.trace import Traced, trace
from pipeline.spec.data import Samples
from pipeline.spec.digest import digest_tree
from pipeline.spec.errors import StageError
from pipeline.spec.exporting import Export
from pipeline.spec.greedy import Decoder
from pipeline.spec.signature import TensorSpec
from pipeline.spec.task import Generates, Task

FILE, FOLDER = "formats.json", "formats"
Answers = Callable[[Sequence[Arrays]], list[Arrays]]  # of a loaded form, to many feeds


@dataclass(frozen=True)
class Original:
    """The model, and the file that was proven to be it."""

    task: Task
    model: nn.Module
    test: Samples
    config: Export
    path: Path
    inputs: Mapping[str, TensorSpec]


class Skipped(Exception):
    """A form that cannot be made here, which is nobody's fault."""


def write_formats(one: Original, folder: Path) -> list[dict[str, Any]]:
    """A row for each form that was asked for, as formats.json has them; one that is not the model is not kept."""
    shutil.rmtree(folder, ignore_errors=True)
    return [_row(one, name, folder / name) for name in one.config.formats if name != "onnx"]


def require_formats(rows: Sequence[Mapping[str, Any]]) -> None:
    if failed := [row for row in rows if not row["passed"] and not row["skipped"]]:
        raise StageError("; ".join(f"export.formats: {row['format']} is not kept: {row['reason']}" for row in failed))


def _row(one: Original, name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    error, skipped, reason = None, False, ""
    try:
        path, found = _MAKERS[name](one, folder)
        error = max(row["max_abs_error"] for row in found)
        reason = _fault(found)
    except Skipped as why:
        path, skipped, reason = folder, True, str(why)
        print(f"export.formats: {name} is skipped: {reason}")
    except (StageError, RuntimeError, AssertionError) as why:  # torch's own, and guards of its programs
        path, reason = folder, " ".join(str(why).split())[:600]
    if reason:
        shutil.rmtree(folder, ignore_errors=True)
    files = digest_tree(folder) if folder.is_dir() else {}
    return {
        "format": name,
        "path": "" if reason else f"{FOLDER}/{path.relative_to(folder.parent).as_posix()}",
        "passed": not reason,
        "skipped": skipped,
        "reason": f"skipped: {reason}" if skipped else reason or "equal to torch",
        "max_abs_error": error,
        "bytes": sum((folder / file).stat().st_size for file in files),
        "sha256": files,
    }


def _fault(found: Sequence[Mapping[str, Any]]) -> str:
    wrong = [row for row in found if row["beyond_tolerance"] or row["unexplained_flips"]]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda row: row["max_abs_error"])
    return (
        f"it is not the model: {worst['beyond_tolerance']} elements differ beyond tolerance at batch size "
        f"{worst['batch_size']}, off by {worst['max_abs_error']:.3g} in {worst['worst']}"
    )


def _program(one: Original, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """torch's own: loads without the model's code."""
    path = folder / "model.pt2"
    traced = _traced(one)
    found = trace(traced)
    if found.program is None:
        raise StageError(f"torch.export alone does not manage this model{f': {found.limits}' if found.limits else ''}")
    found.program.example_inputs = None  # samples of the data, which are nobody's business
    for node in found.program.graph.nodes:
        node.meta.pop("stack_trace", None)  # of the machine that made it
    torch.export.save(found.program, path)
    module = torch.export.load(path).module()
    return path, _verified(one, partial(_run_program, module, traced))


def _saved_model(one: Original, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """TensorFlow's, made from the ONNX file."""
    if isinstance(one.task, Generates):
        raise Skipped("the decoder of a language model, with its cache, has no SavedModel; other models have")
    if reason := why_no_saved_model(one.config.tensorflow_python):
        raise Skipped(reason)
    answers = partial(
        answers_of_saved_model, one.config.tensorflow_python, one.path, folder, tuple(one.task.outputs)
    )  # fmt: skip
    return folder, _verified(one, answers)


def _traced(one: Original) -> Traced:
    if isinstance(one.task, Generates):
        model = one.task.language_model(one.model)
        return traced_language(model, generation_of(one.task, model))
    return traced_of(one.model, one.task, example(one.task, one.test))


@torch.no_grad()
def _run_program(module: nn.Module, traced: Traced, feeds: Sequence[Arrays]) -> list[Arrays]:
    found = []
    spec = torch.utils._pytree.tree_flatten(traced.arguments)[1]
    for feed in feeds:
        tensors = [torch.from_numpy(feed[name]) for name in traced.inputs]
        answers = module(*torch.utils._pytree.tree_unflatten(tensors, spec))
        found.append({name: value.numpy() for name, value in zip(traced.outputs, answers, strict=True)})
    return found


def _verified(one: Original, answers: Answers) -> list[dict[str, Any]]:
    """The whole test set at every size, and what the bundle's file was asked beside that."""
    if isinstance(one.task, Generates):
        task: Any = one.task
        model = task.language_model(one.model)
        decoder = Decoder(lambda feed: answers([dict(feed)])[0], generation_of(task, model), one.inputs)
        return verify_language(model, decoder, one.test, one.config, partial(judged_by, task, one.model))
    asked = list(answered(one.task, one.model, questions(one.task, one.test, one.config), []))
    sizes = one.config.batch_sizes
    batches = {size: list(one.test.batches(range(len(one.test)), size)) for size in sizes}
    feeds = [{name: batch[name].numpy() for name in one.task.inputs} for size in sizes for batch in batches[size]]
    started = time.perf_counter()
    found = answers([*feeds, *(each.feed for each in asked)])
    seconds = time.perf_counter() - started
    rest = iter(found)
    parts = {size: [next(rest) for _ in batches[size]] for size in sizes}
    comparisons = compare_all(one.task, one.model, one.test, one.config, parts, seconds)
    return [*comparisons, *rows_of(asked, list(rest), one.config)]


_MAKERS: dict[str, Callable[[Original, Path], tuple[Path, list[dict[str, Any]]]]] = {
    "pt2": _program,
    "savedmodel": _saved_model,
}
