"""Models that are files: any ONNX file, and a program of torch.export.

Their weights are the bytes of the file, so that the chain of digests holds for them as for every checkpoint.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.system.errors import ConfigError

EXTERNAL = "model.onnx.data"  # where a file has its large weights


def describe_input(dtype: str, axes: Sequence[Any], low: int = 0, high: int = 1) -> dict[str, Any]:
    """Return what model.json has of an input; whole numbers are drawn from `low` to below `high`."""
    return {"dtype": dtype, "axes": list(axes), "low": low, "high": high}


def run_on_ones(model: nn.Module, inputs: Mapping[str, Any], sizes: Mapping[str, int], subject: str) -> Any:
    """Return what a model returns for ones in inputs that model.json describes."""
    shapes = {name: [sizes.get(axis, axis) for axis in facts["axes"]] for name, facts in inputs.items()}
    ones = [torch.ones(shape, dtype=getattr(torch, inputs[name]["dtype"])) for name, shape in shapes.items()]
    try:
        with torch.no_grad():
            return model(*ones)
    except Exception as error:  # of the user's code, of torch or of ONNX Runtime
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"{subject}: fails for inputs of {shapes}: {text}") from error


class FileModel(nn.Module):
    """A module whose only weights are the bytes of a file, and of a second one with external data."""

    def __init__(self, sizes: dict[str, int]) -> None:
        """`sizes`: the bytes of `file`, and of `external` if there is one."""
        super().__init__()
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.uint8))

    def content(self, name: str = "file") -> bytes:
        return self.get_buffer(name).cpu().numpy().tobytes()


class ExportedModel(FileModel):
    """A program that `torch.export.save` wrote, which `open` makes a module of."""

    def open(self) -> nn.Module:
        return ExportedProgram(torch.export.load(io.BytesIO(self.content())).module())


class ExportedProgram(nn.Module):
    """A traced program, which has no training mode."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program
        for module in self.modules():
            module.training = False

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        return self

    def forward(self, *inputs: Tensor) -> Any:
        return self.program(*inputs)


class OnnxModel(FileModel):
    """An ONNX file, run by ONNX Runtime without optimizations, one sample at a time."""

    _session: Any = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._session is None:
            self._session = self._open()
        names = [spec.name for spec in self._session.get_inputs()]
        columns = [tensor.numpy() for tensor in inputs]
        rows = [
            self._session.run(None, {name: column[i : i + 1] for name, column in zip(names, columns, strict=True)})
            for i in range(len(columns[0]))
        ]
        return tuple(torch.from_numpy(np.concatenate(parts)) for parts in zip(*rows, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}

    def write(self, path: Path) -> None:
        path.write_bytes(self.content())
        if hasattr(self, "external"):
            path.with_name(EXTERNAL).write_bytes(self.content("external"))

    def _open(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            self.write(Path(folder, "model.onnx"))
            return onnxruntime.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])
