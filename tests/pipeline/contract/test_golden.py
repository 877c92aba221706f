"""Greedy generation over a graph of a few lines, whose answers are known by counting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.golden import Decoder, Golden, difference, golden_requests, greedy
from pipeline.contract.signature import Cache, Generation, TensorSpec

RTOL, ATOL = 1e-3, 1e-4


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        (1.0, 1.0005),
        (0.0, 0.00005),
        (3, 3.0),
        ("cat", "cat"),
        (None, None),
        (True, True),
        ([1.0, [2.0]], [1.0005, [2.0]]),
        ({"a": 1.0, "b": []}, {"b": [], "a": 1.0}),
        ([], []),
        (float("nan"), float("nan")),
        (float("nan"), None),
        (float("-inf"), None),
        (None, float("nan")),
        (float("inf"), float("inf")),
        ([{"a": float("nan")}], [{"a": None}]),
    ],
)
def test_answers_within_tolerance_agree(expected: Any, found: Any) -> None:
    assert difference(expected, found, RTOL, ATOL) is None


@pytest.mark.parametrize(
    ("expected", "found", "place"),
    [
        (1.0, 1.01, "answer"),
        (1.0, float("nan"), "answer"),
        (1.0, float("inf"), "answer"),
        (1, True, "answer"),
        (True, 1, "answer"),
        (1.0, "1.0", "answer"),
        (1.0, None, "answer"),
        (None, 0.0, "answer"),
        (None, False, "answer"),
        ("nan", None, "answer"),
        (float("nan"), 1.0, "answer"),
        (float("inf"), float("-inf"), "answer"),
        ("cat", "dog", "answer"),
        ([1.0], 1.0, "answer"),
        ([1.0, 2.0], [1.0], "answer"),
        ([1.0, 2.0], [1.0, 3.0], "[1]"),
        ({"a": 1.0}, {"a": 1.0, "b": 2.0}, "answer"),
        ({"a": {"b": [0.0, 5.0]}}, {"a": {"b": [0.0, 6.0]}}, "a.b[1]"),
        ([{"digit": 3}], [{"digit": 4}], "[0].digit"),
    ],
)
def test_difference_names_the_place(expected: Any, found: Any, place: str) -> None:
    text = difference(expected, found, RTOL, ATOL)
    assert text is not None
    assert text.startswith(f"{place}: expected")


def test_golden_requests_keep_every_type_and_value(tmp_path: Path) -> None:
    inputs = {
        "ids": np.array([[1, -(2**62)]]),
        "mask": np.array([[True, False]]),
        "x": np.array([[np.inf]], np.float16),
    }
    Golden(inputs, {"y": np.array([[np.nan]])}, ["é"], [1.25], 0.1, 0.2).write(tmp_path)
    found = Golden.read(tmp_path)
    for name, array in inputs.items():
        assert found.inputs[name].dtype == array.dtype
        assert np.array_equal(found.inputs[name], array)
    assert np.isnan(found.outputs["y"]).all()
    assert (found.instances, found.predictions, found.rtol, found.atol) == (["é"], [1.25], 0.1, 0.2)


def test_golden_request_sends_and_accepts_null_for_a_missing_number() -> None:
    array = np.array([[np.nan, 1.0]], np.float32)
    spec = TensorSpec(name="x", datatype="FP32", shape=("batch", 2), allows_missing=True)
    (request,) = golden_requests(Golden({"x": array}, {"y": array}, [], [], RTOL, ATOL), "net", [spec])
    body = json.loads(json.dumps(request.body, allow_nan=False))
    assert body["inputs"][0]["data"] == [None, 1.0]
    answer = {"name": "y", "datatype": "FP32", "shape": [1, 2]}
    for data in ([None, 1.0], [[None, 1.0]], [float("nan"), 1.0]):
        assert request.problem({"outputs": [{**answer, "data": data}]}) is None
    for other in ([1.0, None], [0.0, 1.0], [None, None]):
        assert str(request.problem({"outputs": [{**answer, "data": other}]})).startswith("y[")


def test_golden_texts_round_trip(tmp_path: Path) -> None:
    texts = np.array([["héllo", ""]], np.object_)
    Golden({"x": texts}, {}, [], [], 0.0, 0.0).write(tmp_path)
    found = Golden.read(tmp_path).inputs["x"]
    assert found.dtype == np.object_
    assert found.tolist() == texts.tolist()


def test_arrays_that_need_pickle_are_not_read(tmp_path: Path) -> None:
    Golden({}, {}, [], [], 0.0, 0.0).write(tmp_path)
    arrays: dict[str, Any] = {"input.x": np.array([{"code": "runs"}], dtype=object)}
    np.savez(tmp_path / "golden.npz", **arrays)
    with pytest.raises(ValueError, match="allow_pickle"):
        Golden.read(tmp_path)


def test_the_same_golden_requests_are_the_same_bytes(tmp_path: Path) -> None:
    golden = Golden({"x": np.ones((2, 2))}, {"y": np.zeros(2)}, [], [], 0.0, 0.0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        golden.write(tmp_path / name)
    assert (tmp_path / "a" / "golden.npz").read_bytes() == (tmp_path / "b" / "golden.npz").read_bytes()
    assert json.loads((tmp_path / "a" / "golden.json").read_text())["instances"] == []


WORDS = 11
CACHE = TensorSpec(name="past", datatype="FP32", shape=("batch", 1, "past", 2))


class Summing:
    """Return the sum of all real ids so far, weighted by position, and record the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        ids, mask, past = feed["input_ids"], feed["attention_mask"], feed["past"]
        self.calls.append((past.shape[2], ids.shape[1]))
        assert mask.shape[1] == past.shape[2] + ids.shape[1]
        new = np.stack([ids, feed["position_ids"]], axis=-1)[:, None].astype(np.float32)
        present = np.concatenate([past, new], axis=2)
        total = (present[:, 0, :, 0] * (present[:, 0, :, 1] + 1) * mask).cumsum(axis=1)[:, -ids.shape[1] :]
        logits = -np.abs(np.arange(WORDS) - total[..., None] % WORDS)
        return {"logits": logits.astype(np.float32), "present": present}


def decoder(run: Summing | None = None, end: tuple[int, ...] = ()) -> Decoder:
    generation = Generation(caches=(Cache(input="past", output="present"),), end=end, positions_limit=99)
    return Decoder(run or Summing(), generation, {"past": CACHE})


def counted(prompt: Sequence[int], most: int, end: tuple[int, ...] = ()) -> list[int]:
    ids = list(prompt)
    while len(ids) - len(prompt) < most and (len(ids) == len(prompt) or ids[-1] not in end):
        ids.append(sum(one * (place + 1) for place, one in enumerate(ids)) % WORDS)
    return ids[len(prompt) :]


PROMPTS = [[3], [1, 2, 3, 4, 5], [9, 9], [0, 7, 0]]


@pytest.mark.parametrize("chunk", [0, 1, 2, 3, 9])
def test_batching_padding_and_prompt_parts_do_not_change_answers(chunk: int) -> None:
    answers = greedy(decoder(), PROMPTS, 6, chunk)
    assert [answer.tokens for answer in answers] == [counted(prompt, 6) for prompt in PROMPTS]


def test_prompt_is_read_once_and_then_one_token_at_a_time() -> None:
    run = Summing()
    answer = greedy(decoder(run), [[1, 2, 3]], 3)[0]
    assert run.calls == [(0, 3), (3, 1), (4, 1)]
    assert (answer.leads, answer.highest) == ([1.0] * 3, [0.0] * 3), "how far each token is ahead"
    run = Summing()
    greedy(decoder(run), [[1, 2, 3]], 1, chunk=2)
    assert run.calls == [(0, 2), (2, 1)]
    run, first = Summing(), counted([4], 1)[0]
    assert greedy(decoder(run, end=(first,)), [[4]], 6)[0].tokens == [first]
    assert len(run.calls) == 1


def test_finished_row_does_not_change_while_others_continue() -> None:
    end = (counted(PROMPTS[1], 3)[-1],)
    answers = greedy(decoder(end=end), PROMPTS, 6)
    assert [answer.tokens for answer in answers] == [counted(prompt, 6, end) for prompt in PROMPTS]
    assert min(len(answer.tokens) for answer in answers) < max(len(answer.tokens) for answer in answers)
