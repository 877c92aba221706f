"""Export a torch model to ONNX with named dynamic axes and nothing that identifies the exporting machine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxscript
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnxscript import FLOAT, INT32
from onnxscript import opset18 as op  # what torch translates to, before it converts to the requested opset
from torch import Tensor, nn

from export.conversion.names import input_names, name_tensors, nested_graphs, nested_nodes
from export.conversion.shapes import named_axes
from export.conversion.trace import ExportInput, explain_failure, inspect, recurrent_shapes
from pipeline.contract.data import axis_sizes, name_outputs, standard_attention
from pipeline.contract.loops import BEGIN, END
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


def fold_loops(model: ModelProto) -> bool:
    """Make a `Loop` of the nodes between each pair of marks of `pipeline.repeat`; return whether there is one."""
    graph, found = model.graph, False
    while (end := next((node for node in graph.node if _is_mark(node, END)), None)) is not None:  # inner ones end first
        begins = (node for node in graph.node if _is_mark(node, BEGIN))
        begin = next(node for node in begins if _attribute(node, "loop") == _attribute(end, "loop"))
        _fold(graph, begin, end)
        found = True
    if found:
        read = {name for node in nested_nodes(graph) for name in node.input} | {value.name for value in graph.output}
        for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
            graph.initializer.remove(tensor)  # the first number of a step, which a `Loop` counts itself
        opsets = [opset for opset in model.opset_import if opset.domain != BEGIN.partition(":")[0]]
        del model.opset_import[:]
        model.opset_import.extend(opsets)
    return found


def _is_mark(node: NodeProto, mark: str) -> bool:
    return f"{node.domain}::{node.op_type}" == mark


def _attribute(node: NodeProto, name: str) -> int:
    return int(helper.get_node_attr_value(node, name))


def _fold(graph: GraphProto, begin: NodeProto, end: NodeProto) -> None:
    """Put the nodes that change from step to step into a loop; the others stay before it, to be computed once."""
    changing, needed = set(begin.output), set(end.input)
    for node in graph.node:
        if node != end and changing.intersection(input_names(node)):
            changing.update(node.output)
    for node in reversed(graph.node):
        if node != begin and needed.intersection(node.output):
            needed.update(input_names(node))
    inside = [node for node in graph.node if node not in (begin, end) and changing & needed & {*node.output}]
    outside = [node for node in graph.node if node not in (begin, end) and node not in inside]
    read_outside = {name for node in outside for name in input_names(node)} | {value.name for value in graph.output}
    if escaped := changing & read_outside:
        raise StageError(
            f"`{min(escaped)}` is computed in a step of repeat() and used behind it; return it as a part of the state"
        )
    readers = (index for index, node in enumerate(outside) if {*end.output} & {*input_names(node)})
    outside.insert(next(readers, len(outside)), _loop(graph, begin, inside, end))
    del graph.node[:]
    graph.node.extend(outside)


def _loop(graph: GraphProto, begin: NodeProto, inside: list[NodeProto], end: NodeProto) -> NodeProto:
    infos = {value.name: value for value in graph.value_info}
    number, *values = (infos[name] for name in begin.output)
    goes_on = helper.make_tensor_value_info(end.output[0], TensorProto.BOOL, [])
    outputs = [ValueInfoProto.FromString(value.SerializeToString()) for value in (goes_on, *values)]
    for output, name in zip(outputs, end.input, strict=True):
        output.name = f"{output.name}_next"
        inside.append(helper.make_node("Identity", [name], [output.name]))
    body = helper.make_graph(inside, f"{end.name}_step", [number, goes_on, *values], outputs)
    body.value_info.extend(infos[name] for node in inside for name in node.output if name in infos)
    times = helper.make_tensor(f"{end.name}_times", TensorProto.INT64, [], [_attribute(end, "times")])
    graph.initializer.append(times)
    return helper.make_node("Loop", [times.name, "", *begin.input[1:]], end.output[1:], name=end.name, body=body)


GROUPED = "grouped_mm"
_EXPERTS_SETTING = "_experts_implementation"


@onnxscript.script()  # type: ignore[untyped-decorator]
def grouped_mm(rows: FLOAT, weight: FLOAT, ends: INT32) -> FLOAT:
    """Multiply rows [pairs, wide], sorted by expert, by weights [experts, wide, narrow]; ends[e] ends expert e's rows.

    The loop skips experts without rows.
    """
    zero = op.Constant(value_ints=[0])
    stops = op.Cast(ends, to=7)
    starts = op.Concat(zero, op.Slice(stops, zero, op.Constant(value_ints=[-1])), axis=0)
    used_experts = op.Squeeze(op.NonZero(op.Sub(stops, starts)), zero)
    # Without any row, the result still has a width.
    width = op.Slice(op.Shape(weight), op.Constant(value_ints=[2]), op.Constant(value_ints=[3]))
    outputs = op.SequenceConstruct(op.CastLike(op.ConstantOfShape(op.Concat(zero, width, axis=0)), rows))
    for index in range(op.Size(used_experts)):
        expert = op.Gather(used_experts, op.Unsqueeze(index, zero))
        expert_rows = op.Slice(rows, op.Gather(starts, expert), op.Gather(stops, expert))
        outputs = op.SequenceInsert(outputs, op.MatMul(expert_rows, op.Squeeze(op.Gather(weight, expert), zero)))
    return op.ConcatFromSequence(outputs, axis=0)


def _recurrent(activation: str) -> Callable[..., Any]:
    """Return the translation of nn.RNN, which torch.onnx lacks: without it, the trace has as many steps as the data."""

    def translate(
        input: FLOAT,  # noqa: A002  (the argument's name in torch)
        hx: FLOAT,
        params: Sequence[FLOAT],
        has_biases: bool,
        num_layers: int,
        dropout: float,  # noqa: ARG001  (in evaluation nothing is dropped)
        train: bool,  # noqa: ARG001
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[FLOAT, FLOAT]:
        directions, of_direction = (2 if bidirectional else 1), (4 if has_biases else 2)
        values, states = (op.Transpose(input, perm=[1, 0, 2]) if batch_first else input), []
        for layer in range(num_layers):
            start = layer * directions * of_direction
            weights = [params[start + each * of_direction :][:of_direction] for each in range(directions)]
            w, r = (op.Concat(*(op.Unsqueeze(each[i], [0]) for each in weights), axis=0) for i in (0, 1))
            biases = [op.Unsqueeze(op.Concat(each[2], each[3], axis=0), [0]) for each in weights if has_biases]
            outputs, state = op.RNN(
                values, w, r, op.Concat(*biases, axis=0) if biases else None, None,
                op.Slice(hx, [layer * directions], [(layer + 1) * directions], [0]),
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=hx.shape[2], activations=[activation] * directions,
            )  # fmt: skip
            # [length, directions, batch, width] → [length, batch, directions × width]
            values = op.Reshape(op.Transpose(outputs, perm=[0, 2, 1, 3]), [0, 0, -1])
            states.append(state)
        outputs = op.Transpose(values, perm=[1, 0, 2]) if batch_first else values
        return outputs, op.Concat(*states, axis=0)

    return translate


def _squeeze(values: Any) -> Any:
    """Remove the axes that always have one value; that of torch.onnx also removes the batch's where it has one row."""
    return op.Squeeze(values, [axis for axis, size in enumerate(values.shape) if size == 1])


def translations() -> dict[Callable[..., Any], Any]:
    """Return translations of operators that torch.onnx lacks, as recurrent layers and grouped products, or has wrong.

    `transformers` registers its operator when it is imported.
    """
    table: dict[Callable[..., Any], Any] = {
        torch.ops.aten.rnn_tanh.input: _recurrent("Tanh"),
        torch.ops.aten.rnn_relu.input: _recurrent("Relu"),
        torch.ops.aten.squeeze.default: _squeeze,
    }
    if "transformers.integrations.moe" in sys.modules:
        table[torch.ops.transformers.grouped_mm_fallback.default] = grouped_mm
    return table


@contextmanager
def unparsed_functions() -> Iterator[None]:
    """Let torch.onnx collect its 500 translations without parsing each, half of the time that a small export takes.

    It reads only the domain of `function_ir`.
    """
    parsed = onnxscript.TracedOnnxFunction.function_ir
    onnxscript.TracedOnnxFunction.function_ir = property(lambda function: SimpleNamespace(domain=function.opset.domain))
    try:
        yield
    finally:
        onnxscript.TracedOnnxFunction.function_ir = parsed


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """Use the expert implementation that has a translation within the context, and restore the previous one.

    A mixture of experts becomes a loop over the experts that received tokens: ONNX has no operator for the grouped
    product of `transformers` (`grouped_mm`), and its `batched_mm` copies the weights of every token's experts, which at
    512 tokens takes hundreds of times the memory and over ten times the time (benchmarks/RESULTS.md).
    """
    configs = [
        module.config for module in model.modules() if hasattr(getattr(module, "config", None), _EXPERTS_SETTING)
    ]
    implementations = [getattr(config, _EXPERTS_SETTING) for config in configs]
    try:
        for config in configs:
            if getattr(config, _EXPERTS_SETTING) is not None:
                setattr(config, _EXPERTS_SETTING, GROUPED)
        yield
    finally:
        for config, name in zip(configs, implementations, strict=True):
            setattr(config, _EXPERTS_SETTING, name)
