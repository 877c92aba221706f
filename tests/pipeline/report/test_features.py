"""Histograms of inputs and labels by split, from the profile that prepare writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contract.run import Run
from pipeline.data_checks.profile import HistogramBuilder, Profile, SchemaBuilder, choose_features
from pipeline.report.features import _bounds, _rebin
from pipeline.system.files import digest_file, write_atomic, write_json

from .example_runs import change, make_other_run, make_run
from .pages import report, section, sections


def add_profile(run: Run, shift: float = 0.0, **columns: torch.Tensor) -> None:
    """Write the profile of a table whose test split is shifted."""
    torch.manual_seed(0)
    train = {"age": 40 + 10 * torch.randn(2000), "class label": torch.arange(2000) % 3, **columns}
    features = choose_features(train)
    batches = {"train": train, "test": train | {"age": train["age"] + shift}}
    schemas, splits = {}, {}
    for split, batch in batches.items():
        schema, histograms = SchemaBuilder(), HistogramBuilder(features)
        schema.add(batch)
        histograms.add(batch)
        schemas[split], splits[split] = schema.columns, histograms.histograms()
    by_feature = {feature.name: {split: splits[split][feature.name] for split in splits} for feature in features}
    filled = tuple(feature.model_copy(update={"splits": by_feature[feature.name]}) for feature in features)
    inputs = tuple(name for name in train if name != "class label")
    profile = Profile(inputs=inputs, classes=("a", "b", "c"), columns=schemas, features=filled)
    write_json(run.output("prepare") / "profile.json", profile.model_dump(mode="json"))


def test_inputs_and_labels_are_drawn_by_split_with_their_drift(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_profile(run, shift=10.0)
    drift = {"check": "drift", "where": "test.age", "level": "warn", "value": 0.9, "limit": 0.2, "detail": ""}
    write_json(run.output("prepare") / "checks.json", {"checks": [drift]})
    shown = section(report(run), "Inputs by split")
    assert re.findall(r"<figcaption><b>(.*?)</b>", shown) == ["age", "class label", "Drift"]
    (largest,) = re.findall(r"<desc>age in train, test; the largest difference to train is ([0-9.]+)%", shown)
    assert 30 < float(largest) < 45, "of two normal distributions that differ by a standard deviation, 38%"
    assert "class label in train, test; the largest difference to train is 0.0%" in shown
    assert "age: test against train: 0.9" in shown
    assert "No other data of a champion is known" in shown


def test_training_data_of_the_champion_are_drawn_if_its_run_exists(tmp_path: Path) -> None:
    run, champion = make_run(tmp_path), make_other_run(tmp_path)
    add_profile(run)
    add_profile(champion, shift=99.0)
    champion.bundle_path.mkdir(parents=True)
    (champion.bundle_path / "manifest.json").write_text("{}")
    bundle = digest_file(champion.bundle_path / "manifest.json")
    change_record(champion, "export", outputs={"bundle/manifest.json": bundle})
    change_record(run, "prepare", parts={"reference:champion": bundle})
    shown = section(report(run), "Inputs by split")
    assert "age in train, test, champion’s training data; the largest difference to train is 0.0%" in shown
    change_record(run, "prepare", parts={"reference:champion": "f" * 64})
    assert "champion’s training data" not in section(report(run), "Inputs by split")


def change_record(run: Run, step: str, **values: Any) -> None:
    body = run.read()
    record = body.steps.get(step) or body.steps["prepare"].model_copy(update={"step": step})
    steps = {**body.steps, step: record.model_copy(update=values)}
    write_atomic(run.path / "run.json", body.model_copy(update={"steps": steps}).model_dump_json())


def test_features_that_differ_most_are_chosen_of_many(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_profile(run, shift=20.0, wide=torch.rand(2000, 40))
    shown = section(report(run), "Inputs by split")
    titles = re.findall(r"<figcaption><b>(.*?)</b>", shown)
    assert len(titles) == 12
    assert {"age", "class label"} < set(titles)
    assert "the 12 of 42 features that differ most" in shown


def shares_of(values: list[float]) -> tuple[list[float], list[float]]:
    """Return the bounds of the drawn bins, and the share of samples in each."""
    column = {"x": torch.tensor(values, dtype=torch.float64)}
    (feature,) = choose_features(column) if len(set(values)) > 1 else choose_features({"x": column["x"] * 1.5})
    builder = HistogramBuilder((feature,))
    builder.add(column)
    bounds = _bounds(feature.edges)
    return bounds, _rebin(feature.edges, builder.histograms()["x"].bins, bounds)


@pytest.mark.parametrize("values", [[1.0] * 9, [0.0, 1.0] * 50, [0.0] * 90 + [1e9], list(range(100)), [1e300, -1e300]])
def test_every_sample_is_in_a_bin_of_equal_width(values: list[float]) -> None:
    bounds, shares = shares_of(values)
    assert bounds == sorted(set(bounds))
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("values", "shares"), [([0.0] * 30 + [1.0] * 10, [0.75, 0.25]), ([1.0, 2.0, 2.0, 3.0], [0.25, 0.5, 0.25])]
)
def test_few_integers_have_a_bin_each(values: list[float], shares: list[float]) -> None:
    assert shares_of(values)[1] == pytest.approx(shares)


def test_profile_of_another_version_leaves_the_other_sections_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    change(run.output("prepare") / "profile.json", features=[{"name": "age", "splits": {"train": {"bins": [1, 2]}}}])
    shown = sections(report(run, shapes=False))
    assert [title for title, text in shown.items() if "not in a format" in text] == ["Inputs by split"]
