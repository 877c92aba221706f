from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage  # type: ignore[import-untyped]
from sklearn.datasets import load_digits, load_wine

from pipeline.data_checks.copies import describe_pictures, find_picture_copies
from pipeline.data_checks.near_duplicates import count_different_bits, jaccard, shingle_hashes
from pipeline.data_checks.run_checks import write_checks

from .conftest import Check, Columns, alarms, alarms_of, normal

COPIES = 10


def moved(values: Any, size: float, seed: int = 5) -> Any:
    return values + np.float32(size) * normal(*values.shape, seed=seed)


def with_copies(train: Any, test: Any, copies: Any) -> tuple[Columns, Columns]:
    """Make the first test samples near-duplicates of the last training samples."""
    return {"x": train}, {"x": np.concatenate([copies, test])}


def pairs(found: Any) -> set[tuple[int, int]]:
    return {(pair.a[1], pair.b[1]) for some in found.near_duplicates.values() for pair in some if pair.b[0] == "test"}


def planted(train: Any) -> set[tuple[int, int]]:
    return {(len(train) - COPIES + i, i) for i in range(COPIES)}


def pictures() -> tuple[Any, Any]:
    images = (load_digits().images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order[:700]], images[order[700:900]]


def texts(count: int, seed: int, length: int = 64) -> Any:
    return np.minimum(np.random.default_rng(seed).zipf(1.3, (count, length)), 4000)


def edited(ids: Any) -> Any:
    """Replace one token of each text."""
    changed = ids.copy()
    changed[:, 20] = 5000
    return changed


def scattered(seed: int, count: int) -> Any:
    """Points in a few narrow, distant clusters, where most planes separate nothing."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, 12)) * 0.3 + generator.integers(0, 3, (count, 1)) * 5).astype(np.float32)


def vectors() -> tuple[Any, Any]:
    return normal(700, 24), normal(200, 24, seed=1)


@pytest.mark.parametrize(
    ("sides", "copy"),
    [
        (pictures, lambda x: moved(x, 0.01)),
        (pictures, lambda x: 0.6 * x + 0.2),
        (vectors, lambda x: moved(x, 0.1)),
        (lambda: (scattered(0, 700), scattered(1, 200)), lambda x: moved(x, 0.01)),
        (lambda: (texts(700, 0), texts(200, 1)), edited),
    ],
    ids=["pictures with noise", "pictures lit otherwise", "vectors", "vectors in clouds", "texts with another word"],
)
def test_near_duplicates_are_found_and_nothing_else(check: Check, sides: Any, copy: Any) -> None:
    train, test = sides()
    clean = check({"x": train}, {"x": test})
    assert pairs(clean) == set()
    assert alarms_of(clean, "near") == []
    found = check(*with_copies(train, test, copy(train[-COPIES:])))
    assert len(pairs(found) & planted(train)) >= COPIES - 1
    assert pairs(found) <= planted(train)
    (finding,) = alarms_of(found, "near")
    assert finding.level == "warn"
    assert "pairs of samples in two splits are nearly identical, as" in finding.detail
    assert "keep samples of one group" in finding.detail


def test_near_duplicates_may_stop_or_not_be_searched(check: Check) -> None:
    train, test = vectors()
    sides = with_copies(train, test, moved(train[-COPIES:], 0.1))
    (finding,) = alarms_of(check(*sides, copies="error"), "near")
    assert finding.level == "error"
    assert check(*sides, copies="exact").near_duplicates == {}


@pytest.mark.parametrize(("action", "level"), [("error", "error"), ("warn", "warn"), ("exact", "warn"), ("off", None)])
def test_identical_samples_are_reported_and_left_to_the_gate(check: Check, action: str, level: str | None) -> None:
    train, test = vectors()
    sides = *with_copies(train, test, train[-COPIES:]), {"x": normal(200, 24, seed=2)}
    found = check(*sides, copies=action)
    assert [one.level for one in alarms_of(found, "copies")] == [level] * (level is not None)
    assert found.copies == list(range(COPIES)) * (level is not None)
    assert pairs(found) == set()
    assert len(found.duplicates) == COPIES


def test_repeated_test_samples_are_left_to_the_gate_except_of_a_ranker(check: Check) -> None:
    train, test = normal(700, 5), np.repeat(normal(100, 5, seed=1), 2, axis=0)
    sides = [{"x": rows, "relevance": np.zeros(len(rows))} for rows in (train, test)]
    assert check(*sides, inputs=["x"]).copies == list(range(1, 200, 2))
    assert check(*sides, inputs=["x"], ranks=True).copies == []


def test_test_set_of_training_samples_only_stops(check: Check) -> None:
    train, _ = vectors()
    sides = [{"x": train}, {"x": train[:200]}, {"x": normal(200, 24, seed=2)}]
    (_, stop) = alarms_of(check(*sides), "copies")
    assert (stop.where, stop.level) == ("test", "error")
    assert "so that none is left to judge by" in stop.detail
    assert alarms_of(check(*sides, copies="off"), "copies") == []


def few_flags(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 2, (count, 12)).astype(np.float32)


def one_hot(count: int) -> Any:
    return np.eye(10, dtype=np.float32)[np.random.default_rng(0).integers(0, 10, (count, 3))].reshape(count, 30)


def repeated_rows(count: int) -> Any:
    return np.random.default_rng(0).permutation(np.repeat(normal(count // 2, 12), 2, axis=0))


@pytest.mark.parametrize(
    ("draw", "natural"), [(few_flags, True), (one_hot, True), (repeated_rows, False)], ids=["flags", "one-hot", "rows"]
)
def test_equal_samples_of_inputs_with_few_values_are_no_copies(check: Check, draw: Any, natural: bool) -> None:
    train, validation, test = ({"x": rows} for rows in np.split(draw(7500), [4500, 6000]))
    found = check(train, test, validation)
    (warning,) = alarms_of(found, "copies")
    assert warning.level == "warn"
    assert ("so they count like all others" in warning.detail, found.copies == []) == (natural, natural)
    stop = check(train, {"x": train["x"][:1500]}, validation)
    expected = [] if draw is one_hot else ["error"]  # of the thousand possible rows, all are in train
    assert [one.level for one in alarms_of(stop, "copies") if one.where == "test"] == expected


def test_similar_wines_are_not_near_duplicates(check: Check) -> None:
    data = load_wine().data.astype(np.float32)
    order = np.random.default_rng(0).permutation(len(data))
    found = check({"x": data[order[:100]]}, {"x": data[order[100:]]})
    assert [one.where for one in found.results if one.check == "near"] == ["x"]
    assert alarms_of(found, "near") == []


def as_columns(values: Any) -> Columns:
    return {f"c{i}": column for i, column in enumerate(values.T)}


def test_scalars_are_compared_as_one_vector(check: Check) -> None:
    train, test = vectors()
    copies = moved(train[-COPIES:], 0.1)
    found = check(as_columns(train), as_columns(np.concatenate([copies, test])))
    assert pairs(found) == planted(train)
    assert [name for name, some in found.near_duplicates.items() if some] == ["c0 and 23 more"]


@pytest.mark.parametrize("split", [lambda values: {"x": values}, as_columns], ids=["vectors", "scalars"])
def test_short_rows_are_copies_if_much_closer_than_neighbors(check: Check, split: Any) -> None:
    """Skewed numbers: rows in their dense region are close to each other, and no copies."""
    train, test = np.exp(2 * normal(600, 4)), np.exp(2 * normal(200, 4, seed=1))
    assert pairs(check(split(train), split(test))) == set()
    copies = train[-COPIES:] * (1 + 1e-4 * normal(COPIES, 4, seed=2))
    assert pairs(check(split(train), split(np.concatenate([copies, test])))) == planted(train)


def test_undetectable_duplicates_are_noted(check: Check) -> None:
    values = np.ones((100, 20), np.float32)
    note = "x: samples of train do not differ, so near-duplicates cannot be detected"
    assert note in check({"x": values[:60]}, {"x": values[60:]}).notes


@pytest.mark.parametrize("kind", ["mask", "places", "places of packed texts"])
def test_masks_and_positions_are_not_texts(check: Check, kind: str) -> None:
    start = np.random.default_rng(0).integers(8, 56, (100, 1))
    place = np.arange(64)
    packed = np.where(place < start, place, place - start)
    ids = {"mask": place < start, "places": np.tile(place, (100, 1)), "places of packed texts": packed}[kind]
    assert check({"x": ids.astype(np.int64)}, {"x": ids[:50].astype(np.int64)}).near_duplicates == {}


def test_texts_from_one_template_raise_no_alarm(check: Check) -> None:
    """All share most of their tokens, which is no leak."""

    def filled(count: int, seed: int) -> Any:
        ids = np.tile(np.random.default_rng(9).permutation(64), (count, 1))
        ids[:, 20:36] = np.random.default_rng(seed).integers(100, 4000, (count, 16))
        return ids

    assert alarms(check({"x": filled(600, 0)}, {"x": filled(200, 1)})) == []


def test_jaccard_index_of_texts() -> None:
    a, b = np.array([[1, 2, 3, 4, 5, 0, 0, 0]]), np.array([[1, 2, 3, 4, 6, 0, 0, 0]])
    first, second = ({tuple(row[i : i + 3]) for i in range(6)} - {(0, 0, 0)} for row in (a[0], b[0]))
    assert jaccard(shingle_hashes(a)[0], shingle_hashes(b)[0]) == pytest.approx(
        len(first & second) / len(first | second)
    )


def test_different_bits_are_counted() -> None:
    a, b = np.array([[0b1011, 1]], np.uint32), np.array([[0b0010, 1 << 31]], np.uint32)
    assert count_different_bits(a, b).tolist() == [4]


def test_images_may_have_channels_last_and_be_bytes(check: Check) -> None:
    generator = np.random.default_rng(0)
    base = torch.nn.functional.interpolate(torch.rand(300, 3, 6, 6, generator=torch.Generator().manual_seed(0)), 40)
    images = (base.permute(0, 2, 3, 1).numpy() * 200).astype(np.uint8)
    train, test = images[:200], images[200:]
    noisy = train[-COPIES:] + generator.integers(0, 12, train[-COPIES:].shape).astype(np.uint8)
    assert pairs(check({"x": train}, {"x": test})) == set()
    assert pairs(check(*with_copies(train, test, noisy))) == planted(train)


def rotated(pictures: Any) -> Any:
    return np.stack([ndimage.rotate(picture, 7, axes=(2, 1), reshape=False, order=1) for picture in pictures])


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x[..., ::-1].copy(),
        lambda x: x[..., ::-1, :].copy(),
        rotated,
        lambda x: np.roll(x, (2, -3), axis=(2, 3)),
        lambda x: moved(x, 0.05),
    ],
    ids=["mirrored left to right", "mirrored top to bottom", "rotated", "shifted", "noise of 5 percent"],
)
def test_transformed_pictures_are_found(check: Check, tmp_path: Path, copy: Any) -> None:
    train, test = (
        torch.nn.functional.interpolate(torch.from_numpy(side), 28, mode="bilinear").numpy() for side in pictures()
    )
    found = check(*with_copies(train, test, copy(train[-COPIES:])))
    assert pairs(found) == planted(train)
    write_checks(found, tmp_path)
    assert json.loads((tmp_path / "near_copies.json").read_text()) == {"test": list(range(COPIES))}


def test_only_some_test_pictures_are_compared_with_many_training_pictures(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = pictures()
    monkeypatch.setattr("pipeline.data_checks.copies._MAX_PAIRS", 700 * 50)
    notes = check({"x": train}, {"x": test}).notes
    assert any("searched for 50 of 200 test pictures, chosen at random" in note for note in notes)


def test_drawings_of_a_few_parameters_are_no_transformed_copies() -> None:
    """Shifted shapes of one size nearly equal others; only a few of 200 are taken for copies."""
    place, size = np.random.default_rng(0).integers(6, 20, (900, 2)), np.random.default_rng(1).uniform(2, 5, (900, 2))
    grid = np.arange(26)
    bars = np.exp(-(((grid - place[:, :1]) / size[:, :1]) ** 4))[:, :, None]
    drawn = torch.from_numpy(bars * np.exp(-(((grid - place[:, 1:]) / size[:, 1:]) ** 4))[:, None]).float()
    copies, _, _ = find_picture_copies(describe_pictures(drawn[:700]), [drawn[700:]])
    assert len(copies) <= 10


def test_flags_and_numbers_close_to_each_other_are_no_copies(check: Check) -> None:
    def rows(count: int, seed: int) -> Any:
        flags = np.random.default_rng(seed).integers(0, 2, (count, 8))
        return np.column_stack([flags, normal(count, seed=seed)]).astype(np.float32)

    assert pairs(check({"x": rows(360, 0)}, {"x": rows(240, 1)})) == set()
    assert pairs(check({"x": normal(500)}, {"x": normal(300, seed=1)})) == set()
