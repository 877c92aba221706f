from __future__ import annotations

import pytest
import torch

from pipeline.contract.data import Samples
from pipeline.data_checks.run_checks import check_time_order
from pipeline.system.errors import ConfigError


def _splits(**first: int) -> dict[str, Samples]:
    return {
        name: Samples(name, {"x": torch.zeros(10, 2), "day": torch.arange(start, start + 10)})
        for name, start in first.items()
    }


def test_splits_in_the_order_of_time_pass_and_without_a_named_column_all_do() -> None:
    assert list(check_time_order(_splits(train=0, validation=10, test=20), "day", "error")) == []
    assert list(check_time_order(_splits(train=5, validation=0, test=0), "", "error")) == []


def test_test_samples_before_the_end_of_training_are_counted() -> None:
    (result,) = check_time_order(_splits(train=5, validation=15, test=10), "day", "error")
    assert (result.level, result.value) == ("error", 4.0)
    assert "test.day: 4 of 10 samples are earlier than the newest training sample (14)" in result.sentence()


def test_an_unknown_column_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"data\('train'\) has no column week \(x, day\)"):
        list(check_time_order(_splits(train=0, test=0), "week", "error"))
