"""The report of tasks that are no classifiers: regressors, rankers, and models of pictures, texts and vectors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.system.files import write_json

from .example_runs import make_run
from .pages import report, section
from .task_kinds import KINDS


@pytest.mark.parametrize("name", KINDS)
def test_page_has_the_sections_of_its_task(pages: dict[str, str], name: str) -> None:
    for title in ("Confusion matrix", "Per class", "Calibration", "Slices", "Variants", "Experts"):
        assert f"<h2>{title}" not in pages[name]
    figures = {"Predicted against actual": "houses", "Error by horizon": "weeks", "NDCG by query": "search"}
    assert [title for title in figures if f"<h2>{title}" in pages[name]] == [t for t, n in figures.items() if n == name]
    assert section(pages[name], "Worst samples").count("<b>Sample ") == 12
    has_show = hasattr(KINDS[name], "show") or name == "weeks"
    assert ("<h2>Typical samples" in pages[name]) == has_show
    assert not has_show or section(pages[name], "Typical samples").count("<b>Sample ") == 4


def test_regressor_shows_errors_and_original_columns(pages: dict[str, str]) -> None:
    shown = section(pages["houses"], "Predicted against actual")
    assert "400 of 700 samples" in shown
    assert shown.count("<circle") == 400
    assert shown.count('<th scope="row">') == 10
    assert shown.count("<svg") == 2
    worst = section(pages["houses"], "Worst samples")
    assert "worst samples by mae" in worst
    assert worst.count("<dt>district</dt>") == 12
    assert re.search(r"<dt>built</dt><dd>(18|19|20)\d\d</dd>", worst), "a year has no separator"
    assert "features" not in worst, "what the model gets is not shown"


def test_forecast_shows_errors_by_horizon_coverage_and_bands(pages: dict[str, str]) -> None:
    shown = section(pages["weeks"], "Error by horizon")
    assert "candidate, baseline by horizon." in shown
    assert re.search(r'<path d="M76.0 [0-9.L ]+" class="curve two">', shown)
    cells = re.findall(
        r'<th scope="row">([0-9.]+)</th><td class="number">(\d+)</td><td class="number">([0-9.]+)', shown
    )
    assert [cell[:2] for cell in cells] == [("0.1", "0"), ("0.5", "1"), ("0.9", "1")]
    assert 0.5 < float(cells[0][2]) < 1, "the baseline is too high at later horizons"
    for title, cards in (("Worst samples", 12), ("Typical samples", 4)):
        samples = section(pages["weeks"], title)
        bands = re.findall(r'<path d="M([0-9. L]+)" class="band three">', samples)
        assert [len(band.split("L")) for band in bands] == [28] * cards
        assert samples.count('class="curve one"') == samples.count('class="curve two"') == cards
        assert samples.count("quantiles 0.1 to 0.9") >= cards


def test_ranker_lists_its_worst_queries(pages: dict[str, str]) -> None:
    shown = section(pages["search"], "NDCG by query")
    queries = [int(query) for query in re.findall(r'<th scope="row">(\d+)</th>', shown)]
    values = [float(value) for value in re.findall(r'<th scope="row">\d+</th><td class="number">([0-9.]+)</td>', shown)]
    assert len(queries) == len(set(queries)) == len(values) == 10
    assert all(4000 <= query < 4100 for query in queries)
    assert values == sorted(values)
    assert "100 queries." in shown


@pytest.fixture
def gallery(pages: dict[str, str]) -> str:
    """The worst samples of a task that shows texts and pictures."""
    return section(pages["gallery"], "Worst samples")


@pytest.fixture
def series(pages: dict[str, str]) -> str:
    """The worst samples of a task that shows curves and embeddings."""
    return section(pages["series"], "Worst samples")


def test_pictures_of_a_sample_are_side_by_side(gallery: str) -> None:
    first = re.findall(r"<figure>.*?</figure>", gallery)[0]
    assert re.findall(r'class="name">(\w+)</span><img', first) == ["input", "output"]


def test_tags_that_differ_from_the_target_are_marked(gallery: str) -> None:
    for card in re.findall(r"<figure>.*?</figure>", gallery, re.DOTALL):
        answer, target = re.findall(r'<p class="tagged">.*?</p>', card, re.DOTALL)
        assert answer.count("differs") == target.count("differs") > 0
    assert re.search(r'<mark class="\w+" title="B-PER">Ada<small>PER</small></mark>\s+<mark', gallery)
    assert '<mark class="three" title="I-PER">Babbage</mark>' in gallery, "an entity has one label"


def test_boxes_are_drawn_over_their_picture(gallery: str) -> None:
    assert gallery.count("<image href=") == 24
    assert gallery.count("<rect") == 24 * 3
    assert ">cyclist 0.71</text>" in gallery
    assert "3 boxes: car 0.98, cyclist 0.71, pedestrian 0.42" in gallery


def test_embeddings_list_their_neighbors_and_mark_their_own(series: str) -> None:
    assert series.count("<li>") == 12 * 2 * 5
    assert 0 < series.count("✓ its own") <= 12


def test_curves_of_one_length_share_a_drawing_with_axes(series: str) -> None:
    assert series.count("<svg") == 12 * 2
    assert series.count("<title>forecast, future</title>") == 12
    assert series.count('class="axis-title">position</text>') == 12 * 2


def test_malformed_parts_of_a_sample_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    parts: list[dict[str, Any]] = [
        {"kind": "picture", "png": 'x" onerror="alert(1)'},
        {"kind": "boxes", "png": "x", "boxes": [{"box": [0, 0, 1, 1], "label": "a"}]},
        {"kind": "row", "row": [["none", None]]},
        {"kind": "curve", "values": [None, 1.0, None, 2.0]},
        {"kind": "curve", "values": [None]},
        {"kind": "unknown", "values": [1]},
        {},
    ]
    shown = [{"name": "part", **part} for part in parts]
    write_json(run.output("evaluate") / "worst.json", {"metric": "m", "samples": [{"index": 1, "shown": shown}]})
    page = section(report(run), "Worst samples")
    assert page.count("<svg") == 1
    assert "onerror" not in page
