"""Write the report of a run and read parts of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from pipeline.contract.run import Run
from pipeline.report.page import write_report


def report(run: Run, *others: Run, shapes: bool = True) -> str:
    """Return a page that is valid; `shapes` is false where files of the run have other shapes than pipe writes."""
    path = run.path / "report.html"
    write_report(run, path, others)
    page = path.read_text()
    assert not shapes or "not in a format" not in page
    check_page(page)
    return page


def check_page(page: str) -> None:
    """Check that tags are closed, that nothing is loaded or run, and that every chart can be read without seeing it."""
    parser = TagBalance()
    parser.feed(page)
    assert not parser.open
    assert not parser.tags & {"script", "link", "iframe", "object"}
    assert not re.search(r"""src="(?!data:image/png;base64,)|href="(?!#|data:image/png;base64,)|url\(|@import""", page)
    assert "default-src 'none'" in page
    for chart in charts(page):
        assert re.match(r"<svg[^>]*><title>[^<]+</title><desc>[^<]+</desc>", chart)
        if 'class="grid"' in chart:
            assert chart.count('class="axis-title"') == 2 - ("<title>Drift" in chart)


def charts(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, re.DOTALL)


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


def sections(page: str) -> dict[str, str]:
    """Return the contents of the sections by their titles."""
    return dict(re.findall(r"<section[^>]*><h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL))


def section(page: str, title: str) -> str:
    return sections(page)[title]
