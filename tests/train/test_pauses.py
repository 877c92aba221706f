from __future__ import annotations

import time

import pytest

from train.pauses import Pauses


def test_a_line_tells_the_mean_of_its_pauses_and_the_end_their_sum() -> None:
    pauses = Pauses()
    assert pauses.told() == {}
    for _ in range(2):
        with pauses.measured():
            time.sleep(0.02)
    told = pauses.told()["checkpoint_seconds"]
    assert told >= 0.02
    assert pauses.seconds == pytest.approx(2 * told)
    assert (pauses.count, pauses.told()) == (2, {})
