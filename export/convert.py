"""torch → ONNX with a named dynamic batch axis, free of traces of the machine that made it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.external_data_helper import uses_external_data
from torch import Tensor, nn

from pipeline.spec.data import named
from pipeline.spec.errors import StageError
from pipeline.spec.sections import Export
from pipeline.spec.signature import TensorSpec
from pipeline.spec.task import Task

BATCH = "batch"
_INSIDE_BYTES = 1 << 30  # protobuf ends at 2 GiB; weights above this go to a file of their own


class _Ordered(nn.Module):
    """The model with its outputs in the order the task declares."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(named(self._task, self.model(*inputs)).values())


def convert(model: nn.Module, task: Task, batch: Mapping[str, Tensor], config: Export, path: Path) -> None:
    """Write `path`; the batch shows types and shapes, and must hold two samples at least."""
    inputs = tuple(batch[name] for name in task.inputs)
    axis = torch.export.Dim(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
        try:
            program = torch.onnx.export(
                _Ordered(model, task).eval(),
                inputs,
                dynamo=True,
                verbose=False,
                input_names=list(task.inputs),
                output_names=list(task.outputs),
                dynamic_shapes=(tuple({0: axis} for _ in inputs),),
                opset_version=config.opset,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise StageError(f"the model does not export to ONNX: {_first_cause(error)}") from error
    assert program is not None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    external = config.external_data == "always" or weights > _INSIDE_BYTES
    program.save(path, external_data=external)
    _strip(path)


def tensor_specs(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs as the file declares them; a fixed batch axis is refused."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {initializer.name for initializer in graph.initializer}
    inputs = tuple(_spec(value) for value in graph.input if value.name not in weights)
    outputs = tuple(_spec(value) for value in graph.output)
    for spec in inputs + outputs:
        if not spec.shape or isinstance(spec.shape[0], int):
            raise StageError(
                f"the batch axis of `{spec.name}` became fixed in the export (shape {list(spec.shape)}); "
                "look in the model for a reshape that names the batch size"
            )
    return inputs, outputs


def check_external_data(path: Path) -> None:
    """Weights kept outside the file are plain files beside it, named without any path."""
    for initializer in onnx.load(path, load_external_data=False).graph.initializer:
        if not uses_external_data(initializer):
            continue
        location = next((entry.value for entry in initializer.external_data if entry.key == "location"), "")
        target = path.parent / location
        if not location or Path(location).name != location or target.is_symlink() or not target.is_file():
            raise StageError(f"{path.name}: initializer {initializer.name} keeps its data in {location!r}, outside the bundle")  # fmt: skip  # noqa: E501


def _spec(value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=_DATATYPES[tensor.elem_type], shape=shape)


def _strip(path: Path) -> None:
    """Drop source paths and stack traces: they say where it was made and make equal models differ."""
    model = onnx.load(path, load_external_data=False)
    model.doc_string = ""
    del model.metadata_props[:]
    for function in model.functions:
        _strip_graph(function)
    _strip_graph(model.graph)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _strip_graph(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Branches of an `If` and bodies of a `Loop` are graphs inside a node."""
    values = [*graph.value_info]
    if isinstance(graph, onnx.GraphProto):
        values += [*graph.input, *graph.output, *graph.initializer]
    for part in (graph, *graph.node, *values):
        part.doc_string = ""
        del part.metadata_props[:]
    for node in graph.node:
        for attribute in node.attribute:
            attribute.doc_string = ""
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _strip_graph(inner)


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400]


_DATATYPES: dict[int, Any] = {
    onnx.TensorProto.BOOL: "BOOL",
    onnx.TensorProto.UINT8: "UINT8",
    onnx.TensorProto.UINT16: "UINT16",
    onnx.TensorProto.UINT32: "UINT32",
    onnx.TensorProto.UINT64: "UINT64",
    onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT16: "INT16",
    onnx.TensorProto.INT32: "INT32",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.FLOAT16: "FP16",
    onnx.TensorProto.FLOAT: "FP32",
    onnx.TensorProto.DOUBLE: "FP64",
    onnx.TensorProto.STRING: "BYTES",
}
