from __future__ import annotations

import numpy as np
import pytest

from serve.generate.sampling import Sampling
from serve.generate.sequence import Asking, Order, Writing
from tests.serve.generate import tiny

WORDS = tiny.tokenizer()


def _decode(ids: object) -> str:
    return str(WORDS.decode(list(ids), skip_special_tokens=True))  # type: ignore[call-overload]


def _written(text: list[int], most: int = 50, stop: tuple[str, ...] = (), echo: bool = False) -> list[tuple[str, str]]:
    """What is shown of these tokens, one after the other, and how it ends."""
    order = Order(most=most, sampling=Sampling(temperature=0), stop=stop, echo=echo)
    writing = Writing(Asking(order), 0, [5], (tiny.END,), _decode)
    found: list[tuple[str, str]] = []
    for token in text:
        piece = writing.extend(np.eye(tiny.VOCABULARY, dtype=np.float32)[token])
        found.append((piece.text, piece.finish))
        assert writing.ended == bool(piece.finish)
    return found


def _ids(text: str) -> list[int]:
    return [WORDS.encode(one).ids[0] for one in text]


def test_a_text_ends_with_an_ending_token_which_is_not_shown() -> None:
    assert _written([*_ids("ab"), tiny.END]) == [("a", ""), ("b", ""), ("", "stop")]


def test_a_text_ends_when_it_is_long_enough_with_all_that_was_held_back() -> None:
    assert _written(_ids("abc"), most=3, stop=("cd",)) == [("a", ""), ("b", ""), ("c", "length")]
    half = WORDS.encode("日").ids[:1]
    assert _written([*_ids("a"), *half], most=2)[-1] == ("\ufffd", "length")


@pytest.mark.parametrize("most", [3, 50])
def test_a_stop_word_ends_it_even_with_the_last_token_it_may_have(most: int) -> None:
    assert _written(_ids("abc"), most=most, stop=("bc",)) == [("a", ""), ("", ""), ("", "stop")]


def test_what_looked_like_a_stop_word_is_shown_with_the_ending_token() -> None:
    assert _written([*_ids("ab"), tiny.END], stop=("bc",)) == [("a", ""), ("", ""), ("b", "stop")]


def test_a_prompt_is_shown_where_that_is_asked_for_and_may_be_all() -> None:
    order = Order(most=0, sampling=Sampling(), echo=True)
    writing = Writing(Asking(order), 3, WORDS.encode("hello").ids, (), _decode)
    piece = writing.introduce([])
    assert piece is not None
    assert (piece.index, piece.text, piece.finish, writing.ended) == (3, "hello", "length", True)
    quiet = Writing(Asking(Order(most=1, sampling=Sampling())), 0, [5], (), _decode)
    assert quiet.introduce([]) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error_of_the_model(value: float) -> None:
    logits = np.zeros(tiny.VOCABULARY, np.float32)
    logits[7] = value
    writing = Writing(Asking(Order(most=1, sampling=Sampling())), 0, [5], (), _decode)
    with pytest.raises(ArithmeticError, match="the model gave NaN or infinite logits"):
        writing.extend(logits)
