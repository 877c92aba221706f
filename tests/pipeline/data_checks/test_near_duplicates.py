from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_wine

from pipeline.data_checks.near_duplicates import different_bits, hashed, shared

from .conftest import LookAt, Made, alarms, normal, told

COPIES = 10


def moved(values: Any, size: float, seed: int = 5) -> Any:
    return values + np.float32(size) * normal(*values.shape, seed=seed)


def with_copies(train: Any, test: Any, copies: Any) -> tuple[Made, Made]:
    """The first test samples are nearly the last training samples."""
    return {"x": train}, {"x": np.concatenate([copies, test])}


def pairs(found: Any) -> set[tuple[int, int]]:
    return {(pair.a[1], pair.b[1]) for some in found.near.values() for pair in some if pair.b[0] == "test"}


def planted(train: Any) -> set[tuple[int, int]]:
    return {(len(train) - COPIES + i, i) for i in range(COPIES)}


def pictures() -> tuple[Any, Any]:
    images = (load_digits().images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order[:700]], images[order[700:900]]


def texts(count: int, seed: int, length: int = 64) -> Any:
    return np.minimum(np.random.default_rng(seed).zipf(1.3, (count, length)), 4000)


def edited(ids: Any) -> Any:
    """One word of each is another."""
    changed = ids.copy()
    changed[:, 20] = 5000
    return changed


def scattered(seed: int, count: int) -> Any:
    """In a few narrow clouds far apart, where the side of a plane tells little."""
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
def test_near_copies_are_found_by_their_places_and_nothing_else_is(look_at: LookAt, sides: Any, copy: Any) -> None:
    train, test = sides()
    clean = look_at({"x": train}, {"x": test})
    assert pairs(clean) == set()
    assert told(clean, "near") == []
    found = look_at(*with_copies(train, test, copy(train[-COPIES:])))
    assert len(pairs(found) & planted(train)) >= COPIES - 1
    assert pairs(found) <= planted(train)
    (finding,) = told(found, "near")
    assert finding.level == "warn"
    assert "pairs in two splits are nearly one sample, as" in finding.detail
    assert "keep what belongs together" in finding.detail


def test_exact_copies_are_told_by_the_check_on_leaks_alone(look_at: LookAt) -> None:
    train, test = vectors()
    found = look_at(*with_copies(train, test, train[-COPIES:]))
    assert pairs(found) == set()


def test_wine_is_no_copy_of_wine(look_at: LookAt) -> None:
    data = load_wine().data.astype(np.float32)
    order = np.random.default_rng(0).permutation(len(data))
    found = look_at({"x": data[order[:100]]}, {"x": data[order[100:]]})
    assert [one.where for one in found.findings if one.check == "near"] == ["x"]
    assert told(found, "near") == []


def test_numbers_that_stand_alone_are_a_vector_together(look_at: LookAt) -> None:
    train, test = vectors()

    def columns(values: Any) -> Made:
        return {f"c{i}": values[:, i] for i in range(24)}

    copies = moved(train[-COPIES:], 0.1)
    found = look_at(columns(train), columns(np.concatenate([copies, test])))
    assert pairs(found) == planted(train)
    assert [name for name, some in found.near.items() if some] == ["c0 and 23 more"]


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (normal(100, 3), "x: too few numbers to tell a near copy from a neighbour"),
        (np.ones((100, 20), np.float32), "x: samples of train do not differ, so near copies cannot be told"),
    ],
)
def test_where_a_copy_cannot_be_told_that_is_said(look_at: LookAt, values: Any, note: str) -> None:
    assert note in look_at({"x": values[:60]}, {"x": values[60:]}, leaks="warn").notes


@pytest.mark.parametrize("kind", ["mask", "places", "places of packed texts"])
def test_a_mask_and_positions_are_no_texts(look_at: LookAt, kind: str) -> None:
    start = np.random.default_rng(0).integers(8, 56, (100, 1))
    place = np.arange(64)
    packed = np.where(place < start, place, place - start)
    ids = {"mask": place < start, "places": np.tile(place, (100, 1)), "places of packed texts": packed}[kind]
    assert look_at({"x": ids.astype(np.int64)}, {"x": ids[:50].astype(np.int64)}).near == {}


def test_a_crowd_of_texts_from_one_template_stays_cheap_and_quiet(look_at: LookAt) -> None:
    """All share most of their words: that is how they are, not a leak."""

    def filled(count: int, seed: int) -> Any:
        ids = np.tile(np.random.default_rng(9).permutation(64), (count, 1))
        ids[:, 20:36] = np.random.default_rng(seed).integers(100, 4000, (count, 16))
        return ids

    assert alarms(look_at({"x": filled(600, 0)}, {"x": filled(200, 1)})) == []


def test_the_check_can_be_made_strict_or_left_out(look_at: LookAt) -> None:
    train, test = vectors()
    sides = with_copies(train, test, moved(train[-COPIES:], 0.1))
    (finding,) = told(look_at(*sides, near="error"), "near")
    assert finding.level == "error"
    assert look_at(*sides, near="off").near == {}
    assert pairs(look_at(*sides, near_distance=0.01)) == set()


def test_what_texts_share_is_jaccards_measure() -> None:
    a, b = np.array([[1, 2, 3, 4, 5, 0, 0, 0]]), np.array([[1, 2, 3, 4, 6, 0, 0, 0]])
    first, second = ({tuple(row[i : i + 3]) for i in range(6)} - {(0, 0, 0)} for row in (a[0], b[0]))
    assert shared(hashed(a)[0], hashed(b)[0]) == pytest.approx(len(first & second) / len(first | second))


def test_bits_that_differ_are_counted() -> None:
    a, b = np.array([[0b1011, 1]], np.uint32), np.array([[0b0010, 1 << 31]], np.uint32)
    assert different_bits(a, b).tolist() == [4]


def test_pictures_may_have_their_channels_last_and_be_bytes(look_at: LookAt) -> None:
    generator = np.random.default_rng(0)
    base = torch.nn.functional.interpolate(torch.rand(300, 3, 6, 6, generator=torch.Generator().manual_seed(0)), 40)
    images = (base.permute(0, 2, 3, 1).numpy() * 200).astype(np.uint8)
    train, test = images[:200], images[200:]
    noisy = train[-COPIES:] + generator.integers(0, 12, train[-COPIES:].shape).astype(np.uint8)
    assert pairs(look_at({"x": train}, {"x": test})) == set()
    assert pairs(look_at(*with_copies(train, test, noisy))) == planted(train)
