"""A small picture classifier whose codec is damaged in one way at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contract.codec import Codec
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.task import Task
from pipeline.evaluate.codec_check import CodecCheck, check_codec
from pipeline.evaluate.gate import Measurements, decide
from pipeline.system.errors import InvalidPayload

CLASSES = ("left", "right", "top")
PIXELS = np.random.default_rng(0).integers(0, 17, size=(90, 6, 6)).astype(np.float32)
WEIGHTS = torch.from_numpy(np.random.default_rng(1).normal(size=(36, 3)).astype(np.float32))
Array = np.ndarray[Any, Any]


def _predict(batch: Any) -> Tensor:
    scores: Tensor = batch["image"].reshape(-1, 36) @ WEIGHTS
    return scores


class Pictures:
    inputs = ("image",)
    outputs = ("scores",)
    classes = CLASSES

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: Any) -> Tensor:
        return batch["label"]  # type: ignore[no-any-return]


class WithExample(Pictures):
    def example(self) -> list[Any]:
        return PIXELS[:4].tolist()  # type: ignore[no-any-return]


class WithInstances(Pictures):
    def instances(self, batch: Any) -> list[Any]:
        return (batch["image"] * 16).tolist()  # type: ignore[no-any-return]

    def answer(self, prediction: Any) -> Any:
        return prediction["label"]


class PictureCodec:
    def decode(self, instances: Any) -> dict[str, Array]:
        return {"image": np.asarray(instances, np.float32) / 16}

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        return [
            {"label": CLASSES[int(row.argmax())], "probabilities": (row / row.sum()).tolist()}
            for row in np.exp(outputs["scores"] - outputs["scores"].max(axis=1, keepdims=True))
        ]


class ReversedLabels(PictureCodec):
    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        return [{"label": CLASSES[::-1][int(row.argmax())]} for row in outputs["scores"]]


class ScaledTwice(PictureCodec):
    def decode(self, instances: Any) -> dict[str, Array]:
        return {"image": np.asarray(instances, np.float32) / 16 / 16}


class SwappedAxes(PictureCodec):
    def decode(self, instances: Any) -> dict[str, Array]:
        return {"image": np.asarray(instances, np.float32).transpose(0, 2, 1) / 16}


class UpsideDown(PictureCodec):
    def decode(self, instances: Any) -> dict[str, Array]:
        return {"image": np.asarray(instances, np.float32)[:, ::-1] / 16}


class WrongAxis(PictureCodec):
    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        scores = np.exp(outputs["scores"] - outputs["scores"].max())
        rows = scores / scores.sum(axis=0)
        return [{"label": CLASSES[int(row.argmax())], "probabilities": row.tolist()} for row in rows]


class NormalizedPerRequest(PictureCodec):
    def decode(self, instances: Any) -> dict[str, Array]:
        pixels = np.asarray(instances, np.float32)
        return {"image": (pixels - pixels.min()) / np.ptp(pixels) * (1 + pixels.mean() / 1000)}


class Refuses(PictureCodec):
    def decode(self, instances: Any) -> dict[str, Array]:
        raise InvalidPayload("instances: each must be a text")


def _check(task: Any, codec: Codec) -> CodecCheck:
    samples = Samples("test", {"image": torch.from_numpy(PIXELS / 16), "label": torch.zeros(90, dtype=torch.int64)})
    return check_codec(task, codec, "codec.py:Codec", samples, _predict)


@pytest.mark.parametrize("task", [WithExample(), WithInstances()], ids=lambda task: type(task).__name__)
def test_a_sound_codec_passes(task: Task) -> None:
    found = _check(task, PictureCodec())
    assert found.faults == found.notes == ()
    assert found.rule().passed
    assert "`label` is the predicted label; `probabilities` is the probability of each label" in found.rule().detail


@pytest.mark.parametrize("task", [WithExample(), WithInstances()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(
    ("codec", "fault"),
    [
        (ReversedLabels, "otherwise than predicted()|`label` is another label than the model's"),
        (ScaledTwice, "other units|other values of raw test instances than column `image`"),
        (SwappedAxes, "axes swapped|other values of raw test instances than column `image`"),
        (UpsideDown, "an axis reversed|other values of raw test instances than column `image`"),
        (WrongAxis, "another prediction alone than in company"),
        (NormalizedPerRequest, "other values of an instance alone than in company"),
        (Refuses, "refuses an instance of the task: instances: each must be a text"),
    ],
)
def test_a_damaged_codec_is_stopped(task: Task, codec: Callable[[], Codec], fault: str) -> None:
    rule = _check(task, codec()).rule()
    assert not rule.passed
    assert any(part in rule.detail for part in fault.split("|")), rule.detail


def test_examples_outside_the_test_set_are_noted() -> None:
    class HandWritten(Pictures):
        def example(self) -> list[Any]:
            return [np.eye(6).tolist()]

    found = _check(HandWritten(), PictureCodec())
    assert found.rule().passed
    assert found.notes == ("no instance of example() is a test sample; to have decode() checked: add instances(batch)",)


def test_a_task_without_raw_instances_is_noted() -> None:
    assert "add instances(batch) to the task" in _check(Pictures(), PictureCodec()).notes[0]


class Lengths:
    """Texts padded with 0; the model gives each position its id."""

    inputs, outputs = ("ids",), ("tags",)
    axes = {"ids": ("batch", "sequence")}  # noqa: RUF012
    longest = {"sequence": 4}  # noqa: RUF012

    def example(self) -> list[list[int]]:
        return [[5, 7], [5, 7, 8, 9], [3]]


class CutCodec:
    def decode(self, instances: Sequence[list[int]]) -> dict[str, Array]:
        width = max(map(len, instances))
        return {"ids": np.array([[*ids, *[0] * (width - len(ids))] for ids in instances], np.int64)}

    def encode(self, outputs: dict[str, Array], inputs: dict[str, Array]) -> list[Any]:
        return [row[ids > 0].tolist() for row, ids in zip(outputs["tags"], inputs["ids"], strict=True)]


class PaddedCodec(CutCodec):
    def encode(self, outputs: dict[str, Array], inputs: dict[str, Array]) -> list[Any]:
        return outputs["tags"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("codec", "is_sound"), [(CutCodec, True), (PaddedCodec, False)])
@pytest.mark.parametrize("reads_padding", [False, True])
def test_answers_for_padding_are_stopped_unless_the_model_reads_it(
    codec: Callable[[], Codec], is_sound: bool, reads_padding: bool
) -> None:
    ids = torch.tensor([[5, 7, 0, 0], [5, 7, 8, 9], [3, 0, 0, 0]])
    found = check_codec(
        Lengths(),  # type: ignore[arg-type]  # only what the check uses
        codec(),
        "codec.py:Codec",
        Samples("test", {"ids": ids}),
        lambda batch: batch["ids"].float() + 10.0 * reads_padding * batch["ids"].shape[1],
    )
    assert "decode() makes test samples of 3 of 3 instances of example()" in found.checked
    is_passed = is_sound or reads_padding
    assert found.rule().passed == is_passed
    assert is_passed or "another prediction alone than beside a longer one" in found.rule().detail


class Numbers:
    """Two numbers in, their sum out, and no method with which the codec could be compared."""

    inputs, outputs = ("pair",), ("sum",)


class NumbersWithAnswer(Numbers):
    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def answer(self, prediction: Any) -> Any:
        return prediction["sum"]


class NumbersWithBoth(NumbersWithAnswer):
    def instances(self, batch: Any) -> list[Any]:
        return [row if row[0] > 0 else None for row in batch["pair"].tolist()]


class NumberCodec:
    factor = 1.0

    def decode(self, instances: Any) -> dict[str, Array]:
        return {"pair": np.asarray(instances, np.float32)}

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        return [{"sum": round(self.factor * float(value), 2)} for value in outputs["sum"]]


class WithText(Numbers):
    def text(self, batch: Any) -> list[str]:
        return [json.dumps(row) for row in batch["pair"].tolist()]


class TextCodec(NumberCodec):
    def decode(self, instances: Any) -> dict[str, Array]:
        return super().decode([json.loads(text) for text in instances])


class NoteCodec(NumberCodec):
    """Its answers have a number that the model does not return."""

    def encode(self, outputs: dict[str, Array]) -> list[Any]:
        return [
            {**answer, "note": float(np.sin(99 * value)), "unit": "m"}
            for answer, value in zip(super().encode(outputs), outputs["sum"], strict=True)
        ]


def _check_numbers(task: Any, codec: Codec | None = None) -> CodecCheck:
    pairs = torch.from_numpy(np.random.default_rng(3).normal(size=(50, 2)).astype(np.float32))
    samples = Samples("test", {"pair": pairs})
    return check_codec(task, codec or NumberCodec(), "codec.py:C", samples, lambda batch: batch["pair"].sum(dim=1))


@pytest.mark.parametrize(
    ("task", "codec", "words", "is_proven"),
    [
        (Numbers(), NumberCodec(), "encode() on 50 samples; unproven: decode()", False),
        (Numbers(), NoteCodec(), "encode() on 50 samples; unproven: decode(), `note`", False),
        (WithText(), TextCodec(), "decode() on 50 samples and encode() on 50 samples", True),
        (NumbersWithBoth(), NumberCodec(), "decode() on 28 samples and encode() on 50 samples", True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_first_line_of_a_verdict_states_what_was_compared(
    task: Any, codec: Codec, words: str, is_proven: bool
) -> None:
    found = _check_numbers(task, codec)
    measured = Measurements(50, {"accuracy": 0.9}, None, None, codec=found)
    verdict = decide(Evaluate(), measured)
    assert verdict.summary.endswith(f"; codec compared with the test data: {words}")
    assert verdict.verdict == "no-baseline"
    strict = decide(Evaluate(answers="proven"), measured)
    assert strict.verdict == ("no-baseline" if is_proven else "fail")


def test_numbers_are_compared_through_answer() -> None:
    codec = NumberCodec()
    assert _check_numbers(NumbersWithBoth(), codec).rule().passed
    codec.factor = 2.0
    assert "otherwise than predicted()" in _check_numbers(NumbersWithBoth(), codec).rule().detail


def test_a_language_model_without_raw_texts_is_not_compared() -> None:
    class Talks(Numbers):
        def language_model(self, model: Any) -> Any: ...

        def prompting(self) -> Any: ...

    assert _check_numbers(Talks(), NoteCodec()).unproven == "decode(), `note`"


def test_an_instance_for_every_sample_is_needed() -> None:
    class Fewer(NumbersWithBoth):
        def instances(self, batch: Any) -> list[Any]:
            return batch["pair"].tolist()[:3]  # type: ignore[no-any-return]

    assert _check_numbers(Fewer()).faults == ("instances(batch) returns 3 instances for 50 samples",)


class CutShort(CutCodec):
    def decode(self, instances: Sequence[list[int]]) -> dict[str, Array]:
        return {"ids": super().decode(instances)["ids"][:, :2]}


@pytest.mark.parametrize(("codec", "is_sound"), [(CutCodec, True), (CutShort, False)])
def test_data_may_have_more_padding_than_a_request(codec: Callable[[], Codec], is_sound: bool) -> None:
    class Rows(Lengths):
        def instances(self, batch: Any) -> list[list[int]]:
            return [[each for each in row if each] for row in batch["ids"].tolist()]

    ids = torch.tensor([[5, 7, 0, 0, 0, 0], [5, 7, 8, 9, 0, 0], [3, 0, 0, 0, 0, 0]])
    task: Any = Rows()
    found = check_codec(task, codec(), "codec.py:C", Samples("test", {"ids": ids}), lambda batch: batch["ids"].float())
    assert (found.faults == ()) == is_sound


@pytest.mark.parametrize("task", [WithExample(), WithInstances()], ids=lambda task: type(task).__name__)
def test_names_of_classes_that_never_occur_are_compared(task: Task) -> None:
    class RareIsWrong(PictureCodec):
        def encode(self, outputs: dict[str, Array]) -> list[Any]:
            names = {"top": "left"}
            return [{**each, "label": names.get(each["label"], each["label"])} for each in super().encode(outputs)]

    def never_top(batch: Any) -> Tensor:
        return _predict(batch) - torch.tensor([0, 0, 99])

    samples = Samples("test", {"image": torch.from_numpy(PIXELS / 16), "label": torch.zeros(90, dtype=torch.int64)})
    rule = check_codec(task, RareIsWrong(), "codec.py:Codec", samples, never_top).rule()
    assert "`label` is another label than the model's" in rule.detail


def test_a_constant_answer_is_stopped() -> None:
    class Constant(PictureCodec):
        def encode(self, outputs: dict[str, Array]) -> list[Any]:
            return [{"label": "left", "version": 3} for _ in outputs["scores"]]

    assert "it is the same for every label" in _check(WithExample(), Constant()).rule().detail


def test_a_codec_that_no_made_outputs_fit_is_noted() -> None:
    class Boxed(Pictures):
        outputs = ("scores", "box")  # type: ignore[assignment]

        def predicted(self, outputs: Any) -> Tensor:
            return super().predicted(outputs["scores"])

    class BoxedCodec(PictureCodec):
        def encode(self, outputs: dict[str, Array]) -> list[Any]:
            if len(outputs["box"]) > 1 and not np.ptp(outputs["box"]):
                raise ValueError("every box is the same")
            return super().encode(outputs)

    def predict(batch: Any) -> dict[str, Tensor]:
        return {"scores": _predict(batch), "box": batch["image"].sum(dim=(1, 2))}

    samples = Samples("test", {"image": torch.from_numpy(PIXELS / 16), "label": torch.zeros(90, dtype=torch.int64)})
    found = check_codec(Boxed(), BoxedCodec(), "codec.py:Codec", samples, predict)  # type: ignore[arg-type]
    assert found.faults == ()
    assert any("no label was made the likeliest: encode() then raises ValueError" in note for note in found.notes)
