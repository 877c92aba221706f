"""Making a variant's file out of the verified one, with ONNX Runtime's own converters.

Training samples that activations get their ranges from, checked before a quantiser trips over them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
from torch import Tensor

from export.fault_search import read_by
from export.to_onnx import save_plain, variants
from pipeline.contract.data import Samples, check_columns, open_split
from pipeline.contract.errors import DataError, StageError
from pipeline.contract.signature import NUMPY_TYPES, TensorSpec
from pipeline.contract.task import HasAxes, Task

Array = np.ndarray[Any, Any]

FEWEST = 16  # samples: the range of fewer is that of chance
_TOGETHER = 16  # samples per run of the graph, whose every tensor is read
_FIX = "make data('train') give what data('test') gives, or leave int8-static out of export.variants"


def calibration(task: Task, specs: Sequence[TensorSpec], count: int) -> list[dict[str, Array]]:
    """Inputs of as many samples, spread evenly over the training split: data may be sorted by class."""
    samples = open_split(task, "train")
    check_columns(task, samples)
    taken = spread(len(samples), count)
    feeds = []
    for start in range(0, len(taken), _TOGETHER):
        batch = samples.batch(taken[start : start + _TOGETHER])
        feed = {spec.name: batch[spec.name].numpy() for spec in specs}
        for spec in specs:
            check_array(spec, feed[spec.name])
        feeds.append(feed)
    return feeds + [{spec.name: batch[spec.name].numpy() for spec in specs} for batch in _other_shapes(task, samples)]


def _other_shapes(task: Task, samples: Samples) -> Iterator[Mapping[str, Tensor]]:
    """Lengths and paddings the service will see as well: what they make of a tensor belongs to its range."""
    if isinstance(task, HasAxes):
        yield from (one.batch for one in variants(task, samples))


def spread(samples: int, count: int) -> list[int]:
    """Indices; all of them where there are not so many."""
    if min(samples, count) < FEWEST:
        raise DataError(
            f"calibration: {min(samples, count)} training samples are too few to learn ranges from; give {FEWEST} at "
            "least by data('train'), or leave int8-static out of export.variants"
        )
    return [index * samples // count for index in range(count)] if samples > count else list(range(samples))


def check_array(spec: TensorSpec, array: Array) -> None:
    """The type and the shape the graph takes, and numbers that have a range."""
    wanted = np.dtype(NUMPY_TYPES[spec.datatype])
    if array.dtype != wanted:
        raise DataError(f"calibration: data('train') gives `{spec.name}` as {array.dtype}, the model takes {wanted}; {_FIX}")  # fmt: skip  # noqa: E501
    fixed = [(place, size) for place, size in enumerate(spec.shape) if isinstance(size, int)]
    if array.ndim != len(spec.shape) or any(array.shape[place] != size for place, size in fixed):
        raise DataError(
            f"calibration: data('train') gives `{spec.name}` of shape {list(array.shape)}, the model takes "
            f"{list(spec.shape)}; {_FIX}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"calibration: data('train') has NaN or infinity in `{spec.name}`, which has no range; {_FIX}")


Feed = Mapping[str, np.ndarray[Any, Any]]

_LARGEST_HALF = float(np.finfo(np.float16).max)
_AS_GOOD_AS_INFINITE = 1e30  # masks are filled with the lowest float; as the lowest half it hides as much
# ConvInteger, which a dynamic convolution becomes, has no kernel for signed weights on CPU and is slower than Conv.
_DYNAMIC = ("MatMul", "Gather", "Attention", "LSTM")
# Products, and what hands integers on between them. Norms and softmax stay as they are: they cost little and lose much.
_STATIC = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "Gather", "Relu", "Clip", "MaxPool", "AveragePool", "Pad", "Split"),
    *("GlobalAveragePool", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Concat"),
)
_RESIDUAL = (
    "Add",
)  # beside convolutions; without them it may add a mask, whose lowest float leaves no range for scores
_INTEGER = {"MatMulInteger", "DynamicQuantizeLSTM", "QAttention", "DequantizeLinear"}


@dataclass(frozen=True)
class Material:
    """What variants are made of."""

    reference: Path  # the verified file
    external: bool  # whether weights stay outside the file
    weight_bits: int
    calibration: Callable[[], Sequence[Feed]]  # training samples, for who needs ranges


Maker = Callable[[Material, Path], str]  # writes the file; gives what a reader should know of it


def fp16(material: Material, path: Path) -> str:
    """Weights and sums in half precision; inputs and outputs stay as they are."""
    model = onnx.load(material.reference)
    if not (named := dict(_weights(model.graph))):
        raise StageError("the graph has no fp32 weights: there is nothing to convert")
    for name, array in named.items():
        if ((np.abs(array) > _LARGEST_HALF) & (np.abs(array) < _AS_GOOD_AS_INFINITE)).any():
            raise StageError(f"the weight {name} goes beyond {_LARGEST_HALF:g}, the largest number that fp16 has")
    kept = sorted(without_half(model))
    blocked = [*DEFAULT_OP_BLOCK_LIST, *kept]
    half = convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)
    if not any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in _initializers(half.graph)):
        raise StageError(
            f"no operator with weights has a form in fp16 ({', '.join(kept)}): there is nothing to convert"
        )
    _write(half, material, path)
    return f"in fp32, for want of a form in fp16: {', '.join(kept)}" if kept else ""


def int8_dynamic(material: Material, path: Path) -> str:
    """Weights in 8 bits; activations get their range at every request."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        found = Path(folder) / "found.onnx"
        quantize_dynamic(
            _prepared(material, Path(folder)),
            found,
            op_types_to_quantize=list(_DYNAMIC),
            per_channel=True,
            reduce_range=material.weight_bits == 7,
            weight_type=QuantType.QInt8,
            use_external_data_format=material.external,
            extra_options={"MatMulConstBOnly": True},
        )
        _write(_quantised(found, "matrix product, embedding or LSTM"), material, path)
    return "its answers depend a little on what else is in the batch: a service never merges requests for it"


def int8_static(material: Material, path: Path) -> str:
    """Weights in 8 bits channel by channel, activations in ranges seen on training samples."""
    feeds = material.calibration()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        found = Path(folder) / "found.onnx"
        quantize_static(
            _prepared(material, Path(folder)),
            found,
            _Reader(feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(static_kinds(onnx.load(material.reference, load_external_data=False))),
            per_channel=True,
            reduce_range=material.weight_bits == 7,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            use_external_data_format=material.external,
            extra_options={"MatMulConstBOnly": True},
        )
        model = _quantised(found, "convolution, matrix product or embedding")
        _free_answers(model.graph)
        _write(model, material, path)
    return f"ranges from {sum(_rows(feed) for feed in feeds)} rows of training samples"


MAKERS: dict[str, Maker] = {"fp16": fp16, "int8-dynamic": int8_dynamic, "int8-static": int8_static}


def static_kinds(model: onnx.ModelProto) -> tuple[str, ...]:
    """Operators that int8-static rounds."""
    convolves = any(node.op_type == "Conv" for node in _nodes(model.graph))
    return (*_STATIC, *_RESIDUAL) if convolves else _STATIC


def without_half(model: onnx.ModelProto) -> set[str]:
    """Operators that read floats and, by ONNX's own rules, halves nowhere."""
    versions = {one.domain: one.version for one in model.opset_import}
    return {node.op_type for node in _nodes(model.graph) if _bars_half(node, versions)}


def _bars_half(node: onnx.NodeProto, versions: Mapping[str, int]) -> bool:
    version = versions.get(node.domain, 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return False  # ONNX Runtime's own operator: loading the file shows
    types = {name for one in onnx.defs.get_schema(node.op_type, version, node.domain).inputs for name in one.types}
    return "tensor(float)" in types and "tensor(float16)" not in types


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # published without types
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        feed = next(self._feeds, None)
        return None if feed is None else dict(feed)


def _prepared(material: Material, folder: Path) -> Path:
    """Constants folded and norms fused into convolutions: what is fused is not rounded twice."""
    path = folder / "prepared.onnx"
    outside = {"save_as_external_data": True, "all_tensors_to_one_file": True} if material.external else {}
    quant_pre_process(str(material.reference), str(path), skip_symbolic_shape=True, **outside)
    model = onnx.load(path)
    del model.graph.value_info[:]  # the exporter also records the shapes of weights, and Gemm's are transposed later
    onnx.save(model, path, save_as_external_data=material.external)
    return path


def _quantised(path: Path, what: str) -> onnx.ModelProto:
    model = onnx.load(path)
    if not any(node.op_type in _INTEGER for node in _nodes(model.graph)):
        raise StageError(f"the graph has no {what} with constant weights: there is nothing to quantise")
    return model


def _free_answers(graph: onnx.GraphProto) -> None:
    """Nothing is gained by rounding what comes out, and what calibration never saw would be cut off."""
    makers = {name: node for node in graph.node for name in node.output}
    for output in graph.output:
        last = makers[output.name]
        rounding = makers.get(last.input[0]) if last.op_type == "DequantizeLinear" else None
        if rounding is None or rounding.op_type != "QuantizeLinear" or rounding.input[0] not in makers:
            continue
        whole = rounding.input[0]
        if sum(name in (whole, rounding.output[0]) for node in _nodes(graph) for name in node.input) > 2:
            continue  # something else in the graph goes on with it
        maker = makers[whole]
        maker.output[list(maker.output).index(whole)] = output.name
        graph.node.remove(last)
        graph.node.remove(rounding)
    read = {name for node in _nodes(graph) for name in node.input} | {output.name for output in graph.output}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _write(model: onnx.ModelProto, material: Material, path: Path) -> None:
    """In an order that can be computed, and without the domains and names that converters leave behind."""
    put_in_order(model.graph)
    used = {node.domain for node in _nodes(model.graph)} | {function.domain for function in model.functions}
    kept = [one for one in model.opset_import if one.domain in used or one.domain == ""]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    save_plain(model, path, material.external)


def put_in_order(graph: onnx.GraphProto) -> None:
    """Every node behind those it reads from; converters forget that the body of a loop reads from outside too."""
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    before = [sorted({makers[name] for name in read_by(node) if name in makers}) for node in graph.node]
    order: dict[int, None] = {}
    for first in range(len(graph.node)):
        waiting = [first]
        while waiting:
            place = waiting[-1]
            if missing := [one for one in before[place] if one not in order and one != place]:
                waiting.append(missing[0])
            else:
                order[waiting.pop()] = None
    nodes = [graph.node[place] for place in order]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    for inner in _inner(graph):
        put_in_order(inner)


def _weights(graph: onnx.GraphProto) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for tensor in _initializers(graph):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            yield tensor.name, onnx.numpy_helper.to_array(tensor)


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for inner in _inner(graph):
        yield from _initializers(inner)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    yield from graph.node
    for inner in _inner(graph):
        yield from _nodes(inner)


def _inner(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Branches of an `If` and bodies of a `Loop`."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def _rows(feed: Feed) -> int:
    return len(next(iter(feed.values())))
