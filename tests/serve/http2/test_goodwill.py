from __future__ import annotations

import time

import pytest

from serve.http2 import goodwill
from serve.http2.goodwill import Goodwill


def test_it_is_used_up_comes_back_with_time_and_sooner_by_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    will = Goodwill()
    assert will.spend(goodwill._MOST)
    assert not will.spend(1)
    will.earn()
    assert will.spend(goodwill._EARNED - 1)
    assert not will.spend(1)
    now += 1
    assert will.spend(1)
    assert will.spend(goodwill._PER_SECOND - 2)
    assert not will.spend(2)


def test_it_is_never_more_than_at_the_beginning() -> None:
    will = Goodwill()
    for _ in range(10_000):
        will.earn()
    assert not will.spend(goodwill._MOST + goodwill._EARNED)
