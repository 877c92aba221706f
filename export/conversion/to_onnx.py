"""Export a torch model to ONNX with named dynamic axes and nothing that identifies the exporting machine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from export.conversion.loops import fold_loops
from export.conversion.names import name_tensors, nested_graphs
from export.conversion.shapes import named_axes
from export.conversion.trace import ExportInput, explain_failure, inspect, recurrent_shapes
from export.conversion.translations import grouped_experts, translations, unparsed_functions
from pipeline.contract.data import axis_sizes, name_outputs, standard_attention
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import NUMPY_TYPES, TensorSpec
from pipeline.contract.task import BATCH, Task, input_axes
from pipeline.system.errors import StageError

# Weights above this go to a file of their own, which ONNX Runtime maps. Loading the model's own file takes 1.2 to
# 1.3 times their size, and protobuf ends at 2 GiB.
_MAX_INLINE_BYTES = 64 << 20
_DATATYPES: dict[Any, Any] = {np.dtype(kind): name for name, kind in NUMPY_TYPES.items() if name != "BF16"}


class _OrderedOutputs(nn.Module):
    """The model with its outputs in the order the task declares."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(name_outputs(self._task, self.model(*inputs)).values())


@dataclass(frozen=True)
class ExportResult:
    """The input and the trace of an export, for the fault search."""

    source: ExportInput
    program: torch.export.ExportedProgram | None  # its values have the names of the file's tensors, but for `renamed`
    renamed: Mapping[str, str] = field(default_factory=dict)  # name in the program → name in the file


def convert(model: nn.Module, task: Task, batch: Mapping[str, Tensor], config: Export, path: Path) -> ExportResult:
    """Write `path`; the batch shows types and shapes, and must hold two samples at least."""
    return write_onnx(export_input(model, task, batch), config, path)


def export_input(model: nn.Module, task: Task, batch: Mapping[str, Tensor]) -> ExportInput:
    axes_by_input = input_axes(task)
    axis_sizes(task, batch)
    batch_axis = torch.export.Dim(BATCH)
    axes = tuple(named_axes(axes_by_input[name]) if axes_by_input else {0: batch_axis} for name in task.inputs)
    inputs = tuple(batch[name] for name in task.inputs)
    return ExportInput(_OrderedOutputs(model, task), inputs, task.inputs, task.outputs, (axes,))


def write_onnx(source: ExportInput, config: Export, path: Path) -> ExportResult:
    source.module.eval()
    with (
        warnings.catch_warnings(),
        grouped_experts(source.module),
        recurrent_shapes(),
        standard_attention(),
        unparsed_functions(),
    ):
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
        traced = inspect(source)
        try:
            # torch.onnx itself would take the trace with fixed sizes before it tries a strict one.
            program = torch.onnx.export(
                traced.program if traced.is_final and traced.program is not None else source.module,
                source.arguments,
                dynamo=True,
                verbose=False,
                dynamic_shapes=source.axes,
                opset_version=config.opset,
                custom_translation_table=translations(),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise StageError(explain_failure(source, error)) from error
    assert program is not None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in source.module.state_dict().values())
    external = weights > _MAX_INLINE_BYTES
    program.save(path, external_data=external)
    model = onnx.load(path, load_external_data=False)
    _strip_model(model)
    has_loops = fold_loops(model)
    renamed = name_tensors(model, source.inputs, source.outputs)
    path.write_bytes(model.SerializeToString(deterministic=True))
    # The trace has one step of a loop only.
    return ExportResult(source, None if has_loops else program.exported_program, renamed)


def save_stripped(model: onnx.ModelProto, path: Path, external: bool) -> None:
    """Write a model that is in memory, stripped like the files of `write_onnx`."""
    _strip_model(model)
    if external:  # in the order of the graph, from the beginning of a fresh file
        weights_name = f"{path.name}.data"
        (path.parent / weights_name).unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location=weights_name)
        (path.parent / weights_name).chmod(0o644)  # like the model's: another user may serve it
        strip_file(path)
    else:
        path.write_bytes(model.SerializeToString(deterministic=True))


def tensor_specs(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs that the file declares; refuse a fixed batch axis."""
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


def _spec(value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(
        name=value.name, datatype=_DATATYPES[onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)], shape=shape
    )


def strip_file(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    _strip_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _strip_model(model: onnx.ModelProto) -> None:
    """Drop source paths and stack traces: they name the machine and make equal models differ."""
    model.doc_string = ""
    del model.metadata_props[:]
    for outer in (model.graph, *model.functions):
        for graph in nested_graphs(outer):
            values = [*graph.value_info]
            if isinstance(graph, onnx.GraphProto):
                values += [*graph.input, *graph.output, *graph.initializer]
            for part in (graph, *graph.node, *values):
                part.doc_string = ""
                del part.metadata_props[:]
            for attribute in (attribute for node in graph.node for attribute in node.attribute):
                attribute.doc_string = ""
