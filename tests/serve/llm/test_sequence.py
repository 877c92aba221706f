from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serve.llm.sampling import Sampling
from serve.llm.sequence import Decode, Detokenizer, GenerationOptions, SequenceGroup, StopStrings, TextSequence
from tests.serve.llm import tiny
from tests.serve.wire.http2.frames import FUZZ_SETTINGS

TOKENIZER = tiny.tokenizer()


def _decode(ids: object) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))  # type: ignore[call-overload]


def _detokenize(decode: Decode, ids: list[int], before: list[int]) -> list[str]:
    made = Detokenizer(decode, before)
    return [*(made.feed(one) for one in ids), made.flush()]


@FUZZ_SETTINGS
@given(st.text(max_size=20))
def test_detokenizer_returns_whole_characters(text: str) -> None:
    chunks = _detokenize(_decode, TOKENIZER.encode(text).ids, [])
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks) or "\ufffd" in text


def test_character_is_returned_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("日").ids
    assert len(ids) > 1
    assert _detokenize(_decode, ids, []) == [*[""] * (len(ids) - 1), "日", ""]


def test_invalid_bytes_are_not_held_back_for_ever() -> None:
    lone = TOKENIZER.token_to_id("¡")  # byte 0xA1, which continues a character
    assert lone is not None
    made = Detokenizer(_decode)
    shown = [made.feed(lone) for _ in range(40)]
    assert sum(map(len, shown)) >= 32
    assert len("".join(shown) + made.flush()) == 40


def test_incomplete_character_at_the_end_is_shown() -> None:
    assert _detokenize(_decode, TOKENIZER.encode("x日").ids[:-1], [])[-1] == "\ufffd"


@pytest.fixture
def chunks() -> Tokenizer:
    """A tokenizer like sentencepiece: a space is a part of a word, and dropped at the beginning of a text."""
    made = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "es": 2, "?": 3}, "?"))
    made.decoder = decoders.Metaspace()
    return made


def test_space_between_prompt_and_answer_is_kept(chunks: Tokenizer) -> None:
    assert chunks.decode([1]) == "fox"
    assert _detokenize(chunks.decode, [1, 2], before=[0]) == [" fox", "es", ""]
    assert _detokenize(chunks.decode, [1, 2], before=[]) == ["fox", "es", ""]


def test_prompt_ending_within_a_character_is_harmless() -> None:
    before = TOKENIZER.encode("日").ids[:-1]
    assert "".join(_detokenize(_decode, TOKENIZER.encode("abc").ids, before)) == "abc"


def test_text_without_stop_strings_is_not_held_back() -> None:
    stops = StopStrings(())
    assert stops.feed("any") == ("any", False)
    assert stops.flush() == ""


def test_possible_stop_string_is_held_back() -> None:
    stops = StopStrings(("\n\nQ:",))
    assert stops.feed("answer\n") == ("answer", False)
    assert stops.feed("\n") == ("", False)
    assert stops.feed("next") == ("\n\nnext", False)
    assert stops.feed("\n\nQ") == ("", False)
    assert stops.feed(": more") == ("", True)


def test_first_stop_string_in_the_text_ends_it() -> None:
    assert StopStrings(("world", "lo")).feed("hello world") == ("hel", True)


def test_flush_returns_what_was_held_back() -> None:
    stops = StopStrings(("abc",))
    assert stops.feed("xab") == ("x", False)
    assert stops.flush() == "ab"
    assert stops.flush() == ""


@FUZZ_SETTINGS
@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_are_found_across_pieces(chunks: list[str], words: list[str]) -> None:
    stops, shown, ended = StopStrings(words), "", False
    for chunk in chunks:
        text, ended = stops.feed(chunk)
        shown += text
        if ended:
            break
    shown += "" if ended else stops.flush()
    whole = "".join(chunks)
    # Of several stop strings that overlap, the one that ends first decides.
    ends = [(place + len(word), place) for word in words if (place := whole.find(word)) >= 0]
    assert ended == bool(ends)
    assert not any(word in shown for word in words)
    assert whole.startswith(shown)
    if not ends:
        assert shown == whole


@pytest.mark.parametrize(("text", "shown"), [("aab", "a"), ("aaab", "aa")])
def test_stop_string_may_begin_within_itself(text: str, shown: str) -> None:
    stops = StopStrings(("ab",))
    found = [stops.feed(sign) for sign in text]
    assert ("".join(one for one, _ in found), found[-1][1]) == (shown, True)


def _generate(text: list[int], most: int = 50, stop: tuple[str, ...] = (), echo: bool = False) -> list[tuple[str, str]]:
    """Return text and finish reason of each chunk."""
    order = GenerationOptions(max_tokens=most, sampling=Sampling(temperature=0), stop=stop, echo=echo)
    sequence = TextSequence(SequenceGroup(order), 0, [5], (tiny.END,), _decode)
    found: list[tuple[str, str]] = []
    for token in text:
        chunk = sequence.extend(np.eye(tiny.VOCABULARY, dtype=np.float32)[token])
        found.append((chunk.text, chunk.finish_reason))
        assert sequence.finished == bool(chunk.finish_reason)
    return found


def _ids(text: str) -> list[int]:
    return [TOKENIZER.encode(one).ids[0] for one in text]


def test_end_token_finishes_a_text_and_is_not_shown() -> None:
    assert _generate([*_ids("ab"), tiny.END]) == [("a", ""), ("b", ""), ("", "stop")]


def test_last_token_returns_what_was_held_back() -> None:
    assert _generate(_ids("abc"), most=3, stop=("cd",)) == [("a", ""), ("b", ""), ("c", "length")]
    half = TOKENIZER.encode("日").ids[:1]
    assert _generate([*_ids("a"), *half], most=2)[-1] == ("\ufffd", "length")


@pytest.mark.parametrize("most", [3, 50])
def test_stop_string_counts_at_the_last_token(most: int) -> None:
    assert _generate(_ids("abc"), most=most, stop=("bc",)) == [("a", ""), ("", ""), ("", "stop")]


def test_partial_stop_string_is_shown_at_the_end_token() -> None:
    assert _generate([*_ids("ab"), tiny.END], stop=("bc",)) == [("a", ""), ("", ""), ("b", "stop")]


def test_prompt_is_echoed_on_request() -> None:
    order = GenerationOptions(max_tokens=0, sampling=Sampling(), echo=True)
    sequence = TextSequence(SequenceGroup(order), 3, TOKENIZER.encode("hello").ids, (), _decode)
    chunk = sequence.echo_prompt([])
    assert chunk is not None
    assert (chunk.index, chunk.text, chunk.finish_reason, sequence.finished) == (3, "hello", "length", True)
    quiet = TextSequence(SequenceGroup(GenerationOptions(max_tokens=1, sampling=Sampling())), 0, [5], (), _decode)
    assert quiet.echo_prompt([]) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_or_infinite_logits_are_an_error(value: float) -> None:
    logits = np.zeros(tiny.VOCABULARY, np.float32)
    logits[7] = value
    sequence = TextSequence(SequenceGroup(GenerationOptions(max_tokens=1, sampling=Sampling())), 0, [5], (), _decode)
    with pytest.raises(ArithmeticError, match="the model returned NaN or infinite logits"):
        sequence.extend(logits)
