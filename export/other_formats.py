"""Write other formats, each loaded again and compared with torch: torch.export's pt2 and TensorFlow's SavedModel.

Also the trained weights as transformers has them.

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
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from export.compare import Arrays, Rows
from export.conversion.trace import ExportInput, find_python_length, trace
from export.subject import ModelExporter
from pipeline.contract.pretrained import SMALL_FILES
from pipeline.contract.task import transformers_model
from pipeline.system.errors import StageError
from pipeline.system.files import digest_tree, write_json

FORMATS_FILE, FORMATS_FOLDER = "formats.json", "formats"


class Skipped(Exception):
    """Raised for a format that cannot be written on this machine."""


def write_formats(exporter: ModelExporter, folder: Path) -> Rows:
    """Return a row of formats.json for each requested format; a file that differs from the model is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    return [_row(exporter, name, folder / name) for name in exporter.subject.config.formats if name != "onnx"]


def require_formats(rows: Sequence[Mapping[str, Any]]) -> None:
    if failed := [row for row in rows if not row["passed"] and not row["skipped"]]:
        raise StageError("; ".join(f"export.formats: {row['format']} is not kept: {row['reason']}" for row in failed))


def _row(exporter: ModelExporter, name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    error, skipped, reason = None, False, ""
    try:
        path, comparisons = exporter.write_format(name, folder)
        error = max(row["max_abs_error"] for row in comparisons)
        reason = _fault(comparisons)
    except Skipped as error_:
        path, skipped, reason = folder, True, str(error_)
        print(f"export.formats: {name} is skipped: {reason}")
    except (StageError, RuntimeError, AssertionError) as error_:  # torch's own, and guards of its programs
        path, reason = folder, " ".join(str(error_).split())[:600]
    if reason:
        shutil.rmtree(folder, ignore_errors=True)
    files = digest_tree(folder) if folder.is_dir() else {}
    return {
        "format": name,
        "path": "" if reason else f"{FORMATS_FOLDER}/{path.relative_to(folder.parent).as_posix()}",
        "passed": not reason,
        "skipped": skipped,
        "reason": f"skipped: {reason}" if skipped else reason or "equal to torch",
        "max_abs_error": error,
        "bytes": sum((folder / file).stat().st_size for file in files),
        "sha256": files,
    }


def _fault(comparisons: Sequence[Mapping[str, Any]]) -> str:
    wrong = [row for row in comparisons if row["beyond_tolerance"] or row["unexplained_flips"]]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda row: row["max_abs_error"])
    return (
        f"it is not the model: {worst['beyond_tolerance']} elements differ beyond tolerance at batch size "
        f"{worst['batch_size']}, off by {worst['max_abs_error']:.3g} in {worst['worst']}"
    )


def write_pt2(exporter: ModelExporter, folder: Path) -> tuple[Path, Rows]:
    """Write torch's own format, which loads without the model's code."""
    path = folder / "model.pt2"
    source = exporter.export_input()
    result = trace(source)
    if result.program is None:
        raise StageError(f"torch.export alone does not manage this model{find_python_length(source)}")
    if any(str(node.target).startswith("onnx_symbolic") for node in result.program.graph.nodes):
        raise StageError("a loop of pipeline.repeat has no form in torch's format; leave pt2 out of export.formats")
    result.program.example_inputs = None  # samples of the data must not be in the file
    for node in result.program.graph.nodes:
        node.meta.pop("stack_trace", None)  # of the machine that made it
    torch.export.save(result.program, path)
    module = torch.export.load(path).module()
    return path, exporter.compare_format(partial(_run_program, module, source))


def write_saved_model(exporter: ModelExporter, folder: Path) -> tuple[Path, Rows]:
    """Write TensorFlow's format, converted from the ONNX file."""
    python = os.environ.get(TENSORFLOW_PYTHON, "")
    if reason := saved_model_problem(python):
        raise Skipped(reason)
    outputs = tuple(exporter.subject.task.outputs)
    return folder, exporter.compare_format(partial(run_saved_model, python, exporter.subject.path, folder, outputs))


@torch.no_grad()
def _run_program(module: nn.Module, source: ExportInput, feeds: Sequence[Arrays]) -> list[Arrays]:
    answers = (module(*source.nest(feed)) for feed in feeds)
    return [{name: value.numpy() for name, value in zip(source.outputs, each, strict=True)} for each in answers]


TENSORFLOW_PYTHON = "PIPE_TENSORFLOW_PYTHON"  # variable: python of an environment with onnx2tf and tensorflow
_REQUIRED_MODULES = ("onnx2tf", "tensorflow")
_HOW_TO_INSTALL = (
    "pip install -c constraints.txt '.[savedmodel]', or let PIPE_TENSORFLOW_PYTHON name the python of an "
    "environment that has it"
)
_TIMEOUT_SECONDS = 1800


def saved_model_problem(python: str) -> str:
    """Return why no SavedModel can be written, empty if one can; an empty `python` means this interpreter."""
    if not python:
        missing = [name for name in _REQUIRED_MODULES if find_spec(name) is None]
        return f"{' and '.join(missing)} not installed here; {_HOW_TO_INSTALL}" if missing else ""
    if shutil.which(python) is None:
        return f"{TENSORFLOW_PYTHON}={python}: no such program; {_HOW_TO_INSTALL}"
    program = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in {_REQUIRED_MODULES}))"
    result = subprocess.run([python, "-c", program], capture_output=True, check=False, timeout=60)
    if result.returncode == 0:
        return ""
    return f"{' or '.join(_REQUIRED_MODULES)} is not installed for {python}; {_HOW_TO_INSTALL}"


def run_saved_model(
    python: str, path: Path, folder: Path, outputs: Sequence[str], feeds: Sequence[Arrays]
) -> list[Arrays]:
    """Convert `path` into `folder` and run the result on `feeds`, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        cases, results = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
        arrays: dict[str, Any] = {
            f"{index}/{name}": array for index, feed in enumerate(feeds) for name, array in feed.items()
        }
        np.savez(cases, **arrays)
        arguments = json.dumps(
            {"model": str(path), "folder": str(folder), "inputs": str(cases), "outputs_file": str(results)}
        )
        result = subprocess.run(
            [python or sys.executable, "-c", _PROGRAM, arguments],
            capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS, cwd=scratch,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
        if result.returncode:
            raise StageError(f"onnx2tf does not convert the file: {_cause(result.stderr)}")
        with np.load(results) as outputs_:
            return [{name: outputs_[f"{index}/{name}"] for name in outputs} for index in range(len(feeds))]


def _cause(stderr: str) -> str:
    """Return the first error in the output, from which the others follow; else its last words."""
    errors = [line.strip() for line in stderr.splitlines() if re.match(r"\s*\w*(Error|Exception): ", line)]
    return errors[0][:400] if errors else " ".join(stderr.split()[-40:])


# Runs where only onnx2tf, TensorFlow and numpy are. What onnx2tf saves itself has outputs `output_0`, `output_1`, ….
_PROGRAM = """
import json, sys
import onnx2tf, numpy, onnx, tensorflow, tf_keras
job = json.loads(sys.argv[1])
graph = onnx.load(job["model"], load_external_data=False).graph
outputs = [value.name for value in graph.output]
model = onnx2tf.convert(
    input_onnx_file_path=job["model"], output_folder_path=job["folder"], non_verbose=True, not_use_onnxsim=True,
    output_signaturedefs=True, keep_shape_absolutely_input_names=[value.name for value in graph.input],
    disable_model_save=True,
)
archive = tf_keras.export.ExportArchive()
archive.add_endpoint(
    "serving_default", lambda *inputs: dict(zip(outputs, tensorflow.nest.flatten(model(inputs)), strict=True)),
    [tensorflow.TensorSpec(tensor.shape, tensor.dtype, tensor.name) for tensor in model.inputs],
)
archive.write_out(job["folder"])
serve = tensorflow.saved_model.load(job["folder"]).signatures["serving_default"]
feeds = {}
with numpy.load(job["inputs"]) as inputs:
    for key in inputs.files:
        index, _, name = key.partition("/")
        feeds.setdefault(index, {})[name] = tensorflow.constant(inputs[key])
results = {f"{index}/{name}": value for index, feed in feeds.items() for name, value in serve(**feed).items()}
numpy.savez(job["outputs_file"], **results)
"""


_SHARD_SIZE = "5GB"
_CONFIG = "config.json"


def write_official_weights(model: nn.Module, files: Path, folder: Path) -> str:
    """Write the transformer in a model as transformers writes it: safetensors with official names, and its small files.

    Return a line for the log, empty if there is no transformer. `AutoModel.from_pretrained` and `model.pretrained` read
    the folder. What is around the transformer, such as a head of the task, has no official names and is left out. A
    transformer that the task has changed, so that it is no longer the one of its configuration, is not written: the
    bundle does not need it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    located = transformers_model(model)
    if located is None:
        return ""
    transformer: Any = located[1]
    if _has_adapters(transformer):
        return f"warning: {folder.name} not written: the task adds adapters by itself; use model.adapter instead"
    try:
        transformer.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    except (RuntimeError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"warning: {folder.name} not written: {' '.join(str(error).split())[:300]}"
    for pattern in SMALL_FILES:
        for path in files.glob(pattern):
            target = folder / path.relative_to(files)
            if target != folder / _CONFIG:  # the model's own is there
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    config = json.loads((folder / _CONFIG).read_text())
    if config.pop("quantization_config", None):  # of the pretrained files; these weights are not quantized
        write_json(folder / _CONFIG, config)
    return f"{folder.name}: the transformer's weights, as transformers reads them"


def _has_adapters(transformer: nn.Module) -> bool:
    """Return whether the task itself has put adapters of peft into the transformer."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in transformer.modules())
