"""Export an ONNX file that something else wrote: it is served as it is, if all its answers hold in every batch.

There is no torch model to compare with. What the file computes for one sample at a time, without the runtime's
optimizations, is compared with what it computes in the service.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, ValueInfoProto

from export.checks.weights_check import WeightsComparison
from export.conversion.optimize import Written
from export.conversion.to_onnx import ExportResult
from export.ordinary import OrdinaryExporter
from pipeline.contract.given import EXTERNAL, OnnxModel, describe_input, run_on_ones
from pipeline.contract.task import BATCH
from pipeline.system.errors import ConfigError

LONGEST = 512  # of a named axis without a maximum
_DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64", TensorProto.FLOAT16: "float16",
    TensorProto.INT64: "int64", TensorProto.INT32: "int32", TensorProto.UINT8: "uint8", TensorProto.BOOL: "bool",
}  # fmt: skip


class GivenFileExporter(OrdinaryExporter):
    """A file that is compared with itself."""

    original = "the file as given, sample by sample, as there is no torch model,"

    def write(self) -> Written:
        result = self._write()
        return Written(result, None, self._write)

    def _write(self) -> ExportResult:
        assert isinstance(self.subject.model, OnnxModel)
        self.subject.model.write(self.subject.path)
        return ExportResult(self.export_input(), None)

    def compare_weights(self, result: ExportResult) -> WeightsComparison:  # noqa: ARG002
        """Compare the whole file, whose bytes are the checkpoint."""
        assert isinstance(self.subject.model, OnnxModel)
        is_equal = self.subject.path.read_bytes() == self.subject.model.content()
        return WeightsComparison(equal=int(is_equal), not_compared=() if is_equal else ("file",))


def read_onnx(path: Path, longest: Mapping[str, int]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the file's bytes, with the batch named, and its inputs and outputs."""
    try:
        model = onnx.load(path)
    except (DecodeError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: is no ONNX file ({' '.join(str(error).split())[:200]})") from error
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    _remove_zip_maps(model)
    _keep_numbers(path, model)
    facts = {value.name: _describe_input(path, value) for value in model.graph.input}
    axes = {axis for fact in facts.values() for axis in fact["axes"][1:] if isinstance(axis, str)}
    sizes = {axis: longest.get(axis, LONGEST) for axis in sorted(axes)}
    files = _bytes(model)
    _name_output_axes(path, model, _output_shapes(path, files, facts, sizes), bool(axes))
    outputs = [value.name for value in model.graph.output]
    return _bytes(model), {"inputs": facts, "outputs": outputs, "longest": sizes}


def _output_shapes(
    path: Path, files: Mapping[str, bytes], inputs: Mapping[str, Any], sizes: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """Run the file on ones, and return the shapes of what it returns."""
    model = OnnxModel({name: len(content) for name, content in files.items()})
    for name, content in files.items():
        model.get_buffer(name).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    outputs = run_on_ones(model, inputs, {BATCH: 1, **sizes}, str(path))
    return [tuple(output.shape) for output in outputs]


def _name_output_axes(path: Path, model: ModelProto, shapes: list[tuple[int, ...]], has_axes: bool) -> None:
    """Name the batch of each output, and give every other axis its size, where the file leaves it open."""
    for value, shape in zip(model.graph.output, shapes, strict=True):
        dims = value.type.tensor_type.shape.dim
        if shape[:1] != (1,):
            raise ConfigError(
                f"{path}: the output `{value.name}` of one sample has the shape {list(shape)}, without a batch"
            )
        while len(dims) < len(shape):
            dims.add()
        dims[0].dim_param = BATCH
        for number, size in enumerate(shape[1:], 1):
            if not dims[number].HasField("dim_value") and not (dims[number].dim_param and has_axes):
                if has_axes:
                    dims[number].dim_param = f"{value.name}_{number}"
                else:
                    dims[number].dim_value = size


def _remove_zip_maps(model: ModelProto) -> None:
    """Return arrays of probabilities, where scikit-learn's converters make a dictionary for each sample."""
    for node in [node for node in model.graph.node if node.op_type == "ZipMap"]:
        output = next(value for value in model.graph.output if value.name == node.output[0])
        output.CopyFrom(onnx.helper.make_tensor_value_info(node.input[0], TensorProto.FLOAT, [BATCH, None]))
        model.graph.node.remove(node)


def _keep_numbers(path: Path, model: ModelProto) -> None:
    """Leave out outputs that are no arrays of numbers, such as the names of classes."""
    kept = [value for value in model.graph.output if value.type.tensor_type.elem_type in _DTYPES]
    if not kept:
        raise ConfigError(f"{path}: has no output of numbers; a service answers with arrays")
    del model.graph.output[:]
    model.graph.output.extend(kept)


def _describe_input(path: Path, value: ValueInfoProto) -> dict[str, Any]:
    kind, name = value.type.tensor_type, value.name
    if kind.elem_type not in _DTYPES:
        raise ConfigError(f"{path}: the input `{name}` is no array of numbers; encode texts before the model")
    if not kind.shape.dim or kind.shape.dim[0].HasField("dim_value"):
        size = kind.shape.dim[0].dim_value if kind.shape.dim else "nothing"
        raise ConfigError(
            f"{path}: the first axis of `{name}` is fixed at {size}, and a service batches requests; to fix it: write "
            "the file with a dynamic first axis"
        )
    kind.shape.dim[0].dim_param = BATCH
    axes: list[str | int] = [BATCH]
    for number, dim in enumerate(kind.shape.dim[1:], 1):
        if not dim.HasField("dim_value"):
            dim.dim_param = dim.dim_param or f"{name}_{number}"
        axes.append(dim.dim_value if dim.HasField("dim_value") else dim.dim_param)
    return describe_input(_DTYPES[kind.elem_type], axes)


def _bytes(model: ModelProto) -> dict[str, bytes]:
    """Return the file, and its weights beside it where they are too large for one."""
    if model.ByteSize() < 1 << 30:
        return {"file": model.SerializeToString(deterministic=True)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path, save_as_external_data=True, location=EXTERNAL)
        return {"file": path.read_bytes(), "external": path.with_name(EXTERNAL).read_bytes()}
