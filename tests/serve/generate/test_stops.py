from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.generate.stops import Stops
from tests.serve.wire import RANDOM


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
