"""torch → ONNX with named dynamic axes, free of traces of the machine that made it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from export.axes import BATCH, axes_of, sizes_of
from export.experts import grouped_experts, translations
from export.hidden import inspect
from export.trace import Trace, Traced, owner, place
from pipeline.spec.data import named
from pipeline.spec.errors import BundleError, StageError
from pipeline.spec.external import check_inside
from pipeline.spec.sections import Export
from pipeline.spec.signature import TensorSpec
from pipeline.spec.task import Task

_INSIDE_BYTES = 1 << 30  # protobuf ends at 2 GiB; weights above this go to a file of their own


class _Ordered(nn.Module):
    """The model with its outputs in the order the task declares."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(named(self._task, self.model(*inputs)).values())


@dataclass(frozen=True)
class Written:
    """What a file was made of, to find out where it went wrong if it did."""

    traced: Traced
    program: torch.export.ExportedProgram | None  # its values have the names of the file's tensors
    limits: str  # sizes for which alone the trace holds


def convert(model: nn.Module, task: Task, batch: Mapping[str, Tensor], config: Export, path: Path) -> Written:
    """Write `path`; the batch shows types and shapes, and must hold two samples at least."""
    return write_onnx(traced_of(model, task, batch), config, path)


def traced_of(model: nn.Module, task: Task, batch: Mapping[str, Tensor]) -> Traced:
    named_axes = axes_of(task)
    sizes_of(task, batch)
    one = torch.export.Dim(BATCH)
    axes = tuple(dict(enumerate(named_axes[name])) if named_axes else {0: one} for name in task.inputs)
    inputs = tuple(batch[name] for name in task.inputs)
    return Traced(_Ordered(model, task), inputs, task.inputs, task.outputs, (axes,))


def write_onnx(traced: Traced, config: Export, path: Path) -> Written:
    traced.module.eval()
    with warnings.catch_warnings(), grouped_experts(traced.module):
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
        seen = inspect(traced)
        try:
            program = torch.onnx.export(
                traced.module,
                traced.arguments,
                dynamo=True,
                verbose=False,
                input_names=list(traced.inputs),
                output_names=list(traced.outputs),
                dynamic_shapes=traced.axes,
                opset_version=config.opset,
                custom_translation_table=translations(),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise StageError(_untranslated(error, seen) or _refused(error, seen)) from error
    assert program is not None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in traced.module.state_dict().values())
    external = config.external_data == "always" or weights > _INSIDE_BYTES
    program.save(path, external_data=external)
    _strip(path)
    return Written(traced, program.exported_program, seen.limits)


def save_plain(model: onnx.ModelProto, path: Path, external: bool) -> None:
    """As `write_onnx` leaves a file, of a model that is in memory already."""
    _bare(model)
    if external:  # in the order of the graph, from the beginning of a fresh file
        outside = f"{path.name}.data"
        (path.parent / outside).unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=outside)
        _strip(path)
    else:
        path.write_bytes(model.SerializeToString(deterministic=True))


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
    try:
        check_inside(path)
    except BundleError as error:
        raise StageError(str(error)) from error


def _spec(value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=_DATATYPES[tensor.elem_type], shape=shape)


def _strip(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    _bare(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _bare(model: onnx.ModelProto) -> None:
    """Drop source paths and stack traces: they say where it was made and make equal models differ."""
    model.doc_string = ""
    del model.metadata_props[:]
    for function in model.functions:
        _strip_graph(function)
    _strip_graph(model.graph)


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


def _untranslated(error: BaseException, seen: Trace) -> str:
    """Told where an operator has no translation, with the place that calls it."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'\)>", str(error))
    if not found:
        return ""
    nodes = seen.program.graph.nodes if seen.program is not None else ()
    called = [node for node in nodes if str(node.target) == f"{found[1]}.{found[2]}"]
    where = f" in {owner(called[0])}{place(called[0])}" if called else ""
    return (
        f"the model calls {found[1].replace('.', '::', 1)}{where}, which has no form in ONNX; write it with torch's "
        "other operators"
    )


def _refused(error: BaseException, seen: Trace) -> str:
    return f"the model does not export to ONNX: {_first_cause(error)}" + (f"; {seen.limits}" if seen.limits else "")


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
