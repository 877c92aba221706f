from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data_checks.profile import MAX_IDS, SUMS, HistogramBuilder, choose_features, feature_kind, read_profile
from pipeline.data_checks.run_checks import write_checks

from .conftest import Check, alarms, alarms_of, normal


def sketched(batches: list[dict[str, Any]]) -> Any:
    tensors = [{name: torch.as_tensor(values) for name, values in batch.items()} for batch in batches]
    sketch = HistogramBuilder(choose_features(tensors[0]))
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
def test_short_vectors_are_profiled_by_number_and_long_ones_by_sums(values: torch.Tensor, kind: str) -> None:
    assert feature_kind(values) == kind


@pytest.mark.parametrize("size", [1000, 400, 7])
def test_histogram_counts_every_number_and_has_moments_whatever_the_batch_size(size: int) -> None:
    values = np.random.default_rng(0).standard_normal(1000) + 1e6
    sketch = HistogramBuilder(choose_features({"x": torch.from_numpy(values)}))
    for start in range(0, 1000, size):
        sketch.add({"x": torch.from_numpy(values[start : start + size])})
    found = sketch.histograms()["x"]
    assert found.samples == sum(found.bins) == 1000
    whole = HistogramBuilder(choose_features({"x": torch.from_numpy(values)}))
    whole.add({"x": torch.from_numpy(values)})
    assert found.bins == whole.histograms()["x"].bins
    assert (found.low, found.high) == (values.min(), values.max())
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.spread == pytest.approx(values.std(), rel=1e-6)


def test_missing_values_are_in_no_bin() -> None:
    found = sketched([{"x": np.array([1.0, np.nan, 2.0, np.inf, 3.0])}])["x"]
    assert (found.samples, sum(found.bins), found.high) == (5, 3, 3.0)
    empty = sketched([{"x": np.full(5, np.nan)}])["x"]
    assert (empty.samples, sum(empty.bins), empty.low) == (5, 0, None)


def test_constant_has_a_bin_with_neighbors() -> None:
    found = sketched([{"x": np.full(9, 4.0)}, {"x": np.array([3.0, 5.0])}])["x"]
    assert found.bins == (1, 9, 1)


def test_frequent_tokens_have_bins_and_rare_ones_share_one() -> None:
    ids = np.minimum(np.random.default_rng(0).geometric(0.004, (200, 64)), 2000)
    found = sketched([{"x": ids}])["x"]
    assert len(found.bins) == MAX_IDS + 1
    assert sum(found.bins) == ids.size
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    assert found.bins[-1] == counts[MAX_IDS:].sum()


def test_image_is_profiled_by_mean_spread_and_projections(check: Check) -> None:
    found = check({"x": normal(300, 1, 9, 9)}, {"x": normal(100, 1, 9, 9, seed=1)})
    assert [feature.name for feature in found.profile.features] == [f"x ({name})" for name in SUMS]
    assert alarms(found) == []
    brighter = check({"x": normal(300, 1, 9, 9)}, {"x": normal(100, 1, 9, 9, seed=1) + 0.3})
    assert [one.where for one in alarms_of(brighter, "drift")] == ["validation.x (mean)", "test.x (mean)"]


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
def test_unusual_columns_are_checked_like_others(check: Check, tmp_path: Path, values: Any) -> None:
    found = check({"x": values}, {"x": values[:20]}, missing="off", copies="off")
    write_checks(found, tmp_path)
    assert read_profile(tmp_path / "profile.json") == found.profile
    assert [one for one in found.results if one.level == "error"] == []


def test_items_and_columns_give_the_same_profile(check: Check) -> None:
    sides = [{"x": normal(90, 12, seed=i), "label": np.arange(90) % 3} for i in range(2)]
    first, second = (check(*sides, classes="abc", items=items) for items in (False, True))
    assert first.profile == second.profile
    assert first.results == second.results


def test_unreadable_profile_is_none(tmp_path: Path) -> None:
    assert read_profile(tmp_path / "profile.json") is None
    (tmp_path / "profile.json").write_text("{")
    assert read_profile(tmp_path / "profile.json") is None
