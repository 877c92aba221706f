"""What the candidate must not be worse than: the champion, else the task's own baseline, else nothing.

The registry's champion, re-run from its bundle through ONNX Runtime on the candidate's test data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from pipeline.contract.bundle import Bundle
from pipeline.contract.data import Samples, bare, named
from pipeline.contract.errors import BundleError, DataError
from pipeline.contract.registry import Change, champion_bundle, read_registry
from pipeline.contract.registry_store import shelf_of
from pipeline.contract.run import Run
from pipeline.contract.signature import NUMPY_TYPES, TensorSpec
from pipeline.contract.task import HasBaseline, Task
from pipeline.evaluate.predictions import count_of

if TYPE_CHECKING:
    from pipeline.contract.task import Batch, Outputs, Predictor


@dataclass(frozen=True)
class Baseline:
    kind: Literal["champion", "task"]
    bundle: str | None  # digest of the champion's bundle
    predict: Predictor
    origin: Mapping[str, str] | None = None  # of the champion: who named it, and where its bundle was


def find_baseline(task: Task, samples: Samples, run: Run, checkpoint: str) -> Baseline | None:
    word = run.config.registry
    registry = read_registry(run.runs, word)
    entry = registry.champion_for(checkpoint)
    if entry is not None:
        bundle = champion_bundle(entry, run.runs, word)
        origin = origin_of(registry.promoted(entry), bundle, run)
        return Baseline("champion", bundle.digest, champion_predictor(bundle, task, samples), origin)
    if isinstance(task, HasBaseline):
        return Baseline("task", None, _checked(task, _fit(task, run.config.evaluate.seed)))
    return None


def origin_of(change: Change, bundle: Bundle, run: Run) -> dict[str, str]:
    """For people who read the verdict later, when the registry says something else or is out of reach."""
    own = bundle.path == run.runs / change.entry.path
    copied = "" if own else shelf_of(run.config.registry, run.runs).where
    told = {"run": change.entry.run, "bundle": bundle.digest, "registry": copied}
    return {**told, "at": change.at, "by": change.by, "reason": change.reason}


def _fit(source: HasBaseline, seed: int) -> Predictor:
    """Seeded, so that every process that fits one fits the same."""
    random.seed(seed)
    np.random.seed(seed)  # what a user's scikit-learn model draws from
    torch.manual_seed(seed)
    try:
        return source.baseline()
    except Exception as error:  # whatever the user's code and libraries may raise
        raise DataError(f"baseline(): {type(error).__name__}: {error}") from error


def _checked(task: Task, predict: Predictor) -> Predictor:
    def predictor(batch: Batch) -> Outputs:
        try:
            outputs = named(task, predict(batch))
        except Exception as error:
            raise DataError(f"baseline(): its predictor failed: {type(error).__name__}: {error}") from error
        for name, tensor in outputs.items():
            if not tensor.ndim or len(tensor) != count_of(batch):
                shape = tuple(tensor.shape)
                raise DataError(
                    f"baseline(): its predictor answered {name} of shape {shape} to {count_of(batch)} samples"
                )
        return bare(task, outputs)

    return predictor


_MEND = "restore it, or name another champion with `pipe promote`"
_ERRORS_ONLY = 3  # ONNX Runtime's severity: warnings about absent GPUs say nothing here


def champion_predictor(bundle: Bundle, task: Task, samples: Samples) -> Predictor:
    """Runs on the CPU with as many threads as torch has, so that processes side by side do not fight."""
    caches = _caches_of(bundle)
    _check_fit(bundle, task, samples.batch([0]), caches)
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = ort.InferenceSession(str(bundle.model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no common base of their own
        raise BundleError(f"champion {bundle.digest[:12]}: does not load: {error}; {_MEND}") from error

    def predict(batch: Batch) -> Outputs:
        feed = {spec.name: batch[spec.name].numpy() for spec in bundle.signature.inputs if spec.name not in caches}
        rows = len(next(iter(batch.values())))
        feed |= {spec.name: _nothing_read(spec, rows) for spec in bundle.signature.inputs if spec.name in caches}
        try:
            arrays = session.run(list(task.outputs), feed)
        except Exception as error:
            raise BundleError(f"champion {bundle.digest[:12]}: fails on the test data: {error}; {_MEND}") from error
        return bare(task, {name: torch.from_numpy(array) for name, array in zip(task.outputs, arrays, strict=True)})

    return predict


def _caches_of(bundle: Bundle) -> set[str]:
    """Inputs of a language model that hold what it has read; its test data is read from the beginning."""
    generation = bundle.signature.generation
    return {cache.input for cache in generation.caches} if generation else set()


def _nothing_read(spec: TensorSpec, rows: int) -> np.ndarray[Any, Any]:
    """[batch, heads, past, width] with a past of 0."""
    _, heads, _, width = spec.shape
    return np.zeros((rows, heads, 0, width), np.dtype(NUMPY_TYPES[spec.datatype]))


def _check_fit(bundle: Bundle, task: Task, first: Mapping[str, Tensor], caches: set[str]) -> None:
    """Its inputs are columns of today's data, and it answers what today's task reads."""
    where = f"champion {bundle.digest[:12]} ({bundle.name})"
    for spec in bundle.signature.inputs:
        if spec.name in caches:
            continue
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
