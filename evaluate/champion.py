"""The registry's champion, re-run from its bundle through ONNX Runtime on the candidate's test data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.data import Samples, bare
from pipeline.spec.errors import BundleError
from pipeline.spec.registry import Entry
from pipeline.spec.signature import NUMPY_TYPES, TensorSpec
from pipeline.spec.task import Task

if TYPE_CHECKING:
    from pipeline.spec.task import Batch, Outputs, Predictor

_MEND = "restore it, or name another champion with `pipe promote`"
_ERRORS_ONLY = 3  # ONNX Runtime's severity: warnings about absent GPUs say nothing here


def open_champion(entry: Entry, runs: Path) -> Bundle:
    """Verify the champion's bundle, and that it is the one the registry means."""
    path = runs / entry.path
    try:
        bundle = open_bundle(path)
    except (BundleError, OSError) as error:
        raise BundleError(f"champion {entry.bundle[:12]}: {error}; {_MEND}") from error
    if bundle.digest != entry.bundle:
        raise BundleError(f"champion {entry.bundle[:12]}: {path} holds another bundle, {bundle.digest[:12]}; {_MEND}")
    return bundle


def champion_predictor(bundle: Bundle, task: Task, samples: Samples) -> Predictor:
    """Runs on the CPU with as many threads as torch has, so that processes side by side do not fight."""
    _check_fit(bundle, task, samples.batch([0]))
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = ort.InferenceSession(str(bundle.model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no common base of their own
        raise BundleError(f"champion {bundle.digest[:12]}: does not load: {error}; {_MEND}") from error

    def predict(batch: Batch) -> Outputs:
        feed = {spec.name: batch[spec.name].numpy() for spec in bundle.signature.inputs}
        try:
            arrays = session.run(list(task.outputs), feed)
        except Exception as error:
            raise BundleError(f"champion {bundle.digest[:12]}: fails on the test data: {error}; {_MEND}") from error
        return bare(task, {name: torch.from_numpy(array) for name, array in zip(task.outputs, arrays, strict=True)})

    return predict


def _check_fit(bundle: Bundle, task: Task, first: Mapping[str, Tensor]) -> None:
    """Its inputs are columns of today's data, and it answers what today's task reads."""
    where = f"champion {bundle.digest[:12]} ({bundle.name})"
    for spec in bundle.signature.inputs:
        if problem := _mismatch(spec, first.get(spec.name)):
            raise BundleError(f"{where}: does not take this task's data: {problem}; {_MEND}")
    answers = [spec.name for spec in bundle.signature.outputs]
    if missing := [name for name in task.outputs if name not in answers]:
        raise BundleError(
            f"{where}: answers {', '.join(answers)}, but this task's metrics need {', '.join(missing)}; {_MEND}"
        )


def _mismatch(spec: TensorSpec, column: Tensor | None) -> str | None:
    if column is None:
        return f"no column {spec.name}"
    array = column.numpy()
    if array.dtype != np.dtype(NUMPY_TYPES[spec.datatype]):
        return f"{spec.name} is {array.dtype}, it takes {spec.datatype}"
    fixed = [(found, wanted) for found, wanted in zip(array.shape, spec.shape, strict=False) if isinstance(wanted, int)]
    if array.ndim != len(spec.shape) or any(found != wanted for found, wanted in fixed):
        return f"{spec.name} has shape {array.shape}, it takes {spec.shape}"
    return None
