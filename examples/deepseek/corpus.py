"""Text that every machine has: the source of Python's standard library, split into definitions."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SPLITS = ("train", "validation", "test")
# Tables, generated files, code of other projects, and code for tests and demonstrations.
_SKIPPED = {
    "__phello__", "config", "encodings", "ensurepip", "idle_test", "lib2to3", "pydoc_data", "site-packages", "test",
    "tests", "turtledemo", "_sysconfigdata",
}  # fmt: skip
_STARTS = ("def ", "class ", "async def ", "@", "if __name__")


@cache
def files() -> Mapping[str, str]:
    """Return the text of each file by its path below the library, sorted; read once per process."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not any(part in _SKIPPED or part.startswith(("config-", "_sysconfigdata")) for part in parts):
            texts["/".join(parts)] = path.read_text(encoding="utf-8", errors="replace")
    return texts


def split_of(name: str) -> str:
    """Return the split of a file, by a digest of its name: 80 % train, 10 % validation, 10 % test."""
    draw = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 10
    return "test" if draw == 0 else "validation" if draw == 1 else "train"


def definitions(text: str) -> Iterator[str]:
    """Yield consecutive pieces of a file, each starting at a definition without indentation."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(_STARTS) and lines and not lines[-1].startswith("@"):
            yield "".join(lines)
            lines = []
        lines.append(line)
    if lines:
        yield "".join(lines)


@cache
def documents(split: str) -> tuple[str, ...]:
    """Return the definitions of a split's files, without duplicates and those of earlier splits."""
    seen: set[str] = set()
    for name in SPLITS:
        pieces = [
            piece.strip() for path, text in files().items() if split_of(path) == name for piece in definitions(text)
        ]
        documents_of_split = tuple(piece for piece in dict.fromkeys(pieces) if piece and piece not in seen)
        if name == split:
            return documents_of_split
        seen.update(documents_of_split)
    raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
