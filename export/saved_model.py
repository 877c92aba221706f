"""ONNX → TensorFlow SavedModel by onnx2tf, in a process and, if need be, an environment of its own.

onnx2tf pins an onnx of its own, and TensorFlow brings what torch's neighbours do not like: both stay out of the
export's process. What it answers comes back as arrays, which the export judges.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from export.parity import Arrays
from pipeline.spec.errors import StageError

_NEEDED = ("onnx2tf", "tensorflow")
_MEND = (
    "pip install -c constraints.txt '.[savedmodel]', or let export.tensorflow_python name the python of an environment "
    "that has it"
)
_SECONDS = 1800


def why_no_saved_model(python: str) -> str:
    """One clause where none can be made; `python` empty is the one that runs here."""
    if not python:
        missing = [name for name in _NEEDED if find_spec(name) is None]
        return f"{' and '.join(missing)} not installed here; {_MEND}" if missing else ""
    if shutil.which(python) is None:
        return f"export.tensorflow_python={python}: no such program; {_MEND}"
    wanted = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in {_NEEDED}))"
    done = subprocess.run([python, "-c", wanted], capture_output=True, check=False, timeout=60)
    return "" if done.returncode == 0 else f"{' or '.join(_NEEDED)} is not installed for {python}; {_MEND}"


def answers_of_saved_model(
    python: str, path: Path, folder: Path, outputs: Sequence[str], feeds: Sequence[Arrays]
) -> list[Arrays]:
    """Convert `path` into `folder`, and ask what was converted, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        asked, told = Path(scratch) / "asked.npz", Path(scratch) / "told.npz"
        given: dict[str, Any] = {f"{at}/{name}": array for at, feed in enumerate(feeds) for name, array in feed.items()}
        np.savez(asked, **given)
        words = json.dumps({"model": str(path), "folder": str(folder), "asked": str(asked), "told": str(told), "outputs": list(outputs)})  # fmt: skip  # noqa: E501
        done = subprocess.run(
            [python or sys.executable, "-c", _PROGRAM, words],
            capture_output=True, text=True, check=False, timeout=_SECONDS, cwd=scratch,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
        if done.returncode:
            raise StageError(f"onnx2tf does not convert the file: {_cause(done.stderr)}")
        with np.load(told) as found:
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
said = json.loads(sys.argv[1])
names = [value.name for value in onnx.load(said["model"], load_external_data=False).graph.input]
onnx2tf.convert(
    input_onnx_file_path=said["model"], output_folder_path=said["folder"], non_verbose=True, not_use_onnxsim=True,
    output_signaturedefs=True, keep_shape_absolutely_input_names=names,
)
for extra in Path(said["folder"]).glob("*.tflite"):
    extra.unlink()
serve = tensorflow.saved_model.load(said["folder"]).signatures["serving_default"]
places = {}
with numpy.load(said["asked"]) as asked:
    for key in asked.files:
        place, _, name = key.partition("/")
        places.setdefault(place, {})[name] = tensorflow.constant(asked[key])
told = {}
for place, feed in places.items():
    found = serve(**feed)
    order = said["outputs"]
    if not set(order) <= set(found):
        order = sorted(found, key=lambda one: int(one.rpartition("_")[2]))
    if len(order) != len(said["outputs"]):
        raise SystemExit(f"it has the outputs {sorted(found)}, the model has {said['outputs']}")
    for name, key in zip(said["outputs"], order):
        told[f"{place}/{name}"] = found[key].numpy()
numpy.savez(said["told"], **told)
"""
