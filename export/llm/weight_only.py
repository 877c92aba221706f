"""Round only the weights of a language model, to 8 or 4 bits, in blocks with a scale each.

The embedding and the head get 8 bits in every case: there, rounding costs most. GPTQ compensates the rounding of each
weight by the weights after it, so that the outputs of a layer stay as they are on calibration texts.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from export.compare import Array
from export.conversion.names import input_names, nested_nodes
from export.sessions import open_session
from export.variants.quantize import (
    CONVERTERS,
    Converter,
    Feed,
    VariantInputs,
    copy_model,
    float_weights,
    write_variant,
)
from pipeline.system.errors import StageError

DOMAIN = "com.microsoft"
_EMBEDDING_BLOCK = 32
_INT8_ACTIVATIONS = 4  # accuracy level of MatMulNBits: products of integers, for which activations are rounded, too
_MOMENT_BYTES = 1 << 30  # of second moments that are collected in one pass over the calibration texts
_DAMPING = 0.01  # of the mean second moment, so that it can be inverted


@dataclass(frozen=True)
class RoundedBlocks:
    """Rows of a matrix as integers from 0 on; each block of a row has a scale and a zero point."""

    integers: Array  # [rows, blocks, block]
    scale: Array  # [rows, blocks]
    zero: Array  # [rows, blocks]


def round_weights(material: VariantInputs, path: Path, bits: int, block: int = 32, is_calibrated: bool = False) -> str:
    """Write a copy of the file whose weights are rounded."""
    notes = []
    moments: dict[str, Array] = {}
    if is_calibrated:
        feeds = material.calibration()
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            moments = collect_moments(copy_model(material.reference, Path(folder)), feeds)
        notes.append(f"calibrated on {len(feeds)} training texts")
    model = onnx.load(material.reference)
    round_graph(model.graph, bits, block, moments)
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    floats = sum(array.nbytes for name, array in float_weights(model.graph) if array.ndim > 1 and ".scale" not in name)
    if floats > model.ByteSize() / 10:
        notes.append(f"{floats / 1e6:.3g} MB of weights stay in fp32")
    write_variant(model, material, path)
    return "; ".join(notes)


LANGUAGE_CONVERTERS: dict[str, Converter] = {
    "fp16": CONVERTERS["fp16"],
    "int8": partial(round_weights, bits=8),
    "int4": partial(round_weights, bits=4),
    "int4-128": partial(round_weights, bits=4, block=128),
    "int4-gptq": partial(round_weights, bits=4, is_calibrated=True),
}


def round_graph(graph: onnx.GraphProto, bits: int, block: int, moments: Mapping[str, Array]) -> None:
    """Replace matrix products and the embedding; `moments` of the inputs of products are for GPTQ."""
    sources, head = _weight_sources(graph), find_head(graph)
    arrays = {tensor.name: tensor for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in sources]
    if not products:
        raise StageError("the graph has no matrix product with constant weights: there is nothing to quantize")
    for node in products:
        source = sources[node.input[1]]
        array = numpy_helper.to_array(arrays[source.weight])
        weight = array if source.is_transposed else array.T
        if node.name == head:
            width, rounded = 8, round_blocks(weight, 8, _EMBEDDING_BLOCK)
        elif node.input[0] in moments:
            width, rounded = bits, gptq(weight, moments[node.input[0]], bits, block)
        else:
            width, rounded = bits, round_blocks(weight, bits, block)
        _replace_product(graph, node, source.weight, rounded, width, weight.shape[1])
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.input}
    for node in [node for node in graph.node if node.op_type == "Gather" and node.input[1] in ranks]:
        table = arrays.get(node.input[0])
        if table is not None and table.data_type == onnx.TensorProto.FLOAT and table.dims[1] % _EMBEDDING_BLOCK == 0:
            rounded = round_blocks(numpy_helper.to_array(table), 8, _EMBEDDING_BLOCK)
            _replace_lookup(graph, node, rounded, ranks[node.input[1]])
    for node in [node for node in nested_nodes(graph) if node.op_type == "Gather"]:
        stack = arrays.get(node.input[0])
        if stack is not None and len(stack.dims) == 3 and stack.dims[2] % _EMBEDDING_BLOCK == 0:
            _replace_experts(graph, node, numpy_helper.to_array(stack), bits)
    _remove_unused(graph)


@dataclass(frozen=True)
class _Source:
    """Where the weights of a matrix product come from."""

    weight: str
    is_transposed: bool  # at run time, as those of a head that is tied to the embedding


def _weight_sources(graph: onnx.GraphProto) -> dict[str, _Source]:
    is_float = onnx.TensorProto.FLOAT
    matrices = {tensor.name for tensor in graph.initializer if tensor.data_type == is_float and len(tensor.dims) == 2}
    turned = [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in matrices]
    return {
        **{name: _Source(name, False) for name in matrices},
        **{node.output[0]: _Source(node.input[0], True) for node in turned},
    }


def find_head(graph: onnx.GraphProto) -> str:
    """Return the name of the matrix product with constant weights that is nearest to the logits; "" without one."""
    sources = _weight_sources(graph)
    makers = {name: node for node in graph.node for name in node.output}
    name = graph.output[0].name
    while name in makers:
        node = makers[name]
        if node.op_type == "MatMul" and node.input[1] in sources:
            return str(node.name)
        name = node.input[0]
    return ""


def round_blocks(matrix: Array, bits: int, block: int) -> RoundedBlocks:
    """Round to the nearest; the last block of a row is filled up with zeros."""
    rows, columns = matrix.shape
    blocks = np.pad(matrix, ((0, 0), (0, -columns % block))).reshape(rows, -1, block)
    scale, zero = _grid(blocks, bits)
    integers = np.clip(np.round(blocks / scale[..., None]) + zero[..., None], 0, 2**bits - 1)
    return RoundedBlocks(integers.astype(np.uint8), scale, zero.astype(np.uint8))


def _grid(blocks: Array, bits: int) -> tuple[Array, Array]:
    """Return scale and zero point of each block, so that 0 and both extremes can be represented."""
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    scale = np.where(high > low, (high - low) / (2**bits - 1), 1).astype(np.float32)
    return scale, np.round(-low / scale)


def gptq(matrix: Array, moment: Array, bits: int, block: int) -> RoundedBlocks:
    """Round column after column; columns that follow take over what its rounding changes in the outputs.

    `moment`: the second moment of the inputs, [columns, columns].
    """
    padding = -matrix.shape[1] % block
    weights = torch.from_numpy(np.pad(matrix, ((0, 0), (0, padding))).astype(np.float64))
    second = torch.from_numpy(np.pad(moment, ((0, padding), (0, padding))).astype(np.float64))
    second.diagonal().add_(max(_DAMPING * float(np.diag(moment).mean()), 1e-12))
    compensation = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(second)), upper=True)
    integers, scales, zeros = torch.zeros_like(weights), [], []
    for start in range(0, weights.shape[1], block):
        end = start + block
        scale, zero = (torch.from_numpy(part) for part in _grid(weights[:, start:end].numpy(), bits))
        errors = torch.zeros(len(weights), block, dtype=torch.float64)
        for column in range(start, end):
            rounded = (weights[:, column] / scale).round().add(zero).clamp(0, 2**bits - 1)
            error = (weights[:, column] - (rounded - zero) * scale) / compensation[column, column]
            weights[:, column:end] -= error[:, None] * compensation[column, column:end]
            integers[:, column], errors[:, column - start] = rounded, error
        weights[:, end:] -= errors @ compensation[start:end, end:]
        scales.append(scale)
        zeros.append(zero)
    return RoundedBlocks(
        integers.reshape(len(weights), -1, block).numpy().astype(np.uint8),
        torch.stack(scales, dim=1).numpy().astype(np.float32),
        torch.stack(zeros, dim=1).numpy().astype(np.uint8),
    )


def collect_moments(path: Path, feeds: Sequence[Feed]) -> dict[str, Array]:
    """Return the second moment of the inputs of every matrix product with constant weights, except the head."""
    model = onnx.load(path, load_external_data=False)
    dims = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    sources, head = _weight_sources(model.graph), find_head(model.graph)
    sizes = {
        node.input[0]: dims[source.weight][1 if source.is_transposed else 0]
        for node in model.graph.node
        if node.op_type == "MatMul" and (source := sources.get(node.input[1])) and node.name != head
    }
    observed = path.with_name("observed.onnx")
    moments: dict[str, Array] = {}
    for names in _groups(sizes):
        outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
        del model.graph.output[:]
        model.graph.output.extend(outputs)
        onnx.save(model, observed)
        session = open_session(observed)
        for feed in feeds:
            for name, inputs in zip(names, session.run(names, dict(feed)), strict=True):
                rows = inputs.reshape(-1, inputs.shape[-1])
                moments[name] = moments.get(name, 0.0) + rows.T @ rows
        observed.unlink()
    return moments


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield names whose second moments fit into memory together."""
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + 4 * size**2 > _MOMENT_BYTES:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += 4 * size**2
    if group:
        yield group


def _replace_product(
    graph: onnx.GraphProto, node: onnx.NodeProto, weight: str, rounded: RoundedBlocks, bits: int, columns: int
) -> None:
    rows, _, block = rounded.integers.shape
    integers, zero = (_pack(part) if bits == 4 else part for part in (rounded.integers, rounded.zero))
    constants = {f"{weight}.int{bits}": integers, f"{weight}.scale": rounded.scale, f"{weight}.zero": zero}
    _add_constants(graph, constants)
    sizes: dict[str, Any] = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    product = helper.make_node(
        "MatMulNBits", [node.input[0], *constants], node.output, node.name,
        domain=DOMAIN, accuracy_level=_INT8_ACTIVATIONS, **sizes,
    )  # fmt: skip
    node.CopyFrom(product)


def _replace_lookup(graph: onnx.GraphProto, node: onnx.NodeProto, rounded: RoundedBlocks, rank: int) -> None:
    """Look up rows of blocks, so that a tied head reads the same integers, and join the blocks."""
    table, indices, output = str(node.input[0]), str(node.input[1]), str(node.output[0])
    constants = {
        f"{table}.int8": rounded.integers,
        f"{table}.lookup.scale": rounded.scale[..., None],
        f"{table}.lookup.zero": rounded.zero[..., None],
    }
    _add_constants(graph, {**constants, f"{table}.lookup.shape": np.array([*[0] * rank, -1])})
    sizes: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 2, "block_size": _EMBEDDING_BLOCK, "bits": 8}
    lookup = helper.make_node(
        "GatherBlockQuantized", [next(iter(constants)), indices, *list(constants)[1:]], [f"{output}.blocks"], node.name,
        domain=DOMAIN, **sizes,
    )  # fmt: skip
    node.CopyFrom(lookup)
    graph.node.append(
        helper.make_node("Reshape", [f"{output}.blocks", f"{table}.lookup.shape"], [output], f"{node.name}.joined")
    )


def _replace_experts(graph: onnx.GraphProto, node: onnx.NodeProto, stack: Array, bits: int) -> None:
    """Restore the weights of an expert when the loop over experts takes them from [experts, inputs, outputs]."""
    name, indices = node.input
    rounded = round_blocks(stack.reshape(-1, stack.shape[2]), bits, _EMBEDDING_BLOCK)
    integers, zero = (_pack(part) if bits == 4 else part for part in (rounded.integers, rounded.zero))
    parts = {f"{name}.int{bits}": integers, f"{name}.scale": rounded.scale, f"{name}.zero": zero}
    _add_constants(graph, {part: array.reshape(*stack.shape[:2], -1) for part, array in parts.items()})
    sizes: dict[str, Any] = {"gather_axis": 0, "quantize_axis": 2, "block_size": _EMBEDDING_BLOCK, "bits": bits}
    lookup = helper.make_node(
        "GatherBlockQuantized", [f"{name}.int{bits}", indices, f"{name}.scale", f"{name}.zero"], node.output, node.name,
        domain=DOMAIN, **sizes,
    )  # fmt: skip
    node.CopyFrom(lookup)


def _add_constants(graph: onnx.GraphProto, constants: Mapping[str, Array]) -> None:
    present = {tensor.name for tensor in graph.initializer}
    new = {name: array for name, array in constants.items() if name not in present}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in new.items())


def _pack(integers: Array) -> Array:
    """Put two neighbours of the last axis into a byte, the first one into the lower half."""
    even = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, integers.shape[-1] % 2)])
    packed: Array = even[..., ::2] | even[..., 1::2] << 4
    return packed


def _remove_unused(graph: onnx.GraphProto) -> None:
    """Remove what only the replaced nodes have read: weights, and their transpositions."""
    outputs = {output.name for output in graph.output}
    for kept, is_used in (
        (graph.node, lambda node, read: read & {*node.output}),
        (graph.initializer, lambda tensor, read: tensor.name in read),
    ):
        read = {name for node in graph.node for name in input_names(node)} | outputs
        for item in [item for item in kept if not is_used(item, read)]:
            kept.remove(item)
