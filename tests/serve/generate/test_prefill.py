from __future__ import annotations

import numpy as np
import pytest

from serve.generate.model import Words
from serve.generate.prefill import Prefill, together
from serve.generate.sampling import Likelihood, Sampling
from serve.generate.sequence import Asking, Order, Writing
from tests.serve.generate import tiny


def _writing(prompt: list[int], *, top: int | None = None, echo: bool = False) -> Writing:
    order = Order(most=1, sampling=Sampling(temperature=0), top=top, echo=echo)
    return Writing(Asking(order), 0, prompt, (), lambda ids: "")


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([5], 1), ([5, 5, 5], 3), ([10, 9, 8, 2], 3), ([2, 10], 1), ([10, 2], 1), ([60, 60], 1), ([200, 3], 1)],
)
def test_prompts_are_read_together_where_little_is_padding_and_they_are_not_many(
    lengths: list[int], count: int
) -> None:
    waiting = [_writing(list(range(place, place + size))) for place, size in enumerate(lengths)]
    assert together(waiting, most_tokens=100, most_rows=9) == count


def test_nobody_waiting_is_nobody_to_read() -> None:
    assert together([], 100, 9) == 0


def test_equal_prompts_are_read_once_however_many_they_are() -> None:
    assert together([_writing([1] * 60)] * 9, most_tokens=100, most_rows=9) == 9
    assert together([_writing([1] * 60)] * 9, most_tokens=100, most_rows=4) == 4


@pytest.mark.parametrize("part", [1, 5, 100])
def test_in_whatever_parts_it_is_read_it_gives_the_same(words: Words, part: int) -> None:
    prompts = [list(range(10, 22)), list(range(40, 49)), list(range(10, 22))]
    writings = [_writing(one, top=1, echo=True) for one in prompts]
    prefill = Prefill(words.graph, writings)
    while not prefill.done:
        prefill.advance(part)
    assert prefill.block.rows == 2
    assert prefill.rows(writings) == [0, 1, 0]
    for one in writings:
        ids = np.array([one.prompt])
        logits, _ = words.graph.run(words.graph.empty([0]), ids)
        assert np.allclose(prefill.first(one), logits[0, -1], atol=1e-4)
        first, *rest = prefill.told(one)
        assert first == one.prompt[0]
        wanted = [_logprob(logits[0, place], token) for place, token in enumerate(one.prompt[1:])]
        found = [other for other in rest if isinstance(other, Likelihood)]
        assert [other.token for other in found] == list(one.prompt[1:])
        assert [other.logprob for other in found] == pytest.approx(wanted, abs=1e-4)


def _logprob(logits: np.ndarray[tuple[int], np.dtype[np.float32]], token: int) -> float:
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def test_of_a_prompt_nobody_asked_about_nothing_is_told(words: Words) -> None:
    writing = _writing([4, 5], top=1)
    prefill = Prefill(words.graph, [writing])
    prefill.advance(10)
    assert prefill.told(writing) == []
    assert tiny.POSITIONS > prefill.longest == 2
