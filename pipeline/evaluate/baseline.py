"""The baseline that the candidate is compared with: the registry's champion, else the task's own baseline, else none.

The champion is run again from its bundle, through ONNX Runtime, on the candidate's test data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from pipeline.contract.bundle import Bundle
from pipeline.contract.data import Samples, as_task_outputs, name_outputs
from pipeline.contract.registry import BASELINE_PART, Change, champion_bundle, champion_name, open_store, read_registry
from pipeline.contract.run import Run, describe
from pipeline.contract.signature import NUMPY_TYPES, TensorSpec
from pipeline.contract.task import Batch, HasBaseline, Outputs, Predictor, Task
from pipeline.statistics.scores import batch_length
from pipeline.system.errors import BundleError, DataError


@dataclass(frozen=True)
class Baseline:
    kind: Literal["champion", "task"]
    bundle: str | None  # digest of the champion's bundle
    predict: Predictor
    champion: Mapping[str, str] | None = None  # who promoted it, when, why, and where its bundle came from
    test_set: str = ""  # fingerprint of the samples that the champion was judged on


def find_baseline(task: Task, samples: Samples, run: Run, checkpoint: str) -> Baseline | None:
    registry = read_registry(run.runs, run.config.registry)
    record = run.read().steps.get("evaluate")
    if record is not None and BASELINE_PART in record.parts:
        entry = registry.find_entry(record.parts[BASELINE_PART])
    else:  # called directly
        entry = registry.champion_for(checkpoint, champion_name(run.config))
    if entry is not None:
        bundle = champion_bundle(entry, run.runs, run.config.registry)
        champion = _champion_record(registry.promotion(entry), bundle, run)
        predictor = champion_predictor(bundle, task, samples)
        return Baseline("champion", bundle.digest, predictor, champion, bundle.manifest.ancestors.test_set)
    if isinstance(task, HasBaseline):
        return Baseline("task", None, _checked_predictor(task, _fit_baseline(task)))
    return None


def _champion_record(change: Change, bundle: Bundle, run: Run) -> dict[str, str]:
    """Describe the champion for readers of the verdict; the registry may have changed by then."""
    is_local = bundle.path == run.runs / change.entry.path
    copied = "" if is_local else open_store(run.config.registry, run.runs).where
    record = {"run": change.entry.run, "bundle": bundle.digest, "registry": copied}
    return {**record, "at": change.at, "by": change.by, "reason": change.reason}


def _fit_baseline(source: HasBaseline) -> Predictor:
    """Fit it with fixed seeds, so that every process gets the same one."""
    random.seed(0)
    np.random.seed(0)  # scikit-learn uses it
    torch.manual_seed(0)
    try:
        return source.baseline()
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"baseline(): {describe(error, Path.cwd())}") from error


def _checked_predictor(task: Task, predict: Predictor) -> Predictor:
    def predictor(batch: Batch) -> Outputs:
        try:
            outputs = name_outputs(task, predict(batch))
        except Exception as error:
            raise DataError(f"baseline(): its predictor failed: {describe(error, Path.cwd())}") from error
        for name, tensor in outputs.items():
            if not tensor.ndim or len(tensor) != batch_length(batch):
                shape = tuple(tensor.shape)
                raise DataError(
                    f"baseline(): its predictor returned {name} of shape {shape} for {batch_length(batch)} samples"
                )
        return as_task_outputs(task, outputs)

    return predictor


_FIX = "to fix it: restore the bundle, or name another champion with `pipe registry promote`"
_ORT_SEVERITY_ERROR = 3  # warnings about missing GPUs do not matter here


def champion_predictor(bundle: Bundle, task: Task, samples: Samples) -> Predictor:
    """Return a predictor on the CPU with as many threads as torch uses, so that parallel processes do not compete."""
    caches = _cache_inputs(bundle)
    _check_compatible(bundle, task, samples.batch([0]), caches)
    options = ort.SessionOptions()
    options.log_severity_level = _ORT_SEVERITY_ERROR
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = ort.InferenceSession(str(bundle.model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the errors of ONNX Runtime have no common base class
        raise BundleError(f"champion {bundle.digest[:12]}: does not load: {error}; {_FIX}") from error

    def predict(batch: Batch) -> Outputs:
        feed = {spec.name: batch[spec.name].numpy() for spec in bundle.signature.inputs if spec.name not in caches}
        rows = len(next(iter(batch.values())))
        feed |= {spec.name: _empty_cache(spec, rows) for spec in bundle.signature.inputs if spec.name in caches}
        try:
            arrays = session.run(list(task.outputs), feed)
        except Exception as error:
            raise BundleError(f"champion {bundle.digest[:12]}: fails on the test data: {error}; {_FIX}") from error
        outputs = {name: torch.from_numpy(array) for name, array in zip(task.outputs, arrays, strict=True)}
        return as_task_outputs(task, outputs)

    return predict


def _cache_inputs(bundle: Bundle) -> set[str]:
    """Return the key-value cache inputs of a language model; they are empty during evaluation."""
    generation = bundle.signature.generation
    return {cache.input for cache in generation.caches} if generation else set()


def _empty_cache(spec: TensorSpec, rows: int) -> np.ndarray[Any, Any]:
    """Return a cache of shape [batch, heads, 0, width]."""
    _, heads, _, width = spec.shape
    return np.zeros((rows, heads, 0, width), np.dtype(NUMPY_TYPES[spec.datatype]))


def _check_compatible(bundle: Bundle, task: Task, first: Mapping[str, Tensor], caches: set[str]) -> None:
    """Check that the data has the champion's inputs, and that it has the outputs the task's metrics read."""
    champion = f"champion {bundle.digest[:12]} ({bundle.name})"
    for spec in bundle.signature.inputs:
        if spec.name in caches:
            continue
        if problem := _mismatch(spec, first.get(spec.name)):
            raise BundleError(f"{champion}: does not accept this task's data: {problem}; {_FIX}")
    outputs = [spec.name for spec in bundle.signature.outputs]
    if missing := [name for name in task.outputs if name not in outputs]:
        raise BundleError(
            f"{champion}: returns {', '.join(outputs)}, but this task's metrics need {', '.join(missing)}; {_FIX}"
        )


def _mismatch(spec: TensorSpec, column: Tensor | None) -> str | None:
    if column is None:
        return f"no column {spec.name}"
    array = column.numpy()
    if array.dtype != np.dtype(NUMPY_TYPES[spec.datatype]):
        return f"{spec.name} is {array.dtype}, the champion takes {spec.datatype}"
    sizes = [(size, axis) for size, axis in zip(array.shape, spec.shape, strict=False) if isinstance(axis, int)]
    if array.ndim != len(spec.shape) or any(size != axis for size, axis in sizes):
        return f"{spec.name} has shape {array.shape}, the champion takes {spec.shape}"
    return None
