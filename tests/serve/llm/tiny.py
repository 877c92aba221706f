"""A tiny language model: an ONNX graph with a cache, a tokenizer, and a reference for greedy decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.contract.golden import Golden
from pipeline.contract.signature import Cache, Generation, Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import write_json
from tests.serve.bundles import seal

HEADS, WIDTH, LAYERS, POSITIONS = 2, 8, 2, 96
SIZE = HEADS * WIDTH
VOCABULARY = 288
BEGIN, END, USER, ANSWER = range(4)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|answer|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|user|>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}"
)
_TEXT = ["the quick brown fox jumps over the lazy dog", "import os, sys\nprint('hello world')\n", "größer €5 日本語"]
CACHES = {f"past.{layer}.{what}": (HEADS, WIDTH) for layer in range(LAYERS) for what in ("key", "value")}

Array = np.ndarray[Any, Any]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_TEXT * 3, trainer)
    assert made.get_vocab_size() <= VOCABULARY
    return made


class _Nodes:
    """Collects nodes and weights of an ONNX graph."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._random = np.random.default_rng(seed)

    def weight(self, name: str, *shape: int, scale: float = 1.0) -> str:
        values = self._random.normal(size=shape).astype(np.float32) * np.float32(scale)
        return self.constant(name, values)

    def constant(self, name: str, values: Array) -> str:
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, op: str, output: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output


def _mask(graph: _Nodes) -> str:
    """Add the causal mask: 0 for allowed positions, a large negative number for later ones and padding."""
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    total = graph.add("Gather", "total", graph.add("Shape", "shape.mask", "attention_mask"), one)
    sequence = graph.add("Gather", "sequence", graph.add("Shape", "shape.ids", "input_ids"), one)
    keys = graph.add("Range", "keys", zero, total, one)
    queries = graph.add("Range", "queries", graph.add("Sub", "past", total, sequence), total, one)
    column = graph.add("Unsqueeze", "column", queries, graph.constant("last", np.array([1], np.int64)))
    causal = graph.add("LessOrEqual", "causal", keys, column)
    there = graph.add("Cast", "there", "attention_mask", to=TensorProto.BOOL)
    rows = graph.add("Unsqueeze", "rows", there, graph.constant("middle", np.array([1, 2], np.int64)))
    allowed = graph.add("And", "allowed", causal, rows)
    values = [graph.constant(name, np.array(value, np.float32)) for name, value in (("yes", 0.0), ("no", -1e9))]
    return graph.add("Where", "bias", allowed, *values)


def _layer(graph: _Nodes, layer: int, x: str) -> str:
    def heads(what: str) -> str:
        made = graph.add("MatMul", f"{layer}.{what}.flat", x, graph.weight(f"{layer}.{what}.w", SIZE, SIZE, scale=0.3))
        made = graph.add("Reshape", f"{layer}.{what}.cut", made, "heads")
        return graph.add("Transpose", f"{layer}.{what}", made, perm=[0, 2, 1, 3])

    key = graph.add("Concat", f"present.{layer}.key", f"past.{layer}.key", heads("key"), axis=2)
    value = graph.add("Concat", f"present.{layer}.value", f"past.{layer}.value", heads("value"), axis=2)
    turned = graph.add("Transpose", f"{layer}.turned", key, perm=[0, 1, 3, 2])
    scores = graph.add("Add", f"{layer}.scores", graph.add("MatMul", f"{layer}.raw", heads("query"), turned), "bias")
    seen = graph.add("MatMul", f"{layer}.seen", graph.add("Softmax", f"{layer}.shares", scores, axis=-1), value)
    flat = graph.add(
        "Reshape", f"{layer}.flat", graph.add("Transpose", f"{layer}.back", seen, perm=[0, 2, 1, 3]), "flat"
    )
    out = graph.add("MatMul", f"{layer}.out", flat, graph.weight(f"{layer}.out.w", SIZE, SIZE, scale=0.6))
    return graph.add("Add", f"{layer}.x", x, graph.add("Tanh", f"{layer}.bent", out))


def graph(path: Path, seed: int = 11, leak: float = 0.0, positions: int = POSITIONS) -> None:
    """Write the model; `leak` makes each row depend on the others, which is a defect."""
    nodes = _Nodes(seed)
    nodes.constant("heads", np.array([0, 0, HEADS, WIDTH], np.int64))
    nodes.constant("flat", np.array([0, 0, SIZE], np.int64))
    _mask(nodes)
    embedded = nodes.add("Gather", "embedded", nodes.weight("tokens", VOCABULARY, SIZE), "input_ids")
    x = nodes.add("Add", "x", embedded, nodes.add("Gather", "placed", nodes.weight("places", positions, SIZE, scale=0.5), "position_ids"))  # fmt: skip  # noqa: E501
    for layer in range(LAYERS):
        x = _layer(nodes, layer, x)
    if leak:
        row_max = nodes.add("ReduceMax", "row_max", x, nodes.constant("axis", np.array([0], np.int64)), keepdims=1)
        x = nodes.add("Add", "leaked", x, nodes.add("Mul", "share", row_max, nodes.constant("leak", np.array(leak, np.float32))))  # fmt: skip  # noqa: E501
    nodes.add("MatMul", "logits", x, nodes.weight("head", SIZE, VOCABULARY))
    whole = [("input_ids", ["batch", "sequence"]), ("attention_mask", ["batch", "total"]), ("position_ids", ["batch", "sequence"])]  # fmt: skip  # noqa: E501
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in whole]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY])]
    for name in CACHES:
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", HEADS, "past", WIDTH]))
        made = name.replace("past", "present")
        outputs.append(helper.make_tensor_value_info(made, TensorProto.FLOAT, ["batch", HEADS, "total", WIDTH]))
    model = helper.make_graph(nodes.nodes, "tiny", inputs, outputs, nodes.weights)
    onnx.save(helper.make_model(model, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def signature(
    *, template: str = TEMPLATE, end: tuple[int, ...] = (END,), positions: int = POSITIONS, **limits: Any
) -> Signature:
    texts = [("input_ids", "sequence"), ("attention_mask", "total"), ("position_ids", "sequence")]
    caches = [TensorSpec(name=name, datatype="FP32", shape=("batch", HEADS, "past", WIDTH)) for name in CACHES]
    present = [
        TensorSpec(name=name.replace("past", "present"), datatype="FP32", shape=("batch", HEADS, "total", WIDTH))
        for name in CACHES
    ]
    logits = TensorSpec(name="logits", datatype="FP32", shape=("batch", "sequence", VOCABULARY))
    return Signature(
        inputs=(*(TensorSpec(name=name, datatype="INT64", shape=("batch", axis)) for name, axis in texts), *caches),
        outputs=(logits, *present),
        codec="",
        limits=Limits(**{"max_batch_size": 16, "max_body_bytes": 100_000, **limits}),
        runtime=Runtime(provider="cpu", threads=1, batch_rows=8),
        generation=Generation(
            caches=tuple(Cache(input=name, output=name.replace("past", "present")) for name in CACHES),
            template=template,
            begin=(BEGIN,),
            end=end,
            positions_limit=positions,
            attention_heads=HEADS,
        ),
    )


def graph_inputs(ids: Array, mask: Array, caches: dict[str, Array] | None = None) -> dict[str, Array]:
    """Return the graph's inputs for rows without padding."""
    past = mask.shape[1] - ids.shape[1]
    places = np.broadcast_to(np.arange(past, mask.shape[1]), ids.shape)
    none = {name: np.zeros((len(ids), heads, 0, width), np.float32) for name, (heads, width) in CACHES.items()}
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.ascontiguousarray(places), **(caches or none)}


def build(path: Path, *, seed: int = 11, leak: float = 0.0, **options: Any) -> Path:
    path.mkdir(parents=True)
    graph(path / "model.onnx", seed, leak, options.get("positions", POSITIONS))
    (path / "files").mkdir()
    tokenizer().save(str(path / "files/tokenizer.json"))
    (path / "card.md").write_text("# tiny\n")
    write_json(path / "signature.json", signature(**options).model_dump())
    ids = np.random.default_rng(3).integers(4, VOCABULARY, (2, 5))
    inputs = graph_inputs(ids, np.ones_like(ids))
    outputs = dict(zip((one.name for one in signature().outputs), session(path).run(None, inputs), strict=True))
    Golden(inputs, outputs, [], [], rtol=1e-3, atol=1e-4).write(path)
    seal(path)
    return path


@functools.cache
def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])


def greedy_tokens(path: Path, prompt: Sequence[int], most: int) -> list[int]:
    """Decode greedily without a cache or a batch: the reference for the engine."""
    ids = list(prompt)
    while len(ids) < len(prompt) + most:
        row = np.array([ids], np.int64)
        logits = session(path).run(["logits"], graph_inputs(row, np.ones_like(row)))[0]
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]
