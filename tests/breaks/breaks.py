"""A break: one small change of the source that breaks a promise, and the test that must fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """`before` occurs exactly once in `file`; if it is replaced by `after`, `test` fails."""

    name: str  # what goes wrong for the user, in a few words
    file: str
    before: str
    after: str
    test: str  # a node id of pytest

    def apply(self, source: str) -> str:
        found = source.count(self.before)
        if found != 1:
            raise ValueError(f"{self.name}: its text stands {found} times in {self.file}, not once")
        broken = source.replace(self.before, self.after)
        compile(broken, self.file, "exec")
        return broken
