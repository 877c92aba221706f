"""The worst samples that are stored for the report."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.evaluate.__main__ import evaluate
from pipeline.evaluate.worst_samples import (
    MAX_SIDE_PIXELS,
    TYPICAL_SAMPLES,
    WORST_SAMPLES,
    as_image,
    png,
    typical_indices,
    worst_indices,
)
from pipeline.system.errors import DataError

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


WORDS = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"no": 0, "so": 1, "yes": 2}, "unk_token": "no"}}'


def worst_samples(project: Project, answers: str = "first", **more: Any) -> dict[str, Any]:
    run = project.run(answers, **{"evaluate": {"margin": 2.0}, **more})
    if (words := project.root / "words.json").is_file():
        (run.output("prepare") / "files").mkdir(parents=True)
        words.rename(run.output("prepare") / "files" / "tokenizer.json")
    evaluate(run, project.root)
    body: dict[str, Any] = json.loads((run.partial("evaluate") / "worst.json").read_text())
    return body


def add_input(project: Project, name: str, column: str) -> None:
    """Give the task one more input, which its model does not use."""
    project.replace('inputs = ("pair",)', f'inputs = ("pair", "{name}")')
    project.replace(
        "return nn.Linear(2, 2, bias=False)",
        "found = nn.Linear(2, 2, bias=False)\n        plain = found.forward\n"
        "        found.forward = lambda pair, other: plain(pair)\n        return found",
    )
    project.replace('return {"pair": pair,', f'return {{"{name}": {column}, "pair": pair,')


def decode_png(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return header and rows of a PNG; every checksum is checked."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, {}
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack(">I", data[place + 8 + size : place + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind], place = body, place + 12 + size
    return struct.unpack(">IIBBBBB", chunks[b"IHDR"]), zlib.decompress(chunks[b"IDAT"])


def test_lowest_values_come_first_and_nan_before_them() -> None:
    columns = {"accuracy": np.array([1.0, 0, 0, np.nan, 1]), "likelihood": np.array([-0.1, -2, -3, -0.2, -0.3])}
    assert worst_indices(columns, "accuracy", 4) == [3, 2, 1, 4]
    assert worst_indices({"accuracy": np.zeros(3)}, "accuracy", 9) == [0, 1, 2], "ties keep their order"


@pytest.mark.parametrize(("count", "first", "size"), [(100, 48, 4), (24, 12, 4), (14, 12, 2), (12, 0, 0), (1, 0, 0)])
def test_typical_samples_are_around_the_median_and_not_among_the_worst(count: int, first: int, size: int) -> None:
    columns = {"score": np.random.default_rng(0).permutation(count).astype(float)}
    typical = columns["score"][typical_indices(columns, "score")]
    assert typical.tolist() == list(range(first, first + size))
    assert size <= TYPICAL_SAMPLES


def test_worst_samples_show_label_and_both_predictions(with_baseline: Project) -> None:
    body = worst_samples(with_baseline)
    assert (body["metric"], len(body["samples"])) == ("accuracy", WORST_SAMPLES)
    first = body["samples"][0]
    assert (first["actual"], first["predicted"], first["baseline_predicted"]) == ("second", "first", "second")
    assert (first["value"], first["baseline"], first["metrics"]) == (0, 1, {"accuracy": 0})
    (shown,) = first["shown"]
    assert (shown["kind"], shown["name"], shown["shape"]) == ("values", "pair", [2])
    assert shown["values"][0] < shown["values"][1], "the second is greater"


def test_regression_samples_show_numbers(project: Project) -> None:
    project.replace('classes = ("first", "second")', "")
    first = worst_samples(project)["samples"][0]
    assert (first["actual"], first["predicted"], first["baseline"]) == ("1", "0", None)


def test_task_can_describe_samples_as_text(project: Project) -> None:
    project.add(
        "\n    def text(self, batch):\n        return [f'{a:.0f} or {b:.0f} ' * 200 for a, b in batch['pair']]\n"
    )
    (shown,) = worst_samples(project)["samples"][0]["shown"]
    assert (shown["kind"], shown["whole"], len(shown["text"])) == ("text", False, 600)
    assert " or " in shown["text"]


def test_text_must_return_one_string_per_sample(project: Project) -> None:
    project.add("\n    def text(self, batch):\n        return 'one'\n")
    with pytest.raises(DataError, match="one string for each of the 12 samples"):
        worst_samples(project)


def test_tokens_are_decoded_with_the_tokenizer_of_the_run(project: Project) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: the extra `deepseek` has it")
    add_input(project, "tokens", "np.tile([2, 1, 0], (50, 1))")
    project.replace('return {"tokens"', 'return {"attention_mask": np.tile([1, 1, 0], (50, 1)), "tokens"')
    (project.root / "words.json").write_text(WORDS)
    text, pair = worst_samples(project)["samples"][0]["shown"]
    assert (text["kind"], text["name"], text["text"]) == ("text", "tokens", "yes so")
    assert (pair["kind"], pair["name"]) == ("values", "pair")


def test_two_dimensional_input_is_stored_as_image(project: Project) -> None:
    add_input(project, "image", "np.broadcast_to(pair[:, :1, None, None], (50, 1, 8, 6)).copy()")
    _, image = worst_samples(project)["samples"][0]["shown"]
    assert (image["kind"], image["shape"]) == ("picture", [1, 8, 6])
    head, rows = decode_png(base64.b64decode(image["png"]))
    assert head == (6, 8, 8, 0, 0, 0, 0)
    assert len(rows) == 8 * (1 + 6)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (np.eye(8, dtype=np.float32), (8, 8, 1)),
        (np.full((3, 5, 7), 0.5), (5, 7, 3)),
        (np.full((5, 7, 3), 200, np.uint8), (5, 7, 3)),
        (np.random.default_rng(0).normal(size=(1, 200, 193)), (67, 65, 1)),
        (np.random.default_rng(0).random((3, 1000, 1000)), (91, 91, 3)),
        (np.full((4, 4), np.nan), (4, 4, 1)),
    ],
)
def test_images_of_every_layout_have_a_bounded_size(values: Any, size: tuple[int, ...]) -> None:
    found = as_image(values)
    assert found is not None
    assert (found.shape, found.dtype) == (size, np.uint8)
    assert max(found.shape) <= MAX_SIDE_PIXELS
    assert len(png(found)) < 30_000
    assert decode_png(png(found))[0][:2] == (size[1], size[0])


def test_greyscale_is_kept_and_other_values_are_rescaled() -> None:
    for values, expected in (
        (np.full((4, 4), 0.5), [128]),
        (np.full((4, 4), 200, np.uint8), [200]),
        (np.array([[-2.0, 6.0]] * 4).repeat(2, axis=1), [0, 255]),
    ):
        found = as_image(values)
        assert found is not None
        assert sorted(set(found.ravel().tolist())) == expected


@pytest.mark.parametrize("shape", [(13,), (2, 3), (5, 8, 8), (3, 2, 9), (1, 3, 8, 8)])
def test_arrays_of_other_shapes_are_not_images(shape: tuple[int, ...]) -> None:
    assert as_image(np.zeros(shape)) is None


SHOW = """
    def show(self, batch, outputs):
        from pipeline import Boxes, Embedding, TaggedText

        return [
            {
                "flower": {"sepal length": 5.1, "species": "iris", "missing": None, "wild": True},
                "words": TaggedText(("Ada", "wrote"), ("PERSON", "O")),
                "input": torch.full((8, 8), -1.0),
                "answer": torch.ones(1, 8, 8),
                "found": Boxes(torch.zeros(3, 20, 40), [[10, 0, 20, 10]], labels=["cat"], scores=[0.75]),
                "forecast": scores,
                "score": scores[0],
                "pair": Embedding(batch["pair"][row], f"{'first' if scores[0] > scores[1] else 'second'} {row}"),
            }
            for row, scores in enumerate(outputs)
        ]
"""


def test_show_decides_what_is_displayed_of_a_sample(project: Project) -> None:
    project.add(SHOW)
    shown = {part["name"]: part for part in worst_samples(project, "right")["samples"][0]["shown"]}
    kinds = [part["kind"] for part in shown.values()]
    assert kinds == ["row", "tags", "picture", "picture", "boxes", "curve", "number", "neighbors"]
    assert shown["flower"]["row"] == [["sepal length", 5.1], ["species", "iris"], ["missing", None], ["wild", "True"]]
    assert (shown["words"]["words"], shown["words"]["tags"]) == (["Ada", "wrote"], ["PERSON", ""])
    pixels = [set(decode_png(base64.b64decode(shown[name]["png"]))[1][1:9]) for name in ("input", "answer")]
    assert pixels == [{0}, {255}], "pictures of a sample have one scale"
    assert shown["found"]["boxes"] == [{"box": [0.25, 0, 0.5, 0.5], "label": "cat", "score": 0.75}]
    assert shown["score"]["value"] == shown["forecast"]["values"][0]
    assert len(shown["pair"]["neighbors"]) == 5
    scores = [near["score"] for near in shown["pair"]["neighbors"]]
    assert scores == sorted(scores, reverse=True)
    assert 0.9 < scores[0] <= 1.0


def test_embeddings_are_searched_among_those_of_another_name(project: Project) -> None:
    project.add(
        """
    def show(self, batch, outputs):
        from pipeline import Embedding

        numbers = batch["pair"].tolist()
        return [
            {"query": Embedding(row, "?", among="answer"), "answer": Embedding([row[1], row[0]], f"{row[0]:.4f}")}
            for row in numbers
        ]
"""
    )
    for sample in worst_samples(project)["samples"]:
        query, answer = sample["shown"]
        assert sum(near["own"] for near in query["neighbors"]) <= 1
        assert not any(near["own"] for near in answer["neighbors"])
        assert query["neighbors"][0]["text"] != answer["text"], "its own answer is the vector mirrored"


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ("[{}]", "one mapping of names to values for each of the 16 samples"),
        ("[{'tags': {1}} for _ in outputs]", "`tags` is a set; return a text"),
        ("[{'a': TaggedText('ab', [''])} for _ in outputs]", "needs one tag for each of its 2 words, not 1"),
        ("[{'a': Boxes(torch.zeros(9, 9), [[1, 2, 3]])} for _ in outputs]", "found shapes (9, 9) and (1, 3)"),
        ("[{'a': Boxes(torch.zeros(9, 9), [], ['cat'])} for _ in outputs]", "0 boxes and 1 labels"),
    ],
)
def test_mistakes_in_show_are_explained(project: Project, shown: str, problem: str) -> None:
    imports = "from pipeline import Boxes, TaggedText"
    project.add(f"\n    def show(self, batch, outputs):\n        {imports}\n        return {shown}\n")
    with pytest.raises(DataError, match=re.escape(problem)):
        worst_samples(project)


def test_columns_with_one_number_are_shown_by_name_without_the_label(project: Project) -> None:
    project.replace('return {"pair": pair,', 'return {"pair": pair, "age": np.arange(50) + 18, "income": pair[:, 0],')
    columns, pair = worst_samples(project)["samples"][0]["shown"]
    assert [name for name, _ in columns["row"]] == ["age", "income"]
    assert (columns["kind"], pair["kind"]) == ("row", "values")


def test_highest_values_of_a_lower_is_better_metric_are_the_worst(project: Project) -> None:
    project.replace('classes = ("first", "second")', 'directions = {"distance": "lower"}')
    project.replace(
        '{"accuracy": (outputs.argmax(dim=1) == batch["label"]).float()}', '{"distance": batch["pair"][:, 0]}'
    )
    body = worst_samples(project, evaluate={"margin": 2.0, "metric": "distance"})
    values = [sample["value"] for sample in body["samples"]]
    assert body["metric"] == "distance"
    assert values == sorted(values, reverse=True)
    assert values[0] > 1


def test_photographs_are_stored_as_differences_between_rows() -> None:
    slope = np.linspace(0, 255, 96)[:, None, None] + np.random.default_rng(0).integers(0, 3, (1, 96, 3)) * 20
    pixels = slope.clip(0, 255).astype(np.uint8)
    head, rows = decode_png(png(pixels))
    assert head[:2] == (96, 96)
    lines = np.frombuffer(rows, np.uint8).reshape(96, 1 + 96 * 3)
    assert set(lines[:, 0]) == {2}
    decoded = np.cumsum(lines[:, 1:], axis=0, dtype=np.uint8).reshape(96, 96, 3)
    np.testing.assert_array_equal(decoded, pixels)
