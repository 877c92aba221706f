"""Tokens into text one by one, without ever showing a part of a character: many tokens are bytes of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"  # what decoders put in the place of bytes that are no character, or not yet
_CONTEXT = 6  # tokens before the answer: decoders drop a space at the beginning of a text
_LONGEST = 8  # tokens that may be held back: no character needs more, so what still is none never becomes one


class Detokenizer:
    """A token's text depends on its neighbours, so the last ones are decoded again, with it and without."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before`: the prompt."""
        context = list(before[-_CONTEXT:])
        if decode(context).endswith(_BROKEN):  # its own last character is not whole
            context = []
        self._decode, self._ids = decode, context
        self._known = len(context)  # the text of the tokens up to here was given

    def feed(self, token: int) -> str:
        """The text that is certain now; often none."""
        self._ids.append(token)
        text = self._fresh()
        if not text or (text.endswith(_BROKEN) and len(self._ids) - self._known < _LONGEST):
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return text

    def end(self) -> str:
        """Nothing follows: what was held back, whatever it is."""
        text = self._fresh()
        self._known = len(self._ids)
        return text

    def _fresh(self) -> str:
        before = self._decode(self._ids[: self._known])
        return self._decode(self._ids)[len(before) :]
