from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serve.generate.detokenize import Decode, Detokenizer
from tests.serve.generate import tiny
from tests.serve.wire import RANDOM

BYTES = tiny.tokenizer()


def _decode(ids: object) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=True))  # type: ignore[call-overload]


def _fed(decode: Decode, ids: list[int], before: list[int]) -> list[str]:
    made = Detokenizer(decode, before)
    return [*(made.feed(one) for one in ids), made.end()]


@RANDOM
@given(st.text(max_size=20))
def test_a_text_comes_out_as_it_went_in_and_never_half_a_character(text: str) -> None:
    pieces = _fed(_decode, BYTES.encode(text).ids, [])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte() -> None:
    ids = BYTES.encode("日").ids
    assert len(ids) > 1
    assert _fed(_decode, ids, []) == [*[""] * (len(ids) - 1), "日", ""]


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    lone = BYTES.token_to_id("¡")  # byte 0xA1, which continues a character
    assert lone is not None
    made = Detokenizer(_decode)
    shown = [made.feed(lone) for _ in range(40)]
    assert sum(map(len, shown)) >= 32
    assert len("".join(shown) + made.end()) == 40


def test_an_answer_that_ends_within_a_character_shows_that_something_is_missing() -> None:
    assert _fed(_decode, BYTES.encode("x日").ids[:-1], [])[-1] == "\ufffd"


@pytest.fixture
def pieces() -> Tokenizer:
    """As sentencepiece makes them: a space is a part of a word, and the first one of a text is dropped."""
    made = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "es": 2, "?": 3}, "?"))
    made.decoder = decoders.Metaspace()
    return made


def test_the_space_between_prompt_and_answer_is_kept(pieces: Tokenizer) -> None:
    assert pieces.decode([1]) == "fox"
    assert _fed(pieces.decode, [1, 2], before=[0]) == [" fox", "es", ""]
    assert _fed(pieces.decode, [1, 2], before=[]) == ["fox", "es", ""]


def test_a_prompt_that_ends_within_a_character_spoils_nothing() -> None:
    before = BYTES.encode("日").ids[:-1]
    assert "".join(_fed(_decode, BYTES.encode("abc").ids, before)) == "abc"
