"""Training samples a quantiser cannot learn from are told, with what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from export.variants.calibration import calibration
from pipeline.spec.errors import DataError
from pipeline.spec.signature import TensorSpec

from .net import WIDE, Array, Hills

SPECS = (TensorSpec(name="x", datatype="FP32", shape=("batch", WIDE)),)


def columns(x: Array) -> dict[str, Array]:
    return {"x": x, "label": np.zeros(len(x), np.int64)}


def test_samples_are_spread_over_the_whole_split_and_come_in_small_batches() -> None:
    x = np.repeat(np.arange(1000, dtype=np.float32)[:, None], WIDE, axis=1)
    feeds = calibration(Hills(columns(x)), SPECS, 40)
    assert [len(feed["x"]) for feed in feeds] == [16, 16, 8]
    taken = np.concatenate([feed["x"][:, 0] for feed in feeds])
    assert (taken == np.arange(0, 1000, 25)).all()


def test_all_samples_are_taken_where_there_are_no_more() -> None:
    assert (
        sum(len(feed["x"]) for feed in calibration(Hills(columns(np.ones((20, WIDE), np.float32))), SPECS, 256)) == 20
    )


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((64, WIDE)), "gives `x` as float64, the model takes float32; make data"),
        (np.ones((64, WIDE), np.uint8), "gives `x` as uint8, the model takes float32"),
        (np.ones((64, 3), np.float32), r"gives `x` of shape \[16, 3\], the model takes \['batch', 16\]"),
        (np.full((64, WIDE), np.nan, np.float32), "has NaN or infinity in `x`, which has no range"),
        (np.ones((0, WIDE), np.float32), r"data\('train'\): the split is empty"),
        (np.ones((9, WIDE), np.float32), "9 training samples are too few to learn ranges from; give 16 at least"),
    ],
)
def test_what_has_no_range_to_learn_is_told(x: Array, message: str) -> None:
    with pytest.raises(DataError, match=message):
        calibration(Hills(columns(x)), SPECS, 256)


def test_too_few_may_also_be_what_was_asked_for() -> None:
    with pytest.raises(DataError, match=r"3 training samples are too few.*export.calibration_samples"):
        calibration(Hills(), SPECS, 3)


def test_an_input_that_training_data_lack_is_named() -> None:
    with pytest.raises(DataError, match="no column x, which the task names as an input"):
        calibration(Hills({"z": np.ones((64, WIDE), np.float32)}), SPECS, 256)
