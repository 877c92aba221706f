"""A decoder with DeepSeek's attention, whose cache is a latent vector and a part for places, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from tokenizers import Tokenizer, models

from benchmarks.serve.nets import Net
from benchmarks.serve.workloads import NAME
from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Cache, Generation, Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json

Array = np.ndarray[Any, Any]

VOCABULARY, POSITIONS, LAYERS = 8192, 2048, 6
_WIDE, _INNER, _HEADS, _HEAD = 512, 1408, 8, 64
_CACHES = {"latent": 128, "place": 32}


def names() -> list[tuple[str, str, int]]:
    """Yield input, output and width of each tensor of the cache."""
    return [
        (f"past.{layer}.{kind}", f"present.{layer}.{kind}", width)
        for layer in range(LAYERS)
        for kind, width in _CACHES.items()
    ]


def bundle(folder: Path, threads: int) -> Path:
    """Write the bundle to `folder`, which must not exist yet. Its texts end at the requested length."""
    (folder / "files").mkdir(parents=True)
    _build(folder / "model.onnx")
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, "t0")).save(str(folder / "files/tokenizer.json"))
    (folder / "card.md").write_text("# decoder\n\nRandom weights, to measure a service with.\n")
    signature = _signature(threads)
    write_json(folder / "signature.json", signature.model_dump())
    ids = np.arange(2, 10).reshape(2, 4)
    _golden(folder, signature, ids)
    ancestors = Ancestors(code="", data="", checkpoint="", verdict="", onnx=digest_file(folder / "model.onnx"))
    write_manifest(folder, NAME, "no-baseline", ancestors)
    return folder


def first_inputs(ids: Array) -> dict[str, Array]:
    """Return the graph's inputs for the prompts of texts of one length."""
    rows, length = ids.shape
    positions = np.broadcast_to(np.arange(length), ids.shape).copy()
    caches = {name: np.zeros((rows, 1, 0, width), np.float32) for name, _, width in names()}
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions, **caches}


def _golden(folder: Path, signature: Signature, ids: Array) -> None:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    outputs = dict(
        zip(signature.output_names, session.run(list(signature.output_names), first_inputs(ids)), strict=True)
    )
    Golden(first_inputs(ids), outputs, [], [], rtol=1e-2, atol=1e-3).write(folder)


def _signature(threads: int) -> Signature:
    axes = (("input_ids", "sequence"), ("attention_mask", "total"), ("position_ids", "sequence"))
    inputs = [TensorSpec(name=name, datatype="INT64", shape=("batch", axis)) for name, axis in axes]
    outputs = [TensorSpec(name="logits", datatype="FP32", shape=("batch", "sequence", VOCABULARY))]
    for past, present, width in names():
        inputs.append(TensorSpec(name=past, datatype="FP32", shape=("batch", 1, "past", width)))
        outputs.append(TensorSpec(name=present, datatype="FP32", shape=("batch", 1, "total", width)))
    return Signature(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        codec="",
        limits=Limits(max_batch_size=64, max_body_bytes=1 << 20),
        runtime=Runtime(provider="cpu", threads=threads),
        generation=Generation(
            caches=tuple(Cache(input=past, output=present) for past, present, _ in names()), positions_limit=POSITIONS
        ),
    )


def _build(path: Path) -> None:
    net = Net()
    hidden = net.add("Add", _embedding(net, VOCABULARY, "input_ids"), _embedding(net, POSITIONS, "position_ids"))
    mask = _mask(net)
    for layer in range(LAYERS):
        hidden = net.add("Add", hidden, _attention(net, layer, net.norm(hidden, _WIDE), mask))
        hidden = net.add("Add", hidden, _gated(net, net.norm(hidden, _WIDE)))
    net.nodes.append(helper.make_node("MatMul", [net.norm(hidden, _WIDE), net.weight(_WIDE, VOCABULARY)], ["logits"]))
    axes = (("input_ids", "sequence"), ("attention_mask", "total"), ("position_ids", "sequence"))
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", axis]) for name, axis in axes]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY])]
    for past, present, width in names():
        inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, ["batch", 1, "past", width]))
        outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, ["batch", 1, "total", width]))
    graph = helper.make_graph(net.nodes, "decoder", inputs, outputs, net.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def _embedding(net: Net, rows: int, name: str) -> str:
    return net.add("Gather", net.weight(rows, _WIDE), name)


def _mask(net: Net) -> str:
    """Return 0 where attention is allowed, a large negative number elsewhere."""
    zero, one = net.constant(np.array(0)), net.constant(np.array(1))
    total = net.add("Gather", net.add("Shape", "attention_mask"), one)
    past = net.add("Sub", total, net.add("Gather", net.add("Shape", "input_ids"), one))
    queries = net.add("Unsqueeze", net.add("Range", past, total, one), net.constant(np.array([1])))
    causal = net.add("LessOrEqual", net.add("Range", zero, total, one), queries)
    is_token = net.add("Cast", "attention_mask", to=TensorProto.BOOL)
    rows = net.add("Unsqueeze", is_token, net.constant(np.array([1, 2])))
    values = net.constant(np.float32(0)), net.constant(np.float32(-1e9))
    return net.add("Where", net.add("And", causal, rows), *values)


def _attention(net: Net, layer: int, x: str, mask: str) -> str:
    """Add attention in which all heads use the same latent vectors, each by its own projection."""
    caches = {}
    for kind, width in _CACHES.items():
        new_entries = net.add("Unsqueeze", net.add("MatMul", x, net.weight(_WIDE, width)), net.constant(np.array([1])))
        net.nodes.append(
            helper.make_node("Concat", [f"past.{layer}.{kind}", new_entries], [f"present.{layer}.{kind}"], axis=2)
        )
        caches[kind] = f"present.{layer}.{kind}"
    scores = [
        net.add("MatMul", _queries(net, x, width), net.add("Transpose", caches[kind], perm=[0, 1, 3, 2]))
        for kind, width in _CACHES.items()
    ]
    scaled_scores = net.add("Mul", net.add("Add", *scores), net.constant(np.float32(_HEAD**-0.5)))
    shares = net.add("Softmax", net.add("Add", scaled_scores, mask), axis=-1)
    attended = net.add(
        "MatMul", net.add("MatMul", shares, caches["latent"]), net.weight(_HEADS, _CACHES["latent"], _HEAD)
    )
    transposed = net.add("Transpose", attended, perm=[0, 2, 1, 3])
    flat = net.add("Reshape", transposed, net.constant(np.array([0, 0, _HEADS * _HEAD])))
    return net.add("MatMul", flat, net.weight(_HEADS * _HEAD, _WIDE))


def _queries(net: Net, x: str, width: int) -> str:
    flat = net.add("MatMul", x, net.weight(_WIDE, _HEADS * _HEAD))
    cut = net.add("Reshape", flat, net.constant(np.array([0, 0, _HEADS, _HEAD])))
    return net.add("MatMul", net.add("Transpose", cut, perm=[0, 2, 1, 3]), net.weight(_HEADS, _HEAD, width))


def _gated(net: Net, x: str) -> str:
    gate = net.add("MatMul", x, net.weight(_WIDE, _INNER))
    open_ = net.add("Mul", gate, net.add("Sigmoid", gate))
    inner = net.add("Mul", open_, net.add("MatMul", x, net.weight(_WIDE, _INNER)))
    return net.add("MatMul", inner, net.weight(_INNER, _WIDE))
