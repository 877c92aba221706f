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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from onnxscript import FLOAT, INT32
from onnxscript import opset18 as op  # what torch translates to, before it converts to the requested opset
from torch import Tensor, nn

from export.trace import Trace, Traced, inspect, owner, place
from pipeline.contract.bundle import check_external_data_files
from pipeline.contract.data import Samples, name_outputs
from pipeline.contract.errors import BundleError, ConfigError, StageError
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import TensorSpec
from pipeline.contract.task import HasAxes, Task

_INSIDE_BYTES = 1 << 30  # protobuf ends at 2 GiB; weights above this go to a file of their own


class _Ordered(nn.Module):
    """The model with its outputs in the order the task declares."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(name_outputs(self._task, self.model(*inputs)).values())


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
    external = weights > _INSIDE_BYTES
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
        check_external_data_files(path)
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
    """Drop source paths and stack traces: they name the machine and make equal models differ."""
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
    """Raise a StageError that names the operator without a translation and the place that calls it."""
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


BATCH = "batch"
MASK = "attention_mask"  # as transformers calls it: 1 where there is a token, 0 where there is padding
_MOST_STRETCHED = 4096  # positions; what is longer is not compared at its full length


@dataclass(frozen=True)
class Variant:
    """A batch of a shape that was never traced."""

    rows: int
    sizes: Mapping[str, int]
    padding: str  # which side, or none
    batch: dict[str, Tensor]

    @property
    def text(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{sizes}, padding: {self.padding}"


def axes_of(task: Task) -> dict[str, tuple[str, ...]]:
    """Names of the axes of every input, the batch first; empty where the batch alone is free."""
    if not isinstance(task, HasAxes):
        return {}
    found = {name: tuple(task.axes.get(name, (BATCH,))) for name in task.inputs}
    if strangers := sorted(set(task.axes) - set(found)):
        raise ConfigError(f"`axes` names {', '.join(strangers)}, which is no input of the task ({', '.join(found)})")
    for name, axes in found.items():
        if axes[:1] != (BATCH,) or not all(axes) or len(set(axes)) != len(axes):
            raise ConfigError(f"`axes` of {name}: write the names of its axes, `batch` first; found {axes}")
    names = {axis for axes in found.values() for axis in axes[1:]}
    if set(task.longest) != names:
        raise ConfigError(
            f"`longest` must give the maximum of each of {', '.join(sorted(names))}; found {task.longest}"
        )
    return found


def longest_of(task: Task) -> dict[str, int]:
    return dict(task.longest) if isinstance(task, HasAxes) else {}


def sizes_of(task: Task, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """How long each named axis is in a batch: equal wherever it stands, and never equal to another or below 2.

    The exporter takes equal sizes for one axis, and a size of 1 for an axis that is always 1 long.
    """
    sizes: dict[str, int] = {}
    for name, axes in axes_of(task).items():
        for position, axis in enumerate(axes):
            size = batch[name].shape[position] if position < batch[name].ndim else 0
            if sizes.setdefault(axis, size) != size:
                raise StageError(f"axis `{axis}` is {size} long in `{name}`, and {sizes[axis]} in another input")
            if size < 2:
                raise StageError(f"axis `{axis}` of `{name}` is {size} long in the test data; show one of 2 at least")
    if len(set(sizes.values())) != len(sizes):
        sizes_text = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise StageError(
            f"axes of different names have one size in the test data ({sizes_text}); the export needs to differ"
        )
    return sizes


def example(task: Task, samples: Samples) -> dict[str, Tensor]:
    """Samples to trace with: as many as make the batch unlike every other free axis."""
    one = samples.batch([0])
    taken = {one[name].shape[position] for name, axes in axes_of(task).items() for position in range(1, len(axes))}
    rows = next(count for count in range(3, 4 + len(taken)) if count not in taken)
    return samples.batch([index % len(samples) for index in range(rows)])


def variants(task: Task, samples: Samples) -> Iterator[Variant]:
    """Shorter and longer than traced, alone and in company, with padding on either side and with none."""
    traced = sizes_of(task, example(task, samples))
    assert isinstance(task, HasAxes)
    free = [name for name in traced if name != BATCH]
    lengths = {name: _lengths(traced[name], task.longest[name]) for name in free}
    for turn in range(max(len(found) for found in lengths.values())):
        sizes = {name: found[turn % len(found)] for name, found in lengths.items()}
        rows = (1, 2, 5)[turn % 3]
        batch = samples.batch([(turn + index) % len(samples) for index in range(rows)])
        columns = {name: _resized(batch[name], axes, sizes) for name, axes in axes_of(task).items()}
        sides = ("none", "left", "right") if MASK in columns and min(sizes.values()) > 2 else ("none",)
        for side in sides:
            yield Variant(rows, sizes, side, {**batch, **columns, **_padding(columns, side)})


def check_free(specs: tuple[TensorSpec, ...], task: Task) -> None:
    """Every axis the task names is still one in the file."""
    for spec in specs:
        for position, axis in enumerate(axes_of(task).get(spec.name, ())):
            if spec.shape[position] != axis:
                raise StageError(
                    f"axis `{axis}` of `{spec.name}` became {spec.shape[position]} in the export; look for a "
                    "reshape or a comparison in the model that names a length"
                )


def _lengths(traced: int, longest: int) -> list[int]:
    if traced > longest:
        raise StageError(f"the test data have an axis {traced} long, beyond the {longest} that `longest` allows")
    wanted = (min(longest, _MOST_STRETCHED), 1, 2, traced // 2, traced - 1, traced + 1)
    return list(dict.fromkeys(size for size in wanted if 0 < size <= longest and size != traced)) or [traced]


def _resized(column: Tensor, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Tensor:
    """Cut, or repeated from its beginning."""
    for position, axis in enumerate(axes):
        if axis in sizes:
            index = torch.arange(sizes[axis]) % column.shape[position]
            column = column.index_select(position, index)
    return column


def _padding(columns: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    """A mask with a third of every second row on one side taken for padding."""
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
    """Rows [pairs, wide] sorted by expert, weight [experts, wide, narrow]; expert e has the rows up to ends[e].

    Experts without a row cost nothing: there is no turn of the loop for them.
    """
    zero = op.Constant(value_ints=[0])
    stops = op.Cast(ends, to=7)
    starts = op.Concat(zero, op.Slice(stops, zero, op.Constant(value_ints=[-1])), axis=0)
    hit = op.Squeeze(op.NonZero(op.Sub(stops, starts)), zero)
    # No row at all still has a width.
    width = op.Slice(op.Shape(weight), op.Constant(value_ints=[2]), op.Constant(value_ints=[3]))
    found = op.SequenceConstruct(op.CastLike(op.ConstantOfShape(op.Concat(zero, width, axis=0)), rows))
    for turn in range(op.Size(hit)):
        expert = op.Gather(hit, op.Unsqueeze(turn, zero))
        own = op.Slice(rows, op.Gather(starts, expert), op.Gather(stops, expert))
        found = op.SequenceInsert(found, op.MatMul(own, op.Squeeze(op.Gather(weight, expert), zero)))
    return op.ConcatFromSequence(found, axis=0)


def translations() -> dict[Callable[..., Any], Any]:
    """For `torch.onnx.export`; `transformers` registers the operator once its models are imported."""
    if "transformers.integrations.moe" not in sys.modules:
        return {}
    return {torch.ops.transformers.grouped_mm_fallback.default: grouped_mm}


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """While a model is traced its experts are the implementation that is translated; then what they were again."""
    configs = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), _NAME)]
    before = [getattr(config, _NAME) for config in configs]
    try:
        for config in configs:
            if getattr(config, _NAME) is not None:
                setattr(config, _NAME, GROUPED)
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            setattr(config, _NAME, name)


_NAME = "_experts_implementation"
