"""The model card as HTML: headings, paragraphs, lists, tables and code; anything else stays the text it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipeline.spec.html import Child, Html, el, flat, table

_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<em>[^*\s][^*]*)\*"
    r"|\[(?P<text>[^\]]+)\]\((?P<link>https?://[^\s()<>]+)\)"
)
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?")
_DEEPEST = 6


def render(text: str, level: int = 2) -> Html:
    """`level`: what a heading of the first rank becomes on the page around it."""
    return flat(_blocks(text.splitlines(), level))


def _blocks(lines: Sequence[str], level: int) -> Iterator[Html]:
    place = 0
    while place < len(lines):
        kind = _kind(lines[place])
        end = place + 1
        if kind == "code":
            while end < len(lines) and _kind(lines[end]) != "code":
                end += 1
            yield el("pre", el("code", "\n".join(lines[place + 1 : end])))
            end += 1
        elif kind == "heading":
            yield _heading(lines[place], level)
        else:
            while end < len(lines) and _kind(lines[end]) == kind:
                end += 1
            if kind:
                yield _block(kind, lines[place:end])
        place = end


def _kind(line: str) -> str:
    bare = line.strip()
    if bare.startswith("```"):
        return "code"
    if re.match(r"#{1,6} ", bare):
        return "heading"
    if re.match(r"[-*] ", bare):
        return "list"
    return "table" if bare.startswith("|") else "paragraph" if bare else ""


def _heading(line: str, level: int) -> Html:
    marks, _, text = line.strip().partition(" ")
    return el(f"h{min(level + len(marks) - 1, _DEEPEST)}", inline(text))


def _block(kind: str, lines: Sequence[str]) -> Html:
    if kind == "list":
        return el("ul", [el("li", inline(line.strip()[2:])) for line in lines])
    if kind == "table":
        rows = [_cells(line) for line in lines if not _RULE.fullmatch(line.strip())]
        return table(rows[0], rows[1:], numbers=False) if rows else Html("")
    return el("p", inline(" ".join(line.strip() for line in lines)))


def _cells(line: str) -> list[Html]:
    return [inline(cell.strip()) for cell in line.strip().strip("|").split("|")]


def inline(text: str) -> Html:
    """What stands between the marks is escaped like all else."""
    parts: list[Child] = []
    place = 0
    for found in _INLINE.finditer(text):
        parts.append(text[place : found.start()])
        place = found.end()
        if found["link"]:
            parts.append(el("a", found["text"], href=found["link"], rel="noopener noreferrer"))
        else:
            kind = found.lastgroup or ""
            parts.append(el(kind, found[kind]))
    return flat(*parts, text[place:])
