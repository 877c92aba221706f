"""Export a torch model to ONNX with named dynamic axes and nothing that identifies the exporting machine.

The task names its dynamic axes; `example` makes an input that leaves them free and `variants` makes untraced shapes.

A mixture of experts becomes a loop over the experts that received tokens: ONNX has no operator for the grouped product
of `transformers` (`grouped_mm`), and its `batched_mm` copies the weights of every token's experts, which at 512 tokens
takes hundreds of times the memory and over ten times the time (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from onnxscript import FLOAT, INT32
from onnxscript import opset18 as op  # what torch translates to, before it converts to the requested opset
from torch import Tensor, nn

from export.names import MeasuredShapes, name_tensors
from export.padding import MASK, Padding, find_padding
from export.trace import ExportInput, Trace, describe_module, inspect, recurrent_shapes, source_location
from pipeline.contract.bundle import check_external_data_files
from pipeline.contract.data import Samples, axis_sizes, example_batch, name_outputs, standard_attention
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import TensorSpec
from pipeline.contract.task import BATCH, HasAxes, Task, input_axes
from pipeline.system.errors import BundleError, StageError

# Weights above this go to a file of their own, which ONNX Runtime maps. Loading the model's own file takes 1.2 to
# 1.3 times their size, and protobuf ends at 2 GiB.
_MAX_INLINE_BYTES = 64 << 20


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

    traced: ExportInput
    program: torch.export.ExportedProgram | None  # its values have the names of the file's tensors, but for `renamed`
    limits: str  # sizes for which alone the trace holds
    renamed: Mapping[str, str] = field(default_factory=dict)  # name in the program → name in the file


def convert(model: nn.Module, task: Task, batch: Mapping[str, Tensor], config: Export, path: Path) -> ExportResult:
    """Write `path`; the batch shows types and shapes, and must hold two samples at least."""
    return write_onnx(export_input(model, task, batch), config, path)


def export_input(model: nn.Module, task: Task, batch: Mapping[str, Tensor]) -> ExportInput:
    axes_by_input = input_axes(task)
    axis_sizes(task, batch)
    batch_axis = torch.export.Dim(BATCH)
    axes = tuple(_dynamic(axes_by_input[name]) if axes_by_input else {0: batch_axis} for name in task.inputs)
    inputs = tuple(batch[name] for name in task.inputs)
    return ExportInput(_OrderedOutputs(model, task), inputs, task.inputs, task.outputs, (axes,))


def _dynamic(axes: Sequence[int | str]) -> dict[int, str]:
    return {position: axis for position, axis in enumerate(axes) if isinstance(axis, str)}


def write_onnx(traced: ExportInput, config: Export, path: Path) -> ExportResult:
    traced.module.eval()
    with warnings.catch_warnings(), grouped_experts(traced.module), recurrent_shapes(), standard_attention():
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
        result = inspect(traced)
        try:
            # torch.onnx itself would take the trace with fixed sizes before it tries a strict one.
            program = torch.onnx.export(
                result.program if result.is_final and result.program is not None else traced.module,
                traced.arguments,
                dynamo=True,
                verbose=False,
                dynamic_shapes=traced.axes,
                opset_version=config.opset,
                custom_translation_table=translations(),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise StageError(_missing_operator(error, result) or _export_failure(error, result)) from error
    assert program is not None
    weights = sum(tensor.numel() * tensor.element_size() for tensor in traced.module.state_dict().values())
    external = weights > _MAX_INLINE_BYTES
    program.save(path, external_data=external)
    return ExportResult(traced, program.exported_program, result.limits, _finish_file(path, traced))


def _finish_file(path: Path, traced: ExportInput) -> dict[str, str]:
    """Strip the file and name its tensors; return the new names of those that the exporter called otherwise."""
    model = onnx.load(path, load_external_data=False)
    _strip_model(model)
    names = name_tensors(model, traced.inputs, traced.outputs)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return names


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


def check_external_data(path: Path) -> None:
    """Check that external weights are regular files in the same folder."""
    try:
        check_external_data_files(path)
    except BundleError as error:
        raise StageError(str(error)) from error


def _spec(value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=_DATATYPES[tensor.elem_type], shape=shape)


def strip_file(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    _strip_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _strip_model(model: onnx.ModelProto) -> None:
    """Drop source paths and stack traces: they name the machine and make equal models differ."""
    model.doc_string = ""
    del model.metadata_props[:]
    for function in model.functions:
        _strip_graph(function)
    _strip_graph(model.graph)


def _strip_graph(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    """Strip a graph and the graphs inside its nodes: branches of an `If`, bodies of a `Loop`."""
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


def _missing_operator(error: BaseException, result: Trace) -> str:
    """Return which operator has no translation and where it is called; empty for other errors."""
    match = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'\)>", str(error))
    if not match:
        return ""
    nodes = result.program.graph.nodes if result.program is not None else ()
    calls = [node for node in nodes if str(node.target) == f"{match[1]}.{match[2]}"]
    location = f" in {describe_module(calls[0])}{source_location(calls[0])}" if calls else ""
    return (
        f"the model calls {match[1].replace('.', '::', 1)}{location}, which has no form in ONNX; write it with torch's "
        "other operators"
    )


def _export_failure(error: BaseException, result: Trace) -> str:
    return f"the model does not export to ONNX: {_first_cause(error)}" + (f"; {result.limits}" if result.limits else "")


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


_MAX_SEARCHED = 256  # samples that show how the data are padded
_MAX_COMPARED_LENGTH = 4096  # positions; longer axes are not compared at their full length


@dataclass(frozen=True)
class UntracedBatch:
    """A batch whose shape differs from the traced one."""

    rows: int
    sizes: Mapping[str, int]
    padding: str  # "left", "right", "none", or both sides of different axes
    batch: dict[str, Tensor]

    @property
    def text(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{sizes}, padding: {self.padding}"

    @property
    def token_mask(self) -> Any:
        """Return an array of which positions are no padding; None without an attention mask."""
        return self.batch[MASK].numpy() == 1 if MASK in self.batch else None


def max_axis_sizes(task: Task) -> dict[str, int]:
    return dict(task.longest) if isinstance(task, HasAxes) else {}


def untraced_batches(task: Task, samples: Samples) -> Iterator[UntracedBatch]:
    """Yield batches of other lengths and sizes than traced, with padding on the left, on the right, and without."""
    traced = axis_sizes(task, example_batch(task, samples))
    assert isinstance(task, HasAxes)
    dynamic_axes = [name for name in traced if name != BATCH]
    lengths = {name: _untraced_lengths(traced[name], task.longest[name]) for name in dynamic_axes}
    first = samples.batch(range(min(_MAX_SEARCHED, len(samples))))
    found = {axis: find_padding(task, {name: first[name] for name in task.inputs}, axis) for axis in dynamic_axes}
    paddings = {axis: padding for axis, padding in found.items() if isinstance(padding, Padding)}
    for index in range(max(len(sizes_of_axis) for sizes_of_axis in lengths.values())):
        sizes = {name: sizes_of_axis[index % len(sizes_of_axis)] for name, sizes_of_axis in lengths.items()}
        rows = (1, 2, 5)[index % 3]
        batch = samples.batch([(index + row) % len(samples) for row in range(rows)])
        columns = {name: _resize(batch[name], axes, sizes) for name, axes in input_axes(task).items()}
        yield UntracedBatch(rows, sizes, "none", {**batch, **columns, **_padding_mask(columns, "none")})
        if min(sizes.values()) <= 2:
            continue
        if MASK in columns:
            for side in ("left", "right"):
                yield UntracedBatch(rows, sizes, side, {**batch, **columns, **_padding_mask(columns, side)})
        elif paddings:
            sides = " and ".join(dict.fromkeys(padding.side for padding in paddings.values()))
            yield UntracedBatch(rows, sizes, sides, {**batch, **_padded(columns, input_axes(task), paddings)})


@torch.no_grad()
@standard_attention()
def measure_shapes(task: Task, model: nn.Module, samples: Samples) -> list[MeasuredShapes]:
    """Return the shapes of torch's outputs as traced and at other sizes, where torch can compute them."""
    traced = example_batch(task, samples)
    batches: list[Mapping[str, Tensor]] = [traced, {name: column[:1] for name, column in traced.items()}]
    if isinstance(task, HasAxes):
        batches += [untraced.batch for untraced in untraced_batches(task, samples) if untraced.padding == "none"]
    measured = []
    for batch in batches:
        sizes = {BATCH: len(batch[task.inputs[0]])}
        for name, axes in input_axes(task).items():
            sizes |= {axis: batch[name].shape[position] for position, axis in _dynamic(axes).items()}
        try:
            outputs = name_outputs(task, model(*(batch[name] for name in task.inputs)))
        except (RuntimeError, IndexError, ValueError):  # a window that is longer than the text
            continue
        measured.append(MeasuredShapes(sizes, {name: tuple(value.shape) for name, value in outputs.items()}))
    return measured


def check_dynamic_axes(specs: tuple[TensorSpec, ...], task: Task) -> None:
    """Check that every axis that the task names is dynamic in the file."""
    for spec in specs:
        for position, axis in enumerate(input_axes(task).get(spec.name, ())):
            if spec.shape[position] != axis:
                raise StageError(
                    f"axis `{axis}` of `{spec.name}` became {spec.shape[position]} in the export; look for a "
                    "reshape or a comparison in the model that names a length"
                )


def _untraced_lengths(traced: int, longest: int) -> list[int]:
    candidates = (min(longest, _MAX_COMPARED_LENGTH), 1, 2, traced // 2, traced - 1, traced + 1)
    return list(dict.fromkeys(size for size in candidates if 0 < size <= longest and size != traced)) or [traced]


def _resize(column: Tensor, axes: Sequence[int | str], sizes: Mapping[str, int]) -> Tensor:
    """Return the column cut, or repeated from its beginning, to the sizes."""
    for position, axis in _dynamic(axes).items():
        if axis in sizes:
            index = torch.arange(sizes[axis]) % column.shape[position]
            column = column.index_select(position, index)
    return column


def _padded(
    columns: Mapping[str, Tensor], axes_by_input: Mapping[str, Sequence[int | str]], paddings: Mapping[str, Padding]
) -> dict[str, Tensor]:
    """Return columns in which a third of every second row is padded as the data are."""
    padded = {name: column.clone() for name, column in columns.items()}
    for axis, padding in paddings.items():
        for name, value in padding.values.items():
            position = axes_by_input[name].index(axis)
            size = padded[name].shape[position]
            start = 0 if padding.side == "left" else size - size // 3
            padded[name][::2].narrow(position, start, size // 3).fill_(value)
    return padded


def _padding_mask(columns: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    """Return a mask in which a third of every second row, on one side, is padding."""
    if MASK not in columns:
        return {}
    mask = torch.ones_like(columns[MASK])
    third = mask.shape[1] // 3
    if side == "left":
        mask[::2, :third] = 0
    if side == "right":
        mask[::2, mask.shape[1] - third :] = 0
    return {MASK: mask}


GROUPED = "grouped_mm"


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


def translations() -> dict[Callable[..., Any], Any]:
    """Return the translations for `torch.onnx.export`; `transformers` registers its operator when it is imported."""
    table: dict[Callable[..., Any], Any] = {
        torch.ops.aten.rnn_tanh.input: _recurrent("Tanh"),
        torch.ops.aten.rnn_relu.input: _recurrent("Relu"),
    }
    if "transformers.integrations.moe" in sys.modules:
        table[torch.ops.transformers.grouped_mm_fallback.default] = grouped_mm
    return table


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """Use the expert implementation that has a translation within the context, and restore the previous one."""
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


_EXPERTS_SETTING = "_experts_implementation"
