"""Open ONNX files with ONNX Runtime and run them: as a service does, and wherever else this machine can run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from export.compare import Arrays, Graph
from export.tolerance import measure_scale
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError
from pipeline.system.processes import cuda_problem

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
DEFAULT_PLACE = "CPU, all threads"
_SUPPORTED_PROVIDERS = (CPU, CUDA)  # providers a service can be configured for
_TF32 = 2.0**-7  # eight times the error of one product: sums of many lose more


def open_session(
    path: Path, threads: int = 0, *, spinning: bool = True, optimized: bool = True, provider: Any = CPU
) -> onnxruntime.InferenceSession:
    """Open the file as a service does; threads that do not spin while they wait take less of the processor."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=[provider])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        message = " ".join(str(error).split())
        raise StageError(
            f"{path.name}: the ONNX Runtime {onnxruntime.__version__} that will serve it cannot load it: {message}"
        ) from error


def run(session: onnxruntime.InferenceSession, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    try:
        outputs = session.run(names, dict(inputs))
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise StageError(f"ONNX Runtime cannot run the file on {shapes}: {' '.join(str(error).split())}") from error
    return dict(zip(names, outputs, strict=True))


def open_graph(path: Path, spinning: bool = True) -> Graph:
    """Return the file as a function of its inputs."""
    return partial(run, open_session(path, spinning=spinning))


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
        return "CPU, 1 thread" if self.threads == 1 else DEFAULT_PLACE

    def open_graph(self, path: Path) -> Graph:
        settings = {"use_tf32": "0" if self.exact else "1"} if self.provider == CUDA else {}
        session = open_session(path, self.threads, provider=(self.provider, settings))
        if session.get_providers()[0] != self.provider:
            raise StageError(f"{self.provider}: ONNX Runtime has it, but cannot load its libraries")
        return partial(run, session)

    def tolerance(self, config: Export, expected: Arrays) -> Export:
        """Return the tolerances for these outputs: TF32 keeps 10 bits of each factor."""
        if self.exact:
            return config
        shares = [
            max(float(np.ptp(array[np.isfinite(array)])), scale.largest) / scale.spread
            for array in expected.values()
            if array.dtype.kind == "f" and np.isfinite(array).any()
            for scale in [measure_scale(array)]
        ]
        share = max(shares, default=0.0)
        return config.model_copy(update={"rtol": max(config.rtol, _TF32), "atol": max(config.atol, _TF32 * share)})


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
