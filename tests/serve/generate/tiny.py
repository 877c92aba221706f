"""A language model made by hand: a graph with a cache, a tokenizer, and the plainest way to write a text with them."""

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

from pipeline.contract.files import write_json
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Cache, Generation, Limits, Runtime, Signature, TensorSpec
from tests.serve.sealed import seal

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
    """A graph that is written down line by line."""

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

    def do(self, op: str, made: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [made], **attributes))
        return made


def _mask(graph: _Nodes) -> str:
    """0 where a query may look, far below elsewhere: at itself and before, and at no padding."""
    zero, one = graph.constant("zero", np.array(0, np.int64)), graph.constant("one", np.array(1, np.int64))
    total = graph.do("Gather", "total", graph.do("Shape", "shape.mask", "attention_mask"), one)
    sequence = graph.do("Gather", "sequence", graph.do("Shape", "shape.ids", "input_ids"), one)
    keys = graph.do("Range", "keys", zero, total, one)
    queries = graph.do("Range", "queries", graph.do("Sub", "past", total, sequence), total, one)
    column = graph.do("Unsqueeze", "column", queries, graph.constant("last", np.array([1], np.int64)))
    causal = graph.do("LessOrEqual", "causal", keys, column)
    there = graph.do("Cast", "there", "attention_mask", to=TensorProto.BOOL)
    rows = graph.do("Unsqueeze", "rows", there, graph.constant("middle", np.array([1, 2], np.int64)))
    allowed = graph.do("And", "allowed", causal, rows)
    values = [graph.constant(name, np.array(value, np.float32)) for name, value in (("yes", 0.0), ("no", -1e9))]
    return graph.do("Where", "bias", allowed, *values)


def _layer(graph: _Nodes, layer: int, x: str) -> str:
    def heads(what: str) -> str:
        made = graph.do("MatMul", f"{layer}.{what}.flat", x, graph.weight(f"{layer}.{what}.w", SIZE, SIZE, scale=0.3))
        made = graph.do("Reshape", f"{layer}.{what}.cut", made, "heads")
        return graph.do("Transpose", f"{layer}.{what}", made, perm=[0, 2, 1, 3])

    key = graph.do("Concat", f"present.{layer}.key", f"past.{layer}.key", heads("key"), axis=2)
    value = graph.do("Concat", f"present.{layer}.value", f"past.{layer}.value", heads("value"), axis=2)
    turned = graph.do("Transpose", f"{layer}.turned", key, perm=[0, 1, 3, 2])
    scores = graph.do("Add", f"{layer}.scores", graph.do("MatMul", f"{layer}.raw", heads("query"), turned), "bias")
    seen = graph.do("MatMul", f"{layer}.seen", graph.do("Softmax", f"{layer}.shares", scores, axis=-1), value)
    flat = graph.do("Reshape", f"{layer}.flat", graph.do("Transpose", f"{layer}.back", seen, perm=[0, 2, 1, 3]), "flat")
    out = graph.do("MatMul", f"{layer}.out", flat, graph.weight(f"{layer}.out.w", SIZE, SIZE, scale=0.6))
    return graph.do("Add", f"{layer}.x", x, graph.do("Tanh", f"{layer}.bent", out))


def graph(path: Path, seed: int = 11, leak: float = 0.0, positions: int = POSITIONS) -> None:
    """`leak`: how much a row hears of the others, which no honest model does."""
    nodes = _Nodes(seed)
    nodes.constant("heads", np.array([0, 0, HEADS, WIDTH], np.int64))
    nodes.constant("flat", np.array([0, 0, SIZE], np.int64))
    _mask(nodes)
    embedded = nodes.do("Gather", "embedded", nodes.weight("tokens", VOCABULARY, SIZE), "input_ids")
    x = nodes.do("Add", "x", embedded, nodes.do("Gather", "placed", nodes.weight("places", positions, SIZE, scale=0.5), "position_ids"))  # fmt: skip  # noqa: E501
    for layer in range(LAYERS):
        x = _layer(nodes, layer, x)
    if leak:
        everybody = nodes.do("ReduceMax", "everybody", x, nodes.constant("axis", np.array([0], np.int64)), keepdims=1)
        x = nodes.do("Add", "leaked", x, nodes.do("Mul", "share", everybody, nodes.constant("leak", np.array(leak, np.float32))))  # fmt: skip  # noqa: E501
    nodes.do("MatMul", "logits", x, nodes.weight("words", SIZE, VOCABULARY))
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
        ),
    )


def fed(ids: Array, mask: Array, caches: dict[str, Array] | None = None) -> dict[str, Array]:
    """What the graph takes for rows that are not padded."""
    past = mask.shape[1] - ids.shape[1]
    places = np.broadcast_to(np.arange(past, mask.shape[1]), ids.shape)
    none = {name: np.zeros((len(ids), heads, 0, width), np.float32) for name, (heads, width) in CACHES.items()}
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.ascontiguousarray(places), **(caches or none)}


def build(path: Path, *, seed: int = 11, leak: float = 0.0, **told: Any) -> Path:
    path.mkdir(parents=True)
    graph(path / "model.onnx", seed, leak, told.get("positions", POSITIONS))
    (path / "files").mkdir()
    tokenizer().save(str(path / "files/tokenizer.json"))
    (path / "card.md").write_text("# tiny\n")
    write_json(path / "signature.json", signature(**told).model_dump())
    ids = np.random.default_rng(3).integers(4, VOCABULARY, (2, 5))
    inputs = fed(ids, np.ones_like(ids))
    outputs = dict(zip((one.name for one in signature().outputs), session(path).run(None, inputs), strict=True))
    Golden(inputs, outputs, [], [], rtol=1e-3, atol=1e-4).write(path)
    seal(path)
    return path


@functools.cache
def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])


def alone(path: Path, prompt: Sequence[int], most: int) -> list[int]:
    """The judge: greedy, one text, one token at a time, all of it computed anew for each."""
    ids = list(prompt)
    while len(ids) < len(prompt) + most:
        row = np.array([ids], np.int64)
        logits = session(path).run(["logits"], fed(row, np.ones_like(row)))[0]
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]
