"""Stop words in a text that comes in pieces: found across them, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """What may be the beginning of a stop word is held back until the next piece tells."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What can be shown by now, and whether a stop word ended the text."""
        if not self._words:
            return text, False
        text = self._held + text
        places = [place for word in self._words if (place := text.find(word)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        keep = max(beginning(text, word) for word in self._words)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def end(self) -> str:
        """No more comes: what was held back was no stop word."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, word: str) -> int:
    """How many of the text's last characters are the first of a word, which is not in it whole."""
    longest = min(len(text), len(word) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(word[:size])), 0)
