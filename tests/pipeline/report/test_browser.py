"""The report and the index in a real browser."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipeline.report
from pipeline.contract.run import Run
from pipeline.history import load_history
from pipeline.report.page import write_index, write_report

from ...serve.browser import PROGRAM, Browser
from .complete_run import add_optional_files
from .example_runs import make_other_run, make_run, write_predictions
from .task_kinds import KINDS

pytestmark = [pytest.mark.long, pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the newer with a report beside the older, and the page of both."""
    folder = tmp_path_factory.mktemp("runs")
    other, run = make_other_run(folder), make_run(folder)
    add_optional_files(run)
    for one, right in ((run, 356), (other, 345)):
        write_predictions(one, right)
    write_report(run, run.path / "report.html", [other])
    write_index(load_history(folder), folder / "index.html")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with contextlib.closing(Browser(tmp_path_factory.mktemp("chromium"))) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 390])
def test_pages_fit_the_window_in_both_color_schemes_without_errors(
    browser: Browser, runs: Path, width: int, dark: bool
) -> None:
    for name in ("index.html", "20260102-030405-abcd/report.html"):
        url = (runs / name).as_uri()
        browser.open(url, width=width, dark=dark)
        assert browser.complaints == []
        assert [one for one in browser.requested_urls if one != url and not one.startswith("data:")] == []
        assert browser.value("document.documentElement.scrollWidth") <= width
        light = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(one => one > 127)")
        assert light is not dark
    shown = browser.value("document.body.innerText")
    for number in ("Passed", "98.9%", "+0.025", "+0.03056", "4.8×10⁻⁶", "2,411", "1.84 ms", "0.0213", "pipe repro"):
        assert number in shown
    assert browser.value("[...document.images].every(one => one.complete && one.naturalWidth === 8)")
    graphs = "[...document.querySelectorAll('svg.graph')].filter(one => one.getClientRects().length).length"
    assert browser.value(graphs) == 1, "the one for this width"


def test_every_chart_has_a_title_and_a_description(browser: Browser, runs: Path) -> None:
    browser.open((runs / "20260102-030405-abcd/report.html").as_uri())
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    images = [node for node in tree if not node["ignored"] and node["role"]["value"] in ("image", "img")]
    assert len(images) > 15
    assert [node for node in images if not node.get("name", {}).get("value")] == []


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_pages_of_other_tasks_than_classifiers_fit_and_load_nothing(
    browser: Browser, examples: dict[str, Run], tmp_path: Path, width: int, dark: bool
) -> None:
    for name in KINDS:
        path = tmp_path / f"{name}.html"
        write_report(examples[name], path)
        browser.open(path.as_uri(), width=width, dark=dark)
        assert browser.complaints == []
        assert [one for one in browser.requested_urls if one != path.as_uri() and not one.startswith("data:")] == []
        assert browser.value("document.documentElement.scrollWidth") <= width, name
        assert browser.value("[...document.images].every(one => one.complete && one.naturalWidth > 0)"), name


def test_index_heading_sorts_both_ways_with_missing_values_last(browser: Browser, runs: Path) -> None:
    browser.open((runs / "index.html").as_uri())
    names = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent.slice(-4))"
    assert browser.value(names) == ["abcd", "ef01"]
    place = "th:nth-child({})".format
    up, down = ["ef01", "abcd"], ["abcd", "ef01"]
    for column, order in ((1, up), (1, down), (1, up), (13, down), (13, down)):
        browser.press(f"{place(column)} button", "Enter")
        assert browser.value(names) == order
    assert browser.value(f"document.querySelector('{place(13)}').getAttribute('aria-sort')") == "descending"


def test_index_filters_by_words_settings_and_metrics(browser: Browser, runs: Path) -> None:
    browser.open((runs / "index.html").as_uri())
    rows = "[...document.querySelectorAll('tbody tr')].filter(row => !row.hidden)"
    shown = f"{rows}.map(row => row.cells[0].textContent.slice(-4))"
    for text, names in {
        "": ["abcd", "ef01"],
        "deploy": ["abcd"],
        "accuracy>0.98 evaluate.margin=0.01": ["abcd", "ef01"],
        "accuracy>0.99": [],
        "verdict=pass reached!=deploy": ["ef01"],
        "train.lr<1": [],
    }.items():
        browser.value(
            f"(input => {{ input.value = {text!r}; input.dispatchEvent(new Event('input')); }})"
            "(document.querySelector('.filter input'))"
        )
        assert browser.value(shown) == names, text
    assert browser.complaints == []


def test_printed_report_is_dark_on_white(browser: Browser, runs: Path) -> None:
    browser.open((runs / "20260102-030405-abcd/report.html").as_uri(), dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value("getComputedStyle(document.body).color.match(/\\d+/g).every(one => one < 60)")
    assert browser.value("document.querySelector('nav').getClientRects().length") == 0
    browser.call("Emulation.setEmulatedMedia", media="")
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 20_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("above", ["text", "muted", "good", "bad", "warn", "one", "two", "three"])
def test_text_contrast_meets_accessibility_guidelines(scheme: str, above: str) -> None:
    light, dark = re.findall(
        r":root \{(.*?)\n *\}", Path(pipeline.report.__path__[0], "style.css").read_text(), re.DOTALL
    )
    colors = dict(re.findall(r"--([a-z-]+): #([0-9a-f]{6})", dark if scheme == "dark" else light))
    below = ["page", *([f"{above}-soft"] if f"{above}-soft" in colors else []), *(["faint"] if above == "text" else [])]
    for ground in below:
        lighter, darker = sorted((_luminance(colors[above]), _luminance(colors[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, ground


def _luminance(color: str) -> float:
    """Return the relative luminance of the WCAG."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))
