"""Convert the verified file into a variant, with ONNX Runtime's own converters.

int8-static takes the ranges of activations from training samples, which are checked first.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from export.conversion.names import input_names, name_tensors, nested_graphs, nested_nodes, set_output_axes
from export.conversion.shapes import untraced_batches
from export.conversion.to_onnx import save_stripped, tensor_specs
from pipeline.contract.codec import Array
from pipeline.contract.data import check_columns, open_split
from pipeline.contract.signature import NUMPY_TYPES, TensorSpec
from pipeline.contract.task import HasAxes, Task
from pipeline.system.errors import DataError, StageError

MIN_SAMPLES = 16  # fewer give no reliable range
_BATCH = 16  # samples per run; a run returns every tensor of the graph
_FIX = "make data('train') give what data('test') gives, or leave int8-static out of export.variants"


def calibration_feeds(task: Task, specs: Sequence[TensorSpec], count: int) -> list[dict[str, Array]]:
    """Return inputs from the training split, evenly spaced: data may be sorted by class."""
    samples = open_split(task, "train")
    check_columns(task, samples)
    indices = calibration_indices(len(samples), count)
    feeds = []
    for start in range(0, len(indices), _BATCH):
        batch = samples.batch(indices[start : start + _BATCH])
        feed = {spec.name: batch[spec.name].numpy() for spec in specs}
        for spec in specs:
            check_array(spec, feed[spec.name])
        feeds.append(feed)
    # The service gets requests of other lengths and paddings, so they count for the ranges.
    other_shapes = untraced_batches(task, samples) if isinstance(task, HasAxes) else ()
    return feeds + [{spec.name: other.batch[spec.name].numpy() for spec in specs} for other in other_shapes]


def calibration_indices(samples: int, count: int) -> list[int]:
    """Return evenly spaced indices; all of them if there are fewer samples than `count`."""
    if min(samples, count) < MIN_SAMPLES:
        raise DataError(
            f"calibration: {min(samples, count)} training samples are too few to learn ranges from; give {MIN_SAMPLES} "
            "at least by data('train'), or leave int8-static out of export.variants"
        )
    return [index * samples // count for index in range(count)] if samples > count else list(range(samples))


def check_array(spec: TensorSpec, array: Array) -> None:
    """Check type, shape, and that all numbers are finite."""
    dtype = np.dtype(NUMPY_TYPES[spec.datatype])
    if array.dtype != dtype:
        raise DataError(f"calibration: data('train') gives `{spec.name}` as {array.dtype}, the model takes {dtype}; {_FIX}")  # fmt: skip  # noqa: E501
    fixed = [(axis, size) for axis, size in enumerate(spec.shape) if isinstance(size, int)]
    if array.ndim != len(spec.shape) or any(array.shape[axis] != size for axis, size in fixed):
        raise DataError(
            f"calibration: data('train') gives `{spec.name}` of shape {list(array.shape)}, the model takes "
            f"{list(spec.shape)}; {_FIX}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"calibration: data('train') has NaN or infinity in `{spec.name}`, which has no range; {_FIX}")


Feed = Mapping[str, np.ndarray[Any, Any]]

_LARGEST_HALF = float(np.finfo(np.float16).max)
_MASK_VALUE = 1e30  # masks contain the lowest float; the lowest fp16 number masks as well
# ConvInteger, which a dynamic convolution becomes, has no kernel for signed weights on CPU and is slower than Conv.
_DYNAMIC = ("MatMul", "Gather", "Attention", "LSTM")
# Products, and operators between them that keep integers. Norms and softmax stay in float: they cost little time.
_STATIC = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "Relu", "Clip", "MaxPool", "AveragePool", "Pad", "Split"),
    *("GlobalAveragePool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Concat"),
)
_RESIDUAL = ("Add",)  # beside convolutions; else it may add a mask, whose lowest float leaves no range for scores
# Operators that compare or select: what follows from their results does not depend on small errors of activations.
_DECISIONS = {
    *("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "IsNaN"),
    *("TopK", "ArgMax", "NonZero", "Shape"),
}
_INTEGER = {"MatMulInteger", "DynamicQuantizeLSTM", "QAttention", "DequantizeLinear"}


@dataclass(frozen=True)
class VariantInputs:
    """The inputs of a converter."""

    reference: Path  # the verified file
    external: bool  # whether weights stay outside the file
    weight_bits: int
    calibration: Callable[[], Sequence[Feed]]  # training samples, for converters that need ranges


Converter = Callable[[VariantInputs, Path], str]  # writes the file and returns a note on it


def with_neutral_names(converter: Converter) -> Converter:
    """Convert a copy whose inputs and outputs have names that a converter cannot give to a tensor of its own."""

    @functools.wraps(converter)
    def convert(material: VariantInputs, path: Path) -> str:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            copy = copy_model(material.reference, Path(folder))
            specs = tensor_specs(copy)
            names, output_names = ([spec.name for spec in side] for side in specs)
            sizes = (("input", len(names)), ("output", len(output_names)))
            inputs, outputs = ([f"variant.{word}.{i}" for i in range(count)] for word, count in sizes)
            _rename(copy, inputs, outputs)

            def calibration() -> Sequence[Feed]:
                new_names = dict(zip(names, inputs, strict=True))
                return [{new: feed[old] for old, new in new_names.items()} for feed in material.calibration()]

            note = converter(replace(material, reference=copy, calibration=calibration), path)
        _rename(path, names, output_names, axes={spec.name: spec.shape for spec in specs[1]})
        return note

    return convert


def _rename(
    path: Path, inputs: Sequence[str], outputs: Sequence[str], axes: Mapping[str, Sequence[int | str]] | None = None
) -> None:
    model = onnx.load(path, load_external_data=False)
    name_tensors(model, inputs, outputs)
    if axes:
        set_output_axes(model, axes)
    path.write_bytes(model.SerializeToString(deterministic=True))


@with_neutral_names
def fp16(material: VariantInputs, path: Path) -> str:
    """Convert weights and computation to fp16; inputs and outputs keep their types."""
    model = onnx.load(material.reference)
    if not (weights := dict(float_weights(model.graph))):
        raise StageError("the graph has no fp32 weights: there is nothing to convert")
    for name, array in weights.items():
        if ((np.abs(array) > _LARGEST_HALF) & (np.abs(array) < _MASK_VALUE)).any():
            raise StageError(f"the weight {name} goes beyond {_LARGEST_HALF:g}, the largest number that fp16 has")
    unsupported = sorted(operators_without_fp16(model))
    blocked = [*DEFAULT_OP_BLOCK_LIST, *unsupported]
    half = convert_float_to_float16(
        model, keep_io_types=True, op_block_list=blocked, node_block_list=_name_exact_nodes(model.graph)
    )
    _move_casts(half.graph)
    _join_casts(half.graph)
    stored = (tensor for graph in nested_graphs(half.graph) for tensor in graph.initializer)
    if not any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in stored):
        names = ", ".join(unsupported)
        raise StageError(f"no operator with weights has a form in fp16 ({names}): there is nothing to convert")
    write_variant(half, material, path)
    return f"in fp32, for want of a form in fp16: {', '.join(unsupported)}" if unsupported else ""


@with_neutral_names
def int8_dynamic(material: VariantInputs, path: Path) -> str:
    """Quantize weights to 8 bits; activations get their range at every request."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        quantized = Path(folder) / "found.onnx"
        quantize_dynamic(
            _prepare(material, Path(folder)),
            quantized,
            op_types_to_quantize=list(_DYNAMIC),
            per_channel=True,
            reduce_range=material.weight_bits == 7,
            weight_type=QuantType.QInt8,
            use_external_data_format=material.external,
            extra_options={"MatMulConstBOnly": True},
        )
        write_variant(_load_quantized(quantized, "matrix product, embedding or LSTM"), material, path)
    return "its answers depend a little on what else is in the batch: a service never merges requests for it"


@with_neutral_names
def int8_static(material: VariantInputs, path: Path) -> str:
    """Quantize weights to 8 bits per channel, and activations by their ranges on training samples."""
    feeds = material.calibration()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        quantized = Path(folder) / "found.onnx"
        quantize_static(
            _prepare(material, Path(folder)),
            quantized,
            _Reader(feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(static_operators(onnx.load(material.reference, load_external_data=False))),
            per_channel=True,
            reduce_range=material.weight_bits == 7,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=material.external,
            extra_options={"MatMulConstBOnly": True},
        )
        model = _load_quantized(quantized, "convolution, matrix product or embedding")
        _keep_outputs_in_float(model.graph)
        write_variant(model, material, path)
    return f"ranges from {sum(len(next(iter(feed.values()))) for feed in feeds)} rows of training samples"


CONVERTERS: dict[str, Converter] = {"fp16": fp16, "int8-dynamic": int8_dynamic, "int8-static": int8_static}


def static_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the operators that int8-static quantizes."""
    convolves = any(node.op_type == "Conv" for node in nested_nodes(model.graph))
    return (*_STATIC, *_RESIDUAL) if convolves else _STATIC


def operators_without_fp16(model: onnx.ModelProto) -> set[str]:
    """Return the operators that take floats but, by ONNX's rules, no fp16."""
    versions = {opset.domain: opset.version for opset in model.opset_import}
    return {node.op_type for node in nested_nodes(model.graph) if _lacks_fp16(node, versions)}


def _lacks_fp16(node: onnx.NodeProto, versions: Mapping[str, int]) -> bool:
    version = versions.get(node.domain, 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return False  # ONNX Runtime's own operator: loading the file is the test
    parameters = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
    types = {name for parameter in parameters for name in parameter.types}
    return "tensor(float)" in types and "tensor(float16)" not in types


def copy_model(path: Path, folder: Path) -> Path:
    """Copy a file with its external weights."""
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copyfile(file, folder / file.name)
    return folder / path.name


def _name_exact_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the nodes that compute angles of positions, and counts: above 2048, fp16 leaves integers out."""
    integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    makers = {name: node for node in graph.node for name in node.output}
    pending = [
        node
        for node in graph.node
        if node.op_type in ("Sin", "Cos")
        or (node.op_type == "Cast" and any(attribute.i in integers for attribute in node.attribute))
    ]
    names: dict[str, None] = {}
    while pending:
        node = pending.pop()
        if node.name in names:
            continue
        node.name = node.name or f"exact_{len(names)}"
        names[node.name] = None
        if node.op_type not in _DECISIONS:
            pending += [makers[name] for name in node.input if name in makers]
    return list(names)


def _move_casts(graph: onnx.GraphProto) -> None:
    """Move casts of values in the body of a loop, which the converter puts outside, into the body."""
    for inner in list(nested_graphs(graph))[1:]:
        local = {value.name for value in inner.input} | {name for node in inner.node for name in node.output}
        moved = [node for node in graph.node if node.op_type == "Cast" and node.input[0] in local]
        inner.node.extend(moved)
        for node in moved:
            graph.node.remove(node)


def _join_casts(graph: onnx.GraphProto) -> None:
    """Remove casts to fp16 and back between nodes in fp32; the converter also repeats a cast for every reader."""
    floats = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.name.startswith("graph_input_cast") or node.name.endswith("_cast_to_fp16_node")
    }
    back = {node.output[0]: node for node in graph.node if node.name.endswith("_cast_to_fp32_node")}
    kept = [node for node in graph.node if node.output[0] not in back]
    joined = {name: floats[node.input[0]] for name, node in back.items() if node.input[0] in floats}
    kept += [node for name, node in back.items() if name not in joined]
    for node in nested_nodes(graph):
        node.input[:] = [joined.get(name, name) for name in node.input]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(copies)
    del graph.value_info[:]  # the converter lists constants that stay in fp32 as fp16


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # published without types
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        feed = next(self._feeds, None)
        return None if feed is None else dict(feed)


def _prepare(material: VariantInputs, folder: Path) -> Path:
    """Fold constants and fuse norms into convolutions, so that they are not rounded twice."""
    path = folder / "prepared.onnx"
    outside = {"save_as_external_data": True, "all_tensors_to_one_file": True} if material.external else {}
    quant_pre_process(str(material.reference), str(path), skip_symbolic_shape=True, **outside)
    model = onnx.load(path)
    del model.graph.value_info[:]  # the exporter also records the shapes of weights, and Gemm's are transposed later
    onnx.save(model, path, save_as_external_data=material.external)
    return path


def _load_quantized(path: Path, operators: str) -> onnx.ModelProto:
    model = onnx.load(path)
    if not any(node.op_type in _INTEGER for node in nested_nodes(model.graph)):
        raise StageError(f"the graph has no {operators} with constant weights: there is nothing to quantize")
    return model


def _keep_outputs_in_float(graph: onnx.GraphProto) -> None:
    """Remove the quantization of outputs: it saves nothing and clips values that calibration has not seen."""
    makers = {name: node for node in graph.node for name in node.output}
    for output in graph.output:
        last = makers[output.name]
        rounding = makers.get(last.input[0]) if last.op_type == "DequantizeLinear" else None
        if rounding is None or rounding.op_type != "QuantizeLinear" or rounding.input[0] not in makers:
            continue
        float_name = rounding.input[0]
        if sum(name in (float_name, rounding.output[0]) for node in nested_nodes(graph) for name in node.input) > 2:
            continue  # another node reads it
        maker = makers[float_name]
        maker.output[list(maker.output).index(float_name)] = output.name
        graph.node.remove(last)
        graph.node.remove(rounding)
    read = {name for node in nested_nodes(graph) for name in node.input} | {output.name for output in graph.output}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def write_variant(model: onnx.ModelProto, material: VariantInputs, path: Path) -> None:
    """Sort the nodes, drop domains that the converters left behind, and save."""
    sort_nodes(model.graph)
    used = {node.domain for node in nested_nodes(model.graph)} | {function.domain for function in model.functions}
    opsets = [opset for opset in model.opset_import if opset.domain in used or opset.domain == ""]
    del model.opset_import[:]
    model.opset_import.extend(opsets)
    save_stripped(model, path, material.external)


def sort_nodes(whole: onnx.GraphProto) -> None:
    """Put every node after those it reads from; converters ignore what the body of a loop reads from outside."""
    for graph in nested_graphs(whole):  # which enters the nodes of a graph after it is sorted
        _sort_nodes(graph)


def _sort_nodes(graph: onnx.GraphProto) -> None:
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    inputs = [sorted({makers[name] for name in input_names(node) if name in makers}) for node in graph.node]
    order: dict[int, None] = {}
    for first in range(len(graph.node)):
        stack = [first]
        while stack:
            index = stack[-1]
            if missing := [other for other in inputs[index] if other not in order and other != index]:
                stack.append(missing[0])
            else:
                order[stack.pop()] = None
    nodes = [graph.node[index] for index in order]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def float_weights(graph: onnx.GraphProto) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for tensor in (tensor for inner in nested_graphs(graph) for tensor in inner.initializer):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            yield tensor.name, onnx.numpy_helper.to_array(tensor)
