from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serve.generate.sequence import Decode, Detokenizer, Stops
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


def test_without_stop_words_everything_is_shown_at_once() -> None:
    stops = Stops(())
    assert stops.feed("any") == ("any", False)
    assert stops.end() == ""


def test_what_may_begin_a_stop_word_is_held_back_until_it_is_known() -> None:
    stops = Stops(("\n\nQ:",))
    assert stops.feed("answer\n") == ("answer", False)
    assert stops.feed("\n") == ("", False)
    assert stops.feed("next") == ("\n\nnext", False)
    assert stops.feed("\n\nQ") == ("", False)
    assert stops.feed(": more") == ("", True)


def test_the_first_stop_word_in_the_text_ends_it_whatever_their_order() -> None:
    assert Stops(("world", "lo")).feed("hello world") == ("hel", True)


def test_at_the_end_what_was_held_back_is_shown() -> None:
    stops = Stops(("abc",))
    assert stops.feed("xab") == ("x", False)
    assert stops.end() == "ab"
    assert stops.end() == ""


@RANDOM
@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_however_a_text_is_cut_it_ends_where_the_whole_one_would(pieces: list[str], words: list[str]) -> None:
    stops, shown, ended = Stops(words), "", False
    for piece in pieces:
        text, ended = stops.feed(piece)
        shown += text
        if ended:
            break
    shown += "" if ended else stops.end()
    whole = "".join(pieces)
    # A word is found as soon as it is whole: of several that overlap, the one that ends first decides.
    ends = [(place + len(word), place) for word in words if (place := whole.find(word)) >= 0]
    assert ended == bool(ends)
    assert not any(word in shown for word in words)
    assert whole.startswith(shown)
    if not ends:
        assert shown == whole


@pytest.mark.parametrize(("text", "shown"), [("aab", "a"), ("aaab", "aa")])
def test_a_stop_word_may_begin_again_within_itself(text: str, shown: str) -> None:
    stops = Stops(("ab",))
    found = [stops.feed(sign) for sign in text]
    assert ("".join(one for one, _ in found), found[-1][1]) == (shown, True)
