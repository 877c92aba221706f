"""Write the report of a run and read parts of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from pipeline.contract.run import Run
from pipeline.report.page import write_report


def report(run: Run, *others: Run) -> str:
    path = run.path / "report.html"
    write_report(run, path, others)
    page = path.read_text()
    assert "not in a format" not in page
    return page


class TagBalance(HTMLParser):
    """Checks that every opened tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def section(page: str, title: str) -> str:
    (content,) = re.findall(rf"<section[^>]*><h2>{title}</h2>(.*?)</section>", page, re.DOTALL)
    return str(content)
