from __future__ import annotations

import pytest

from pipeline.spec.failure import asked_to_go, ending


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, "rank 1 was killed (SIGKILL)"),
        (-11, "rank 1 was ended by SIGSEGV"),
        (-99, "rank 1 was ended by signal 99"),
        (3, "rank 1 exited with status 3"),
    ],
)
def test_an_end_is_told_by_its_status(status: int, said: str) -> None:
    assert ending("rank 1", status) == said


def test_who_was_asked_to_go_is_told_from_who_was_killed() -> None:
    assert [asked_to_go(status) for status in (-15, 143, -9, 1)] == [True, True, False, False]
