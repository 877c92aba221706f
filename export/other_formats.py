"""Write other formats: torch.export's pt2 and TensorFlow's SavedModel, each loaded again and compared with torch.

onnx2tf converts ONNX to a SavedModel. It pins another version of onnx, and TensorFlow conflicts with packages torch
needs, so both run in a process and, if configured, an environment of their own. Their outputs come back as arrays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from export.language_model import generation_of, traced_language, verify_language
from export.parity import Arrays, compare_all, evaluated_outputs
from export.parity_everywhere import answered, questions, rows_of
from export.to_onnx import example, traced_of
from export.trace import Traced, trace
from pipeline.contract.data import Samples
from pipeline.contract.errors import StageError
from pipeline.contract.files import digest_tree
from pipeline.contract.golden import Decoder
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import TensorSpec
from pipeline.contract.task import Generates, Task

FORMATS_FILE, FOLDER = "formats.json", "formats"
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
    """Raised for a format that cannot be written on this machine."""


def write_formats(one: Original, folder: Path) -> list[dict[str, Any]]:
    """Return a row of formats.json for each requested format; a file that differs from the model is removed."""
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
    found.program.example_inputs = None  # samples of the data must not be in the file
    for node in found.program.graph.nodes:
        node.meta.pop("stack_trace", None)  # of the machine that made it
    torch.export.save(found.program, path)
    module = torch.export.load(path).module()
    return path, _verified(one, partial(_run_program, module, traced))


def _saved_model(one: Original, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """TensorFlow's, made from the ONNX file."""
    if isinstance(one.task, Generates):
        raise Skipped("the decoder of a language model, with its cache, has no SavedModel; other models have")
    python = os.environ.get(TENSORFLOW_PYTHON, "")
    if reason := why_no_saved_model(python):
        raise Skipped(reason)
    answers = partial(
        answers_of_saved_model, python, one.path, folder, tuple(one.task.outputs)
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
    """Compare on the whole test set at every size, and on the other inputs the bundle's file was compared on."""
    if isinstance(one.task, Generates):
        task: Any = one.task
        model = task.language_model(one.model)
        decoder = Decoder(lambda feed: answers([dict(feed)])[0], generation_of(task, model), one.inputs)
        return verify_language(model, decoder, one.test, one.config, partial(evaluated_outputs, task, one.model))
    cases = list(answered(one.task, one.model, questions(one.task, one.test, one.config), []))
    sizes = one.config.batch_sizes
    batches = {size: list(one.test.batches(range(len(one.test)), size)) for size in sizes}
    feeds = [{name: batch[name].numpy() for name in one.task.inputs} for size in sizes for batch in batches[size]]
    started = time.perf_counter()
    found = answers([*feeds, *(each.feed for each in cases)])
    seconds = time.perf_counter() - started
    rest = iter(found)
    parts = {size: [next(rest) for _ in batches[size]] for size in sizes}
    comparisons = compare_all(one.task, one.model, one.test, one.config, parts, seconds)
    return [*comparisons, *rows_of(cases, list(rest), one.config)]


_MAKERS: dict[str, Callable[[Original, Path], tuple[Path, list[dict[str, Any]]]]] = {
    "pt2": _program,
    "savedmodel": _saved_model,
}


TENSORFLOW_PYTHON = "PIPE_TENSORFLOW_PYTHON"  # variable: python of an environment with onnx2tf and tensorflow
_NEEDED = ("onnx2tf", "tensorflow")
_HOW_TO_INSTALL = (
    "pip install -c constraints.txt '.[savedmodel]', or let PIPE_TENSORFLOW_PYTHON name the python of an "
    "environment that has it"
)
_SECONDS = 1800


def why_no_saved_model(python: str) -> str:
    """One clause where none can be made; `python` empty is the one that runs here."""
    if not python:
        missing = [name for name in _NEEDED if find_spec(name) is None]
        return f"{' and '.join(missing)} not installed here; {_HOW_TO_INSTALL}" if missing else ""
    if shutil.which(python) is None:
        return f"{TENSORFLOW_PYTHON}={python}: no such program; {_HOW_TO_INSTALL}"
    wanted = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in {_NEEDED}))"
    done = subprocess.run([python, "-c", wanted], capture_output=True, check=False, timeout=60)
    return "" if done.returncode == 0 else f"{' or '.join(_NEEDED)} is not installed for {python}; {_HOW_TO_INSTALL}"


def answers_of_saved_model(
    python: str, path: Path, folder: Path, outputs: Sequence[str], feeds: Sequence[Arrays]
) -> list[Arrays]:
    """Convert `path` into `folder` and run the result on `feeds`, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        cases, results = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
        given: dict[str, Any] = {f"{at}/{name}": array for at, feed in enumerate(feeds) for name, array in feed.items()}
        np.savez(cases, **given)
        words = json.dumps({"model": str(path), "folder": str(folder), "inputs": str(cases), "outputs_file": str(results), "outputs": list(outputs)})  # fmt: skip  # noqa: E501
        done = subprocess.run(
            [python or sys.executable, "-c", _PROGRAM, words],
            capture_output=True, text=True, check=False, timeout=_SECONDS, cwd=scratch,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
        if done.returncode:
            raise StageError(f"onnx2tf does not convert the file: {_cause(done.stderr)}")
        with np.load(results) as found:
            return [{name: found[f"{place}/{name}"] for name in outputs} for place in range(len(feeds))]


def _cause(stderr: str) -> str:
    """The first error of those that followed from it, else the last words."""
    named = [line.strip() for line in stderr.splitlines() if re.match(r"\s*\w*(Error|Exception): ", line)]
    return named[0][:400] if named else " ".join(stderr.split()[-40:])


# Runs where only onnx2tf, TensorFlow and numpy are. onnx2tf keeps the order of outputs, not always their names.
_PROGRAM = """
import json, shutil, sys
from pathlib import Path
from typing import Any
import onnx2tf, numpy, onnx, tensorflow
job = json.loads(sys.argv[1])
names = [value.name for value in onnx.load(job["model"], load_external_data=False).graph.input]
onnx2tf.convert(
    input_onnx_file_path=job["model"], output_folder_path=job["folder"], non_verbose=True, not_use_onnxsim=True,
    output_signaturedefs=True, keep_shape_absolutely_input_names=names,
)
for extra in Path(job["folder"]).glob("*.tflite"):
    extra.unlink()
serve = tensorflow.saved_model.load(job["folder"]).signatures["serving_default"]
places = {}
with numpy.load(job["inputs"]) as given:
    for key in given.files:
        place, _, name = key.partition("/")
        places.setdefault(place, {})[name] = tensorflow.constant(given[key])
results = {}
for place, feed in places.items():
    found = serve(**feed)
    order = job["outputs"]
    if not set(order) <= set(found):
        order = sorted(found, key=lambda one: int(one.rpartition("_")[2]))
    if len(order) != len(job["outputs"]):
        raise SystemExit(f"it has the outputs {sorted(found)}, the model has {job['outputs']}")
    for name, key in zip(job["outputs"], order):
        results[f"{place}/{name}"] = found[key].numpy()
numpy.savez(job["outputs_file"], **results)
"""
