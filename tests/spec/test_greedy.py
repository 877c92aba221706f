"""Greedy generation over a graph of a few lines, whose answers are known by counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.spec.generation import Cache, Generation
from pipeline.spec.greedy import Decoder, empty_past, greedy, padded
from pipeline.spec.signature import TensorSpec

WORDS = 11
CACHE = TensorSpec(name="past", datatype="FP32", shape=("batch", 1, "past", 2))


class Summing:
    """Says the sum of all real ids so far, weighted by their positions; remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        ids, mask, past = feed["input_ids"], feed["attention_mask"], feed["past"]
        self.asked.append((past.shape[2], ids.shape[1]))
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
def test_company_padding_and_pieces_change_no_answer(chunk: int) -> None:
    answers = greedy(decoder(), PROMPTS, 6, chunk)
    assert [answer.tokens for answer in answers] == [counted(prompt, 6) for prompt in PROMPTS]


def test_a_prompt_is_read_once_and_then_one_position_at_a_time() -> None:
    run = Summing()
    greedy(decoder(run), [[1, 2, 3]], 3)
    assert run.asked == [(0, 3), (3, 1), (4, 1)]
    run = Summing()
    greedy(decoder(run), [[1, 2, 3]], 1, chunk=2)
    assert run.asked == [(0, 2), (2, 1)]


def test_a_row_that_ended_stays_as_it_is_while_others_go_on() -> None:
    end = (counted(PROMPTS[1], 3)[-1],)
    answers = greedy(decoder(end=end), PROMPTS, 6)
    assert [answer.tokens for answer in answers] == [counted(prompt, 6, end) for prompt in PROMPTS]
    assert min(len(answer.tokens) for answer in answers) < max(len(answer.tokens) for answer in answers)


def test_nothing_is_computed_once_all_rows_ended() -> None:
    run, first = Summing(), counted([4], 1)[0]
    assert greedy(decoder(run, end=(first,)), [[4]], 6)[0].tokens == [first]
    assert len(run.asked) == 1


def test_how_far_a_token_is_ahead_is_told() -> None:
    answer = greedy(decoder(), [[3]], 2)[0]
    assert answer.leads == [1.0, 1.0]
    assert answer.highest == [0.0, 0.0]


def test_prompts_end_at_the_right_and_the_rest_is_masked() -> None:
    ids, mask = padded([[5], [1, 2, 3]])
    assert ids.tolist() == [[0, 0, 5], [1, 2, 3]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_an_empty_past_has_every_axis_but_the_positions() -> None:
    (past,) = empty_past(decoder(), 3).values()
    assert (past.shape, past.dtype) == ((3, 1, 0, 2), np.float32)
