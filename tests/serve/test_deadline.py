from __future__ import annotations

import math

from serve.deadline import of_parameter


def test_a_timeout_longer_than_any_number_of_seconds_is_none() -> None:
    assert of_parameter(2**64) == 2**64 / 1e6
    assert of_parameter(10**400) == of_parameter(0) == math.inf
