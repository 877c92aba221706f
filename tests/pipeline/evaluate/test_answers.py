"""Each field of an answer, honest or a lie, for a classifier, a regressor with quantiles and a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax  # type: ignore[import-untyped]
from torch import Tensor

from pipeline.evaluate.answers import Field, each_label_first, judge, read_outputs

CLASSES = ("cat", "dog", "eel", "fox")
SAMPLES = 40
Row = np.ndarray[Any, Any]
SCORES = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32)
FORECASTS = np.sort(np.random.default_rng(1).normal(20, 5, size=(SAMPLES, 5, 3)).astype(np.float32), axis=2)
TOKENS = np.random.default_rng(2).normal(size=(SAMPLES, 3, 50)).astype(np.float32)
WORDS = [f"w{i}" for i in range(50)]
VISIBLE = ["" if i in (0, 9) else f"w{i}" for i in range(50)]  # without special tokens


class Animals:
    inputs: tuple[str, ...] = ("length",)
    outputs: tuple[str, ...] = ("scores",)
    classes: tuple[str, ...] = CLASSES

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)


class Spam(Animals):
    classes = ("ham", "spam")


class Sales:
    inputs, outputs, quantiles = ("length",), ("sales",), (0.1, 0.5, 0.9)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, :, 1]

    def predicted_quantiles(self, outputs: Tensor) -> Tensor:
        return outputs


class Talk:
    inputs, outputs = ("length",), ("logits",)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=2)

    def language_model(self, model: Any) -> Any: ...

    def prompting(self) -> Any: ...


def field(task: Any, outputs: Row, answer: Callable[[Row], Any], name: str) -> Field:
    """Judge the field of this name in answers made of each row of the outputs."""
    inputs = {"length": np.arange(len(outputs)) % 7 + 1}
    returned = read_outputs(
        task, {task.outputs[0]: outputs}, inputs, (WORDS, VISIBLE) if isinstance(task, Talk) else ()
    )
    fields = {each.name: each for each in judge([answer(row) for row in outputs], returned)}
    return fields[name]


def p(row: Row) -> Row:
    probabilities: Row = softmax(row.astype(np.float64))
    return probabilities


def top(row: Row, place: int = 0) -> int:
    return int(np.argsort(-row)[place])


@pytest.mark.parametrize(
    ("name", "answer", "meaning"),
    [
        ("", lambda row: CLASSES[top(row)], "the predicted label"),
        ("class", lambda row: {"class": top(row)}, "the predicted label"),
        ("class", lambda row: {"class": CLASSES[top(row)] if p(row).max() > 0.3 else "unsure"}, "the predicted label"),
        ("next", lambda row: {"class": top(row), "next": CLASSES[top(row, 1)]}, "the label in place 2"),
        ("best", lambda row: {"best": [CLASSES[top(row, i)] for i in range(3)]}, "the likeliest labels in order"),
        ("best[].p", lambda row: {"best": [{"p": p(row)[top(row, i)]} for i in range(2)]}, "the largest probabilities"),
        ("probability", lambda row: {"probability": round(p(row).max(), 2)}, "its probability"),
        ("", lambda row: float(top(row)), "the predicted label"),
        ("", lambda row: [int(i == top(row)) for i in range(4)], "1 for the predicted label"),
        ("p", lambda row: {"class": top(row), "p": round(p(row).max(), 1)}, "its probability"),
        ("odds", lambda row: {"class": top(row), "odds": p(row).max() / (1 - p(row).max())}, "rises with its prob"),
        ("confidence", lambda row: {"confidence": 100 * p(row).max()}, "rises with its probability"),
        ("all", lambda row: {"all": dict(zip(CLASSES, p(row).tolist(), strict=True))}, "the probability of each label"),
        ("a.logits", lambda row: {"a": {"logits": row.tolist()}}, "output `scores`"),
        ("dog", lambda row: {"dog": float(p(row)[1])}, "the probability of `dog`"),
        ("unit", lambda row: {"class": top(row), "unit": "cm"}, "the same in every answer"),
        ("animal", lambda row: {"animal": CLASSES[top(row)].upper()}, ""),
        ("margin", lambda row: {"class": top(row), "margin": float(np.ptp(np.sort(row)[-2:]))}, ""),
        ("letters", lambda row: {"class": top(row), "letters": len(CLASSES[top(row)]) - 1}, ""),
    ],
)
def test_an_honest_field_of_a_classifier(name: str, answer: Callable[[Row], Any], meaning: str) -> None:
    found = field(Animals(), SCORES, answer, name)
    assert not found.fault
    assert found.meaning.startswith(meaning) and bool(found.meaning) == bool(meaning)


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("", lambda row: CLASSES[(top(row) + 1) % 4], "another label"),
        ("class", lambda row: {"class": 3 - top(row), "p": p(row).tolist()}, "another label"),
        ("class", lambda row: {"class": top(row, 3)}, "no field is the predicted label"),
        ("class", lambda row: {"class": min(top(row), 2)}, "another label"),
        ("p", lambda row: {"class": top(row), "p": p(row)[::-1].tolist()}, "another label"),
        ("p", lambda row: {"p": dict(zip(CLASSES[::-1], p(row).tolist(), strict=True))}, "another label"),
        ("probabilities", lambda row: {"probabilities": (1 - p(row)).tolist()}, "falls where"),
        ("probability", lambda row: {"class": top(row), "probability": 1 - p(row).max()}, "falls where"),
        ("probability", lambda row: {"class": top(row), "probability": p(row)[top(row, 1)]}, "in place 2"),
        ("probability", lambda row: {"class": top(row), "probability": p(row)[0]}, "the probability of `cat`"),
        ("scores", lambda row: {"class": top(row), "scores": row[::-1].tolist()}, "in another order"),
    ],
)
def test_a_lie_of_a_classifier(name: str, answer: Callable[[Row], Any], fault: str) -> None:
    assert fault in field(Animals(), SCORES, answer, name).fault


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda row: {"spam": bool(row[1] > row[0])}, ""),
        (lambda row: {"class": int(row[1] > row[0]), "spam": int(row[1] < row[0])}, ""),
        (lambda row: {"spam": int(row[1] < row[0])}, "no field is the predicted label"),
    ],
)
def test_yes_or_no(answer: Callable[[Row], Any], fault: str) -> None:
    found = field(Spam(), SCORES[:, :2], answer, "spam").fault
    assert fault in found and bool(fault) == bool(found)


@pytest.mark.parametrize(
    ("name", "answer", "meaning", "fault"),
    [
        ("days", lambda row: {"days": row[:, 1].round(1).tolist()}, "predicted()", ""),
        ("days", lambda row: {"days": (1000 * row[:3, 1]).tolist()}, "rises with predicted()", ""),
        ("low", lambda row: {"low": row[:, 0].tolist()}, "quantile 0.1", ""),
        ("days", lambda row: {"days": (-row[:, 1]).tolist()}, "", "falls where predicted() rises"),
        (
            "days",
            lambda row: {"days": row[::-1, 1].round(2).tolist()},
            "",
            "the numbers of predicted() in another order",
        ),
        ("days", lambda row: {"days": np.roll(row[:, 1], 1).tolist()}, "", "in another order"),
        ("low", lambda row: {"low": row[:, 2].tolist()}, "quantile 0.9", "`low` is quantile 0.9"),
        ("width", lambda row: {"width": (row[:, 2] - row[:, 0]).tolist()}, "", ""),
    ],
)
def test_a_field_of_a_forecast(name: str, answer: Callable[[Row], Any], meaning: str, fault: str) -> None:
    found = field(Sales(), FORECASTS, answer, name)
    assert found.meaning == meaning
    assert fault in found.fault and bool(fault) == bool(found.fault)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda row: {"next": WORDS[top(row[-1])]}, ""),
        (lambda row: {"next": VISIBLE[top(row[-1])]}, ""),
        (lambda row: {"next": WORDS[top(-row[-1])]}, "another label"),
        (lambda row: {"next": {"w7": "w8", "w8": "w7"}.get(word := WORDS[top(row[-1])], word)}, "another label"),
    ],
)
def test_a_word_of_a_language_model(answer: Callable[[Row], Any], fault: str) -> None:
    found = field(Talk(), each_label_first({"logits": TOKENS}, np.arange(50), 50)["logits"], answer, "next")
    assert fault in found.fault and bool(fault) == bool(found.fault)
    assert bool(found.meaning) == (not fault)


def test_each_label_comes_first_once_and_probabilities_stay_probabilities() -> None:
    made = each_label_first({"p": softmax(SCORES, axis=1), "boxes": SCORES[:, :3]}, np.arange(4), 4)
    assert made["p"].argmax(axis=1).tolist() == [0, 1, 2, 3]
    assert np.allclose(made["p"].sum(axis=1), 1)
    assert (made["boxes"] == SCORES[0, :3]).all()

    class Boxes(Animals):
        outputs = ("p", "boxes")

        def predicted(self, outputs: Any) -> Tensor:
            return super().predicted(outputs["p"])

    task: Any = Boxes()
    assert read_outputs(task, made, {}).labels[0].order[:, 0].tolist() == [0, 1, 2, 3]
