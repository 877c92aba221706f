"""The damages: kind of model, damaged part, change, and the check that must stop each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pipeline.contract.bundle import Manifest, write_manifest
from pipeline.system.files import digest_file
from tests.damages.kinds import KINDS, MEANS, Splits

Place = Literal[
    "data",
    "labels",
    "weights",
    "metrics",
    "codec",
    "ONNX graph",
    "bundle",
    "served bundle",
    "run",
    "registry",
    "test set",
]
CLASSIFIER, SMALL, LARGE, RANKER, TAGGER, EMBEDDING, LANGUAGE = KINDS
NUMBERS = (CLASSIFIER, SMALL, LARGE, RANKER, EMBEDDING)  # kinds whose input is a row of numbers
OUTPUTS = {CLASSIFIER: "scores", SMALL: "y", LARGE: "y", RANKER: "score", TAGGER: "tags", EMBEDDING: "embedding"}


# Why some damages are not stopped.
SHORT_TEXTS = "one word is in three of eight shingles, so that the texts differ by more than near copies do"
HONEST = "prepare warns of it, as honest data may have such columns"


@dataclass(frozen=True)
class Damage:
    """`apply` changes the splits, the weights, the ONNX model or the files; for code it is the replacing methods."""

    kind: str
    name: str
    place: Place
    apply: Any
    stopped_by: str
    not_stopped: str = ""  # why nothing stops it today
    prepare: Mapping[str, Any] = field(default_factory=dict)  # settings

    @property
    def id(self) -> str:
        return f"{self.place}: {self.kind}: {self.name}"


def every_damage() -> list[Damage]:
    groups = (
        data(),
        labels(),
        weights(),
        metrics(),
        codec(),
        graph(),
        language_graph(),
        bundle(),
        records(),
        registry(),
    )
    return [damage for group in (*groups, test_sets()) for damage in group]


# Data: the columns of the inputs.


def data() -> Iterator[Damage]:
    for kind in (CLASSIFIER, LARGE, EMBEDDING, RANKER):
        yield Damage(kind, "training samples in the test set", "data", copied, "prepare.copies")
        yield Damage(
            kind, "training samples with a little noise in the test set", "data", nearly_copied, "prepare.near"
        )
    for kind in (TAGGER, LANGUAGE):
        yield Damage(kind, "training texts in the test set", "data", copied, "prepare.copies")
        yield Damage(kind, "other ids in the test set", "data", other_words, "prepare.drift")
    yield Damage(
        LANGUAGE, "training texts with another word in the test set", "data", other_word(4, 30), "prepare.near"
    )
    yield Damage(
        LANGUAGE,
        "training texts of ten words, one of them another",
        "data",
        other_word(4, 10),
        "prepare.near",
        SHORT_TEXTS,
    )
    for kind in (CLASSIFIER, SMALL):
        yield Damage(kind, "NaN in the training data", "data", missing("train"), "prepare.missing")
        yield Damage(kind, "infinity in the test data", "data", missing("test", np.inf), "prepare.missing")
    for kind in (CLASSIFIER, RANKER):
        yield Damage(kind, "a test column in thousandths", "data", scaled(1000), "prepare.range")
        yield Damage(kind, "a test column in thousands", "data", scaled(0.001), "prepare.drift")
    for kind, label in ((CLASSIFIER, "label"), (SMALL, "target"), (LARGE, "target")):
        yield Damage(kind, "a column that holds the label", "data", leaking(label), "prepare.leak")
    for kind in (CLASSIFIER, LARGE):
        late = {"time_column": "day"}
        yield Damage(kind, "test samples of earlier days", "data", earlier_days, "prepare.time_order", prepare=late)
        persons = {"group_column": "person"}
        yield Damage(kind, "test samples of known persons", "data", known_persons, "prepare.group", prepare=persons)
    warn = {"copies": "warn"}
    for name, noise in (("near copies", 0.005), ("copies", 0.0)):
        damage = judged_by_copies(noise)
        yield Damage(CLASSIFIER, f"a verdict by {name}", "data", damage, "near_duplicates", prepare=warn)
    few = {**warn, "drift": "warn"}
    yield Damage(CLASSIFIER, "each test sample eight times", "data", repeated, "near_duplicates", prepare=few)
    yield Damage(LARGE, "targets that are a sum of two columns", "data", summed, "prepare.formula", HONEST)
    yield Damage(
        SMALL, "a column that is constant", "data", constant("train", "validation", "test"), "prepare.constant", HONEST
    )
    yield Damage(LARGE, "two test columns swapped", "data", swapped_columns, "prepare.drift")
    yield Damage(EMBEDDING, "a test column shifted by one deviation", "data", shifted, "prepare.drift")
    yield Damage(SMALL, "a test column that is constant", "data", constant("test"), "prepare.drift")
    yield Damage(CLASSIFIER, "a test set sorted and cut by a column", "data", cut, "prepare.drift")
    yield Damage(CLASSIFIER, "test data of another type", "data", other_type, "prepare.schema")
    yield Damage(RANKER, "test data without a feature", "data", narrower, "prepare.schema")


def copied(splits: Splits) -> None:
    for name, column in splits["test"].items():
        if name != "query":
            column[:40] = splits["train"][name][:40]


def nearly_copied(splits: Splits) -> None:
    copied(splits)
    noise = np.random.default_rng(1).normal(size=(40, 12)) * 0.005
    splits["test"]["x"][:40] += noise.astype(np.float32)


def ordered_days(splits: Splits) -> None:
    days = 0
    for columns in splits.values():
        count = len(next(iter(columns.values())))
        columns["day"] = np.arange(days, days + count)
        days += count


def earlier_days(splits: Splits) -> None:
    ordered_days(splits)
    splits["test"]["day"][:50] = 10


def own_persons(splits: Splits) -> None:
    ordered_days(splits)
    for columns in splits.values():
        columns["person"] = columns.pop("day") // 10


def known_persons(splits: Splits) -> None:
    own_persons(splits)
    splits["test"]["person"][:50] = 3


def judged_by_copies(noise: float) -> Callable[[Splits], None]:
    """Leave few samples that the model has not seen, with labels that it gets wrong."""

    def apply(splits: Splits) -> None:
        rng = np.random.default_rng(2)
        splits["test"]["label"] = rng.permutation(splits["test"]["label"])
        for name, column in splits["test"].items():
            column[:360] = splits["train"][name][:360]
        splits["test"]["x"][:360] += (rng.normal(size=(360, 12)) * noise).astype(np.float32)

    return apply


def other_word(place: int, length: int) -> Callable[[Splits], None]:
    def apply(splits: Splits) -> None:
        for split, columns in KINDS[LANGUAGE].splits(samples=600).items():
            splits[split] = {name: column.reshape(-1, length) for name, column in columns.items()}
        copied(splits)
        splits["test"]["input_ids"][:40, place] = splits["test"]["input_ids"][:40, place] % 39 + 1

    return apply


def leaking(label: str) -> Callable[[Splits], None]:
    def apply(splits: Splits) -> None:
        for columns in splits.values():
            columns["x"][:, 3] = columns[label] / np.abs(splits["train"][label]).max()

    return apply


def repeated(splits: Splits) -> None:
    splits["test"] = {name: np.concatenate([column[:50]] * 8) for name, column in splits["test"].items()}


def summed(splits: Splits) -> None:
    for columns in splits.values():
        columns["target"] = columns["x"][:, 2] + columns["x"][:, 5]


def other_words(splits: Splits) -> None:
    ids = splits["test"]["input_ids"]
    ids[ids > 0] = (ids[ids > 0] + 7) % 29 + 1
    ids[ids % 3 == 0] = 5


def missing(split: str, value: float = np.nan) -> Callable[[Splits], None]:
    def apply(splits: Splits) -> None:
        splits[split]["x"][3, 4] = value

    return apply


def scaled(factor: float) -> Callable[[Splits], None]:
    def apply(splits: Splits) -> None:
        splits["test"]["x"][:, 2] *= np.float32(factor)

    return apply


def swapped_columns(splits: Splits) -> None:
    splits["test"]["x"][:, [0, 11]] = splits["test"]["x"][:, [11, 0]]


def shifted(splits: Splits) -> None:
    splits["test"]["x"][:, 7] += splits["test"]["x"][:, 7].std()


def constant(*names: str) -> Callable[[Splits], None]:
    def apply(splits: Splits) -> None:
        for name in names:
            splits[name]["x"][:, 7] = splits["test"]["x"][:, 7].mean()

    return apply


def cut(splits: Splits) -> None:
    order = np.argsort(splits["test"]["x"][:, 5])[:200]
    splits["test"] = {name: column[order] for name, column in splits["test"].items()}


def other_type(splits: Splits) -> None:
    splits["test"]["x"] = splits["test"]["x"].astype(np.float64)


def narrower(splits: Splits) -> None:
    splits["test"]["x"] = splits["test"]["x"][:, :11]


# Labels.


def labels() -> Iterator[Damage]:
    yield Damage(CLASSIFIER, "shuffled in training", "labels", shuffled("train", "label"), "require.accuracy")
    yield Damage(CLASSIFIER, "shuffled in the test set", "labels", shuffled("test", "label"), "require.accuracy")
    yield Damage(CLASSIFIER, "numbered from one in the test set", "labels", renumbered, "prepare.label_set")
    yield Damage(CLASSIFIER, "two classes swapped in the test set", "labels", swapped_labels, "prepare.label_set")
    yield Damage(CLASSIFIER, "a class missing in the test set", "labels", one_class_less, "prepare.labels")
    for kind in (SMALL, LARGE):
        yield Damage(kind, "shuffled in training", "labels", shuffled("train", "target"), "require.error")
        yield Damage(kind, "in another unit in the test set", "labels", other_unit, "prepare.labels")
        yield Damage(kind, "of the opposite sign in training", "labels", negative, "require.r2")
        yield Damage(kind, "one NaN in the test set", "labels", undefined, "prepare.missing")
    yield Damage(RANKER, "shuffled in training", "labels", shuffled("train", "relevance"), "require.ndcg")
    yield Damage(RANKER, "reversed in training", "labels", reversed_relevance, "prepare.labels")
    yield Damage(TAGGER, "shifted by one word in training", "labels", shifted_tags, "prepare.labels")
    yield Damage(TAGGER, "shuffled in training", "labels", shuffled("train", "tags"), "require.accuracy")
    yield Damage(TAGGER, "one tag everywhere in the test set", "labels", one_tag, "prepare.labels")
    yield Damage(EMBEDDING, "shuffled in training", "labels", shuffled("train", "partner"), "require.cosine")


def shuffled(split: str, name: str) -> Callable[[Splits], None]:
    def apply(splits: Splits) -> None:
        splits[split][name] = np.random.default_rng(0).permutation(splits[split][name])

    return apply


def renumbered(splits: Splits) -> None:
    splits["test"]["label"] = (splits["test"]["label"] + 1) % 3


def swapped_labels(splits: Splits) -> None:
    splits["test"]["label"] = np.array([1, 0, 2])[splits["test"]["label"]]


def one_class_less(splits: Splits) -> None:
    splits["test"]["label"][splits["test"]["label"] == 1] = 2


def other_unit(splits: Splits) -> None:
    splits["test"]["target"] *= np.float32(1000)


def negative(splits: Splits) -> None:
    splits["train"]["target"] *= -1


def undefined(splits: Splits) -> None:
    splits["test"]["target"][5] = np.nan


def reversed_relevance(splits: Splits) -> None:
    splits["train"]["relevance"] = 3 - splits["train"]["relevance"]


def shifted_tags(splits: Splits) -> None:
    splits["train"]["tags"] = np.roll(splits["train"]["tags"], 1, axis=1)


def one_tag(splits: Splits) -> None:
    splits["test"]["tags"][:] = 1


# Weights of the trained model.


def weights() -> Iterator[Damage]:
    heads = {CLASSIFIER: "0", SMALL: "linear", LARGE: "linear", RANKER: "0", EMBEDDING: "project", TAGGER: "head"}
    requires = {CLASSIFIER: "accuracy", SMALL: "r2", LARGE: "r2", RANKER: "ndcg", EMBEDDING: "cosine"}
    requires |= {TAGGER: "accuracy"}
    for kind, head in heads.items():
        rule = f"require.{requires[kind]}"
        check = {CLASSIFIER: "probabilities", TAGGER: rule}.get(kind, "finite")
        yield Damage(kind, "NaN in the head", "weights", weight(head, lambda w: w * np.nan), check)
        yield Damage(kind, "the opposite sign", "weights", weight(head, lambda w: -w), rule)
        yield Damage(kind, "never trained", "weights", weight(head, untrained), rule)
        yield Damage(kind, "one answer for everything", "weights", weight(head, lambda w: w * 0), rule)
    for kind in (CLASSIFIER, SMALL, LARGE, TAGGER):
        yield Damage(kind, "a little noise", "weights", weight(heads[kind], noisy), "non-inferior")
    for kind in (SMALL, LARGE):
        yield Damage(kind, "useless for a part of the data", "weights", worse_above, "slices")
    yield Damage(CLASSIFIER, "too certain", "weights", weight("0", lambda w: w * 8), "calibration.ece")
    yield Damage(
        CLASSIFIER, "columns in another order", "weights", weight("0", lambda w: w.flip(1)), "require.accuracy"
    )
    yield Damage(CLASSIFIER, "one class never answered", "weights", dead_class, "slices")
    yield Damage(LANGUAGE, "NaN in the head", "weights", weight("net.lm_head", lambda w: w * np.nan), "finite")
    yield Damage(LANGUAGE, "never trained", "weights", weight("net.lm_head", untrained), "require.log_likelihood")


def weight(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(state: dict[str, Any]) -> None:
        state[f"{name}.weight"] = change(state[f"{name}.weight"]).contiguous()

    return apply


def untrained(w: Any) -> Any:
    return w.new_tensor(np.random.default_rng(0).normal(size=tuple(w.shape)))


def noisy(w: Any) -> Any:
    return w + 0.25 * w.std() * untrained(w)


def worse_above(state: dict[str, Any]) -> None:
    """Change the slope of the first column around its mean, so that high and low values are answered wrongly."""
    state["linear.weight"][0, 0] += 1.5
    state["linear.bias"] -= 1.5 * MEANS[0]


def dead_class(state: dict[str, Any]) -> None:
    state["0.bias"][2] -= 50


# Metrics of the task and its baseline.


def metrics() -> Iterator[Damage]:
    nan = """
def metrics(self, outputs, batch):
    values = super().metrics(outputs, batch)
    return {name: value.index_fill(0, torch.tensor([3]), torch.nan) for name, value in values.items()}
"""
    mean = """
def metrics(self, outputs, batch):
    return {name: value.mean() for name, value in super().metrics(outputs, batch).items()}
"""
    short = """
def baseline(self):
    predict = super().baseline()
    return lambda batch: predict(batch)[:-1]
"""
    for kind in (CLASSIFIER, SMALL, TAGGER, EMBEDDING):
        yield Damage(kind, "NaN for one sample", "metrics", nan, "finite")
    for kind in (CLASSIFIER, LARGE):
        yield Damage(kind, "a mean per batch", "metrics", mean, "one value per sample")
        yield Damage(kind, "a baseline of fewer samples", "metrics", short, "baseline")
    failing = "def baseline(self):\n    raise OSError('no such table')\n"
    yield Damage(RANKER, "a baseline that fails", "metrics", failing, "baseline")
    reversed_direction = 'directions = {"error": "higher"}\n'
    yield Damage(SMALL, "a direction that is reversed", "metrics", reversed_direction, "require.error")
    improper = "def probabilities(self, outputs):\n    return outputs\n"
    yield Damage(CLASSIFIER, "scores for probabilities", "metrics", improper, "probabilities")
    unequal = "def probabilities(self, outputs):\n    return outputs.softmax(dim=0)\n"
    yield Damage(CLASSIFIER, "softmax over the batch", "metrics", unequal, "probabilities")


# The codec.


def codec() -> Iterator[Damage]:
    twice = "def decode(self, instances):\n    return {'x': super().decode(instances)['x'] / 4}\n"
    unscaled = "def decode(self, instances):\n    return {'x': np.asarray(instances, np.float32)}\n"
    backwards = "def decode(self, instances):\n    return {'x': super().decode(instances)['x'][:, ::-1]}\n"
    together = """
def decode(self, instances):
    x = np.asarray(instances, np.float32)
    return {"x": x / x.std(axis=0, keepdims=True)}
"""
    broken = "def decode(self, instances):\n    raise ValueError('no')\n"
    for kind in NUMBERS:
        yield Damage(kind, "scaled twice", "codec", twice, "codec")
        yield Damage(kind, "columns in another order", "codec", backwards, "codec")
    yield Damage(CLASSIFIER, "not scaled", "codec", unscaled, "codec")
    yield Damage(LARGE, "scaled by the request", "codec", together, "codec")
    yield Damage(RANKER, "an error for every instance", "codec", broken, "codec")
    names = """
def encode(self, outputs):
    return [{"label": CLASSES[::-1][int(row.argmax())]} for row in outputs["scores"]]
"""
    yield Damage(CLASSIFIER, "names of classes reversed", "codec", names, "codec")
    least = """
def encode(self, outputs):
    return [{"label": CLASSES[int(row.argmin())]} for row in outputs["scores"]]
"""
    yield Damage(CLASSIFIER, "the least likely class", "codec", least, "codec")
    for kind in (SMALL, LARGE):
        unit = "def encode(self, outputs):\n    return [{'value': float(value) * 1000} for value in outputs['y']]\n"
        yield Damage(kind, "answers in another unit", "codec", unit, "codec")
        digits = -7 if kind == LARGE else 4
        rounded = f"""
def encode(self, outputs):
    return [{{"value": round(float(value), {digits})}} for value in outputs["y"]]
"""
        yield Damage(kind, "answers rounded away", "codec", rounded, "codec")
    relative = """
def encode(self, outputs):
    values = outputs["score"] - outputs["score"].max()
    return [{"score": float(value)} for value in values]
"""
    yield Damage(RANKER, "scores relative to the request", "codec", relative, "codec")
    fewer = "def encode(self, outputs):\n    return super().encode(outputs)[:-1]\n"
    yield Damage(EMBEDDING, "one prediction too few", "codec", fewer, "codec")
    centred = """
def encode(self, outputs):
    centred = outputs["embedding"] - outputs["embedding"].mean(axis=0)
    return [row.tolist() for row in centred]
"""
    yield Damage(EMBEDDING, "centred over the request", "codec", centred, "codec")
    off = """
def decode(self, instances):
    arrays = super().decode(instances)
    return {**arrays, "input_ids": np.maximum(arrays["input_ids"] - 1, 0)}
"""
    yield Damage(TAGGER, "ids off by one", "codec", off, "codec")
    unmasked = """
def decode(self, instances):
    arrays = super().decode(instances)
    return {**arrays, "attention_mask": np.ones_like(arrays["attention_mask"])}
"""
    yield Damage(TAGGER, "padding that counts as words", "codec", unmasked, "codec")
    padded = """
def encode(self, outputs, inputs):
    return [[TAGS[tag] for tag in row] for row in outputs["tags"].argmax(axis=2)]
"""
    yield Damage(TAGGER, "answers for padding", "codec", padded, "codec")


# The ONNX graph.

Change = Callable[[onnx.ModelProto], None]


def graph() -> Iterator[Damage]:
    place: Place = "ONNX graph"
    for kind, name in OUTPUTS.items():
        yield Damage(kind, "zeroed head", place, after(name, ("Mul", 0.0)), "parity")
        yield Damage(kind, "flipped sign", place, after(name, ("Neg", None)), "parity")
        yield Damage(kind, "everything 1% larger", place, after(name, ("Mul", 1.01)), "parity")
        yield Damage(kind, "zero beyond batch size 300", place, at_batch_size(name, 301, "Less"), "batch sizes")
        yield Damage(kind, "weights rounded to fp16", place, initializer(2, halved), "parity")
        yield Damage(kind, "weights rounded to 8 bits", place, initializer(2, quantized), "parity")
        yield Damage(kind, "rounded to bfloat16", place, after(name, ("Cast", "BFLOAT16"), ("Cast", "FLOAT")), "parity")
        yield Damage(kind, "noise", place, after(name, ("RandomNormalLike", None)), "random operators")
        yield Damage(kind, "zero at batch size 13", place, at_batch_size(name, 13), "batch sizes")
        yield Damage(kind, "the mean of the batch removed", place, batch_mean(name), "parity")
    for kind in (SMALL, LARGE):
        half = after("y", ("Cast", "FLOAT16"), ("Cast", "FLOAT"))
        yield Damage(kind, "rounded to fp16", place, half, "parity")
    for kind in NUMBERS:
        yield Damage(kind, "columns of the input swapped", place, swapped_input, "parity")
        yield Damage(kind, "inputs cut off just beyond the test data", place, clipped_input(kind), "unseen inputs")
        yield Damage(kind, "dropped bias", place, initializer(1, lambda values: values * 0), "parity")
    for kind in (CLASSIFIER, TAGGER):
        yield Damage(kind, "two classes swapped", place, swapped_classes(OUTPUTS[kind]), "parity")
    yield Damage(CLASSIFIER, "the batch axis fixed", place, fixed_batch, "axes")
    yield Damage(CLASSIFIER, "a weight that is NaN", place, initializer(2, spoiled), "parity")
    yield Damage(
        TAGGER, "embeddings of words that do not occur", place, initializer(2, unseen_rows, 40), "initializers"
    )
    yield Damage(TAGGER, "words that do not occur taken for another", place, clipped_ids, "unseen ids")
    yield Damage(TAGGER, "the mask ignored", place, constant_input("attention_mask", "Max", 1), "parity")
    yield Damage(TAGGER, "tags shifted by a word", place, shifted_output, "parity")
    yield Damage(EMBEDDING, "a small constant added", place, after("embedding", ("Add", 0.003)), "parity")


def language_graph() -> Iterator[Damage]:
    place: Place = "ONNX graph"
    yield Damage(LANGUAGE, "zeroed head", place, after("logits", ("Mul", 0.0)), "parity")
    yield Damage(LANGUAGE, "flipped sign", place, after("logits", ("Neg", None)), "parity")
    yield Damage(LANGUAGE, "noise", place, after("logits", ("RandomNormalLike", None)), "random operators")
    yield Damage(LANGUAGE, "cached keys zeroed", place, after("present.0.key", ("Mul", 0.0)), "parity")
    yield Damage(LANGUAGE, "cached values 1% larger", place, after("present.0.value", ("Mul", 1.01)), "parity")
    yield Damage(LANGUAGE, "cached keys and values swapped", place, swapped_caches, "parity")
    yield Damage(LANGUAGE, "positions ignored", place, constant_input("position_ids", "Min", 0), "parity")
    yield Damage(LANGUAGE, "the mask ignored", place, constant_input("attention_mask", "Max", 1), "parity")
    yield Damage(LANGUAGE, "a word's embedding changed", place, initializer(2, one_row, 40), "parity")


def after(name: str, *operators: tuple[str, Any]) -> Change:
    """Apply operators to an output: each with a constant, a type or nothing."""

    def apply(model: onnx.ModelProto) -> None:
        values = renamed(model, name)
        for index, (operator, value) in enumerate(operators):
            result = name if index == len(operators) - 1 else f"{name}_damaged{index}"
            inputs, attributes = [values], {}
            if isinstance(value, float):
                inputs.append(constant_tensor(model, f"{name}_constant{index}", np.float32(value)))
            elif value is not None:
                attributes["to"] = onnx.TensorProto.DataType.Value(value)
            if operator == "RandomNormalLike":
                model.graph.node.append(helper.make_node(operator, [values], [f"{name}_noise"], name=f"{name}_random"))
                operator, inputs = "Add", [values, f"{name}_noise"]
            model.graph.node.append(helper.make_node(operator, inputs, [result], name=f"damage{index}", **attributes))
            values = result

    return apply


def renamed(model: onnx.ModelProto, output: str) -> str:
    """Give an output another name, so that nodes can be put before it."""
    before = f"{output}_before"
    for node in model.graph.node:
        node.output[:] = [before if name == output else name for name in node.output]
        node.input[:] = [before if name == output else name for name in node.input]
    return before


def constant_tensor(model: onnx.ModelProto, name: str, value: Any) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def add(model: onnx.ModelProto, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
    model.graph.node.append(helper.make_node(operator, inputs, [output], name=f"damage_{output}", **attributes))
    return output


def halved(values: Any) -> Any:
    return values.astype(np.float16)


def quantized(values: Any) -> Any:
    step = np.abs(values).max() / 127
    return np.round(values / step) * step


def at_batch_size(output: str, size: int, keeps: str = "") -> Change:
    """Return zeros at a batch size; `keeps` is an operator that compares it with the sizes that stay as they are."""

    def apply(model: onnx.ModelProto) -> None:
        values = renamed(model, output)
        rows = add(model, "Shape", [values], "rows", start=0, end=1)
        compared = [rows, constant_tensor(model, "size", np.array([size]))]
        keep = (
            add(model, keeps, compared, "keep")
            if keeps
            else add(model, "Not", [add(model, "Equal", compared, "is")], "keep")
        )
        add(model, "Mul", [values, add(model, "Cast", [keep], "factor", to=onnx.TensorProto.FLOAT)], output)

    return apply


def batch_mean(output: str) -> Change:
    def apply(model: onnx.ModelProto) -> None:
        values = renamed(model, output)
        axes = constant_tensor(model, "first_axis", np.array([0]))
        add(model, "Sub", [values, add(model, "ReduceMean", [values, axes], "batch_mean", keepdims=1)], output)

    return apply


def renamed_input(model: onnx.ModelProto) -> str:
    """Let all nodes read another tensor in place of `x`."""
    for node in model.graph.node:
        node.input[:] = ["x_damaged" if name == "x" else name for name in node.input]
    return "x_damaged"


def insert_first(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    model.graph.node.insert(0, node)


def swapped_input(model: onnx.ModelProto) -> None:
    order = np.arange(12)
    order[[0, 1]] = [1, 0]
    index, result = constant_tensor(model, "order", order), renamed_input(model)
    insert_first(model, helper.make_node("Gather", ["x", index], [result], name="damage_x", axis=1))


def clipped_input(kind: str) -> Change:
    """Cut where the test data ends: the training data has values beyond."""

    def apply(model: onnx.ModelProto) -> None:
        test = KINDS[kind].splits()["test"]["x"]
        low, high = (constant_tensor(model, name, value) for name, value in (("low", test.min()), ("high", test.max())))
        result = renamed_input(model)
        insert_first(model, helper.make_node("Clip", ["x", low, high], [result], name="damage_x"))

    return apply


def clipped_ids(model: onnx.ModelProto) -> None:
    last = constant_tensor(model, "last_id", np.int64(29))
    for node in model.graph.node:
        node.input[:] = ["clipped_ids" if name == "input_ids" else name for name in node.input]
    insert_first(model, helper.make_node("Clip", ["input_ids", "", last], ["clipped_ids"], name="damage_ids"))


def constant_input(name: str, operator: str, value: int) -> Change:
    """Let all nodes read an input of one value."""

    def apply(model: onnx.ModelProto) -> None:
        limit = constant_tensor(model, f"{name}_limit", np.int64(value))
        for node in model.graph.node:
            node.input[:] = [f"{name}_damaged" if each == name else each for each in node.input]
        insert_first(model, helper.make_node(operator, [name, limit], [f"{name}_damaged"], name="damage_input"))

    return apply


def swapped_caches(model: onnx.ModelProto) -> None:
    names = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}
    for node in model.graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.input[:] = [names.get(name, name) for name in node.input]


def swapped_classes(output: str) -> Change:
    def apply(model: onnx.ModelProto) -> None:
        values = renamed(model, output)
        order = [1, 0, *range(2, 4 if output == "tags" else 3)]
        index = constant_tensor(model, "order", np.array(order))
        add(model, "Gather", [values, index], output, axis=2 if output == "tags" else 1)

    return apply


def shifted_output(model: onnx.ModelProto) -> None:
    """Put the answer of the next word at each word."""
    values = renamed(model, "tags")
    start, end, axis = (
        constant_tensor(model, f"slice{index}", np.array([value])) for index, value in enumerate((0, 1, 1))
    )
    last = constant_tensor(model, "slice_last", np.array([np.iinfo(np.int64).max]))
    first = add(model, "Slice", [values, start, end, axis], "first_word")
    rest = add(model, "Slice", [values, end, last, axis], "other_words")
    add(model, "Concat", [rest, first], "tags", axis=1)


def initializer(axes: int, change: Callable[[Any], Any], rows: int = 0) -> Change:
    """Change the first weight with so many axes, and rows if they are given."""

    def apply(model: onnx.ModelProto) -> None:
        tensor = next(
            tensor
            for tensor in model.graph.initializer
            if len(tensor.dims) == axes and tensor.data_type == onnx.TensorProto.FLOAT and rows in (0, tensor.dims[0])
        )
        values = np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy()), np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    return apply


def spoiled(values: Any) -> Any:
    values.flat[0] = np.nan
    return values


def unseen_rows(values: Any) -> Any:
    values[30:] = 0
    return values


def one_row(values: Any) -> Any:
    values[7] += 0.5
    return values


def fixed_batch(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 3


# The bundle: `apply` gets a copy of its folder, and of the run around it.


def bundle() -> Iterator[Damage]:
    place: Place = "bundle"
    for name in ("model.onnx", "codec.py", "golden.npz", "golden.json", "signature.json", "card.md"):
        yield Damage(CLASSIFIER, f"{name} with a byte more", place, appended(f"{BUNDLE}/{name}"), "digest")
    for name in ("codec.py", "golden.npz", "card.md"):
        yield Damage(
            CLASSIFIER, f"{name} removed", place, lambda run, name=name: (run / BUNDLE / name).unlink(), "manifest"
        )
    yield Damage(CLASSIFIER, "a file added", place, lambda run: (run / BUNDLE / "x.py").write_text(""), "manifest")
    yield Damage(CLASSIFIER, "an empty folder added", place, lambda run: (run / BUNDLE / "x").mkdir(), "manifest")
    yield Damage(CLASSIFIER, "a link for a file", place, linked, "link")
    yield Damage(CLASSIFIER, "another verdict in the manifest", place, other_verdict, "provenance")
    yield Damage(CLASSIFIER, "another model under a new manifest", place, renewed(other_model), "provenance")
    for kind in (CLASSIFIER, SMALL, LARGE):
        forged = without_provenance(renewed(other_model))
        yield Damage(kind, "another model, forged throughout", place, forged, "golden requests")
        forged = without_provenance(renewed(other_codec))
        yield Damage(kind, "another codec, forged throughout", place, forged, "golden requests")


BUNDLE = "export/bundle"


def appended(name: str) -> Callable[[Path], None]:
    return lambda run: rewrite(run / name, (run / name).read_bytes() + b" ")


def rewrite(path: Path, body: bytes) -> None:
    path.unlink()
    path.write_bytes(body)


def linked(run: Path) -> None:
    card = run / BUNDLE / "card.md"
    card.rename(run / "card.md")
    card.symlink_to(run / "card.md")


def other_verdict(run: Path) -> None:
    manifest = run / BUNDLE / "manifest.json"
    rewrite(manifest, manifest.read_bytes().replace(b'"pass"', b'"no-baseline"'))


def other_model(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    initializer(2, lambda values: values * 1.05)(model)
    rewrite(folder / "model.onnx", model.SerializeToString())


def other_codec(folder: Path) -> None:
    text = next(folder.glob("codec.py")).read_text()
    assert "FACTOR = 4.0" in text
    rewrite(folder / "codec.py", text.replace("FACTOR = 4.0", "FACTOR = -4.0").encode())


def renewed(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a change of files that also updates the manifest."""

    def apply(run: Path) -> None:
        folder = run / BUNDLE
        change(folder)
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
        ancestors = manifest.ancestors.model_copy(update={"onnx": digest_file(folder / "model.onnx")})
        write_manifest(folder, manifest.name, manifest.verdict, ancestors)

    return apply


def without_provenance(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        change(run)
        (run / BUNDLE / "provenance.json").unlink()

    return apply


# The run and the registry: `apply` gets the run's folder, in which everything is complete.


def records() -> Iterator[Damage]:
    place: Place = "run"
    forged = without_provenance(renewed(other_model))
    yield Damage(CLASSIFIER, "a bundle forged throughout", place, forged, "record")
    yield Damage(SMALL, "a forged bundle to be served", "served bundle", forged, "exported bundle")
    yield Damage(CLASSIFIER, "another verdict", place, replaced("evaluate/verdict.json", '"pass"', '"fail"'), "record")
    yield Damage(CLASSIFIER, "another checkpoint", place, appended("train/model.safetensors"), "record")
    yield Damage(CLASSIFIER, "other facts of the data", place, appended("prepare/data.json"), "record")
    yield Damage(CLASSIFIER, "other settings", place, replaced("run.json", "0.75", "0.50"), "seal")
    yield Damage(CLASSIFIER, "a line of the ledger less", place, shorter_ledger, "record")


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        rewrite(run / name, text.replace(old, new, 1).encode())

    return apply


def shorter_ledger(run: Path) -> None:
    rewrite(run / "train" / "ledger.jsonl", b"")


def registry() -> Iterator[Damage]:
    place: Place = "registry"
    first, second = "../registry/000001.json", "../registry/000002.json"
    yield Damage(
        CLASSIFIER,
        "another bundle in the newest change",
        place,
        replaced(second, '"bundle": "', '"bundle": "0'),
        "champion",
    )
    yield Damage(CLASSIFIER, "another reason in an earlier change", place, replaced(first, "test", "best"), "history")
    yield Damage(CLASSIFIER, "an earlier change removed", place, lambda run: (run / first).unlink(), "history")
    yield Damage(CLASSIFIER, "a change cut short", place, lambda run: rewrite(run / second, b"{"), "history")
    yield Damage(CLASSIFIER, "the champion's model changed", place, appended(f"{BUNDLE}/model.onnx"), "champion")
    yield Damage(
        CLASSIFIER, "the champion forged throughout", place, without_provenance(renewed(other_model)), "champion"
    )
    yield Damage(
        CLASSIFIER, "the champion's bundle removed", place, lambda run: shutil.rmtree(run / BUNDLE), "champion"
    )


# The test set: `apply` changes the splits of a candidate that follows a champion.


def test_sets() -> Iterator[Damage]:
    place: Place = "test set"
    for kind in (CLASSIFIER, LARGE, EMBEDDING):
        yield Damage(kind, "hard samples removed", place, filtered, "test_set")
        yield Damage(kind, "one sample changed", place, one_changed, "test_set")
        yield Damage(kind, "a column in thousandths since the champion", place, other_units, "prepare.range")
    yield Damage(CLASSIFIER, "twelve samples", place, few, "non-inferior")


def filtered(splits: Splits) -> None:
    splits["test"] = {name: column[:-40] for name, column in splits["test"].items()}


def one_changed(splits: Splits) -> None:
    splits["test"]["x"][0, 0] += 0.01


def other_units(splits: Splits) -> None:
    for columns in splits.values():
        columns["x"][:, 2] *= 1000


def few(splits: Splits) -> None:
    splits["test"] = {name: column[:12] for name, column in splits["test"].items()}
