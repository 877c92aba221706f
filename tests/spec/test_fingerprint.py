from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.spec import fingerprint as module
from pipeline.spec.data import Samples
from pipeline.spec.fingerprint import fingerprint, sample_digests


def columns() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"x": generator.normal(size=(20, 3)).astype(np.float32), "label": generator.integers(0, 5, 20)}


def of(source: Any) -> str:
    return fingerprint(Samples("train", source))


def test_equal_data_have_equal_fingerprints_whatever_the_split_or_column_order() -> None:
    left, right = columns(), dict(reversed(columns().items()))
    assert fingerprint(Samples("train", left)) == fingerprint(Samples("test", right))


def test_a_data_set_and_columns_of_the_same_samples_are_the_same_data() -> None:
    data = columns()
    items = [{name: column[i] for name, column in data.items()} for i in range(20)]
    assert of(items) == of(data)


@pytest.mark.parametrize("size", [1, 7, 20])
def test_the_fingerprint_does_not_depend_on_how_much_is_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    expected = of(columns())
    monkeypatch.setattr(module, "_BATCH", size)
    assert of(columns()) == expected


def test_one_flipped_bit_changes_it() -> None:
    data = columns()
    before = of(data)
    data["x"].view(np.uint8)[7, 2] ^= 1
    assert of(data) != before


def test_one_label_changes_it() -> None:
    data = columns()
    before = of(data)
    data["label"][19] += 1
    assert of(data) != before


def test_the_order_of_samples_changes_it() -> None:
    data = columns()
    assert of({name: column[::-1].copy() for name, column in data.items()}) != of(data)


def test_type_shape_and_name_change_it_though_the_bytes_are_the_same() -> None:
    zeros = np.zeros((4, 6), np.float32)
    found = {
        of(source)
        for source in (
            {"x": zeros},
            {"y": zeros},
            {"x": zeros.view(np.int32)},
            {"x": zeros.reshape(4, 2, 3)},
            {"x": zeros[:3]},
        )
    }
    assert len(found) == 5


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_every_type_of_number_has_a_fingerprint(kind: torch.dtype) -> None:
    assert of({"x": torch.tensor([0, 1]).to(kind)}) != of({"x": torch.tensor([1, 1]).to(kind)})


def test_samples_are_duplicates_by_the_named_columns_alone() -> None:
    samples = Samples("train", {"x": np.array([[1, 2], [3, 4], [1, 2]]), "label": np.array([0, 1, 1])})
    first, second, third = sample_digests(samples, ["x"])
    assert first == third != second
    assert len(set(sample_digests(samples, ["x", "label"]))) == 3
