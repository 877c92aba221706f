"""Reasoning of models that think before they answer: the text in `<think>…</think>` at the beginning of an answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from serve.llm.sequence import partial_match

BEGIN, END = "<think>", "</think>"


class AnswerPart(NamedTuple):
    reasoning: str
    content: str


class ReasoningParser:
    """Splits an answer that arrives in pieces. Spaces and line breaks around the reasoning belong to neither part."""

    def __init__(self, *, opened: bool = False) -> None:
        """`opened`: the prompt ends with `<think>`, as the template of DeepSeek-R1 writes it."""
        self._state: Literal["begin", "reasoning", "gap", "content"] = "reasoning" if opened else "begin"
        self._pending = ""  # undecided, such as a part of a tag
        self._has_reasoning = False

    def feed(self, text: str, *, last: bool = False) -> AnswerPart:
        """Return the text that is certain now, which is all of it at the last piece."""
        self._pending += text
        reasoning = content = ""
        if self._state == "begin":
            self._find_begin(last=last)
        if self._state == "reasoning":
            reasoning = self._take_reasoning(last=last)
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            self._state = "content" if self._pending else "gap"
        if self._state == "content":
            content, self._pending = self._pending, ""
        return AnswerPart(reasoning, content)

    def _find_begin(self, *, last: bool) -> None:
        start = self._pending.lstrip()
        if start.startswith(BEGIN):
            self._state, self._pending = "reasoning", start[len(BEGIN) :]
        elif last or not BEGIN.startswith(start):
            self._state = "content"

    def _take_reasoning(self, *, last: bool) -> str:
        if not self._has_reasoning:
            self._pending = self._pending.lstrip()
        text, end, rest = self._pending.partition(END)
        if end:
            self._state, self._pending = "gap", rest
            return text.rstrip()
        kept = 0 if last else partial_match(text, END)
        ready = text[: len(text) - kept].rstrip()
        self._pending = "" if last else text[len(ready) :]
        self._has_reasoning = self._has_reasoning or bool(ready)
        return ready


def opens_reasoning(prompt: str) -> bool:
    """Return whether the model continues reasoning that the prompt has begun."""
    return prompt.rstrip().endswith(BEGIN)
