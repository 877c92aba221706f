from __future__ import annotations

import pytest

from serve.llm.reasoning import ReasoningParser, opens_reasoning

CASES = [
    ("<think>\nso it is\n\n</think>\n\nfour", False, "so it is", "four"),
    ("so it is</think>four", True, "so it is", "four"),
    ("\n so\n it </think>\n", True, "so\n it", ""),
    ("cut off in the middle </thi", True, "cut off in the middle </thi", ""),
    ("<think></think>four", False, "", "four"),
    ("<think>a <think> b</think>c</think> d", False, "a <think> b", "c</think> d"),
    ("four", False, "", "four"),
    ("  four <think>no</think>", False, "", "  four <think>no</think>"),
    ("<thin ice", False, "", "<thin ice"),
    ("<thi", False, "", "<thi"),
    ("", True, "", ""),
    ("  ", False, "", "  "),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "content"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_an_answer_is_split_the_same_in_pieces_of_any_size(
    text: str, opened: bool, reasoning: str, content: str, size: int
) -> None:
    parser = ReasoningParser(opened=opened)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [*map(parser.feed, pieces), parser.feed("", last=True)]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


def test_content_without_reasoning_is_not_delayed() -> None:
    parser = ReasoningParser()
    assert parser.feed("fo").content == "fo"
    assert parser.feed("ur ").content == "ur "


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("<|answer|><think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("<|answer|>", False)],
)
def test_a_prompt_may_begin_the_reasoning(prompt: str, opened: bool) -> None:
    assert opens_reasoning(prompt) is opened
