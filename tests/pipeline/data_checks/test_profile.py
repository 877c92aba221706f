from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data_checks.profile import MOST_IDS, SUMS, Sketch, kind_of, lay_out, read_profile, write_profile

from .conftest import LookAt, alarms, normal, told


def sketched(batches: list[dict[str, Any]]) -> Any:
    tensors = [{name: torch.as_tensor(values) for name, values in batch.items()} for batch in batches]
    sketch = Sketch(lay_out(tensors[0]))
    for batch in tensors:
        sketch.add(batch)
    return sketch.histograms()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (torch.rand(300), "numbers"),
        (torch.rand(300, 64), "numbers"),
        (torch.rand(300, 300), "sums"),
        (torch.rand(300, 1, 8, 8), "sums"),
        (torch.zeros(300, 3, 8, 8, dtype=torch.uint8), "sums"),
        (torch.arange(300) % 10, "ids"),
        (torch.arange(300), "numbers"),
        (torch.arange(300) % 2 == 0, "ids"),
        (torch.zeros(300, 5, dtype=torch.int64), "numbers"),
        (torch.zeros(300, 128, dtype=torch.int32), "ids"),
    ],
)
def test_few_numbers_are_looked_at_one_by_one_and_many_by_their_sums(values: torch.Tensor, kind: str) -> None:
    assert kind_of(values) == kind


def test_a_histogram_counts_every_number_once_and_knows_its_moments() -> None:
    values = np.random.default_rng(0).standard_normal(1000) + 1e6
    found = sketched([{"x": values[:400]}, {"x": values[400:]}])["x"]
    assert found.samples == sum(found.bins) == 1000
    assert (found.low, found.high) == (values.min(), values.max())
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.spread == pytest.approx(values.std(), rel=1e-6)


def test_batches_of_any_size_give_one_histogram() -> None:
    values = normal(1000, 3)
    whole = lay_out({"x": torch.from_numpy(values)})
    found = []
    for size in (1000, 7):
        sketch = Sketch(whole)
        for start in range(0, 1000, size):
            sketch.add({"x": torch.from_numpy(values[start : start + size])})
        found.append({name: one.bins for name, one in sketch.histograms().items()})
    assert found[0] == found[1]


def test_what_is_missing_is_in_no_bin() -> None:
    found = sketched([{"x": np.array([1.0, np.nan, 2.0, np.inf, 3.0])}])["x"]
    assert (found.samples, sum(found.bins), found.high) == (5, 3, 3.0)
    empty = sketched([{"x": np.full(5, np.nan)}])["x"]
    assert (empty.samples, sum(empty.bins), empty.low) == (5, 0, None)


def test_a_constant_has_a_bin_of_its_own_and_neighbours_on_both_sides() -> None:
    found = sketched([{"x": np.full(9, 4.0)}, {"x": np.array([3.0, 5.0])}])["x"]
    assert found.bins == (1, 9, 1)


def test_tokens_are_counted_by_frequency_and_the_rare_ones_together() -> None:
    ids = np.minimum(np.random.default_rng(0).geometric(0.004, (200, 64)), 2000)
    found = sketched([{"x": ids}])["x"]
    assert len(found.bins) == MOST_IDS + 1
    assert sum(found.bins) == ids.size
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    assert found.bins[-1] == counts[MOST_IDS:].sum()


def test_a_picture_is_its_mean_its_spread_and_a_few_projections(look_at: LookAt) -> None:
    found = look_at({"x": normal(300, 1, 9, 9)}, {"x": normal(100, 1, 9, 9, seed=1)})
    assert [feature.name for feature in found.profile.features] == [f"x ({name})" for name in SUMS]
    assert alarms(found) == []
    brighter = look_at({"x": normal(300, 1, 9, 9)}, {"x": normal(100, 1, 9, 9, seed=1) + 0.3})
    assert [one.where for one in told(brighter, "drift")] == ["validation.x (mean)", "test.x (mean)"]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(40) % 3 == 0,
        np.full(40, np.nan),
        np.full((40, 3), 2),
        np.zeros((40, 0), np.float32),
        np.arange(40, dtype=np.uint8),
        np.arange(40) * (1 + 1j),
        np.full(40, 1e308) * np.where(np.arange(40) % 2, 1, -1),
        np.arange(40) - (1 << 62),
        np.ones((40, 1, 1)),
    ],
    ids=["flags", "all missing", "constant codes", "no numbers", "bytes", "complex", "huge", "large ids", "one number"],
)
def test_odd_columns_are_looked_at_like_others(look_at: LookAt, tmp_path: Path, values: Any) -> None:
    found = look_at({"x": values}, {"x": values[:20]}, leaks="warn", missing="off")
    write_profile(tmp_path / "profile.json", found.profile)
    assert read_profile(tmp_path / "profile.json") == found.profile
    assert [one for one in found.findings if one.level == "error"] == []


def test_items_are_what_columns_are(look_at: LookAt) -> None:
    sides = [{"x": normal(90, 12, seed=i), "label": np.arange(90) % 3} for i in range(2)]
    first, second = (look_at(*sides, classes="abc", items=items) for items in (False, True))
    assert first.profile == second.profile
    assert first.findings == second.findings


def test_of_a_profile_that_cannot_be_read_there_is_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path / "profile.json") is None
    (tmp_path / "profile.json").write_text("{")
    assert read_profile(tmp_path / "profile.json") is None
