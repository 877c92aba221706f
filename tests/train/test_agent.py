from __future__ import annotations

import os
import signal
from pathlib import Path

from pipeline.spec.errors import DataError, LostContact, Stalled, write_error
from train.agent import described

HOST = os.uname().nodename


def test_a_process_that_was_killed_is_why_the_others_lost_contact(tmp_path: Path) -> None:
    write_error(LostContact("rank 0 lost contact"), tmp_path)
    assert described({0: 1, 1: -signal.SIGKILL}, tmp_path) == {"reason": f"rank 1 on {HOST} was killed (SIGKILL)"}


def test_a_process_that_was_killed_because_it_did_not_answer_is_told_as_such(tmp_path: Path) -> None:
    write_error(Stalled("rank 1 does not answer: it is stopped (SIGSTOP)"), tmp_path)
    told = described({0: 1, 1: -signal.SIGKILL}, tmp_path)
    assert told == {"reason": "rank 1 does not answer: it is stopped (SIGSTOP)"}


def test_an_error_that_would_come_again_ends_training(tmp_path: Path) -> None:
    write_error(DataError("the loss is not finite"), tmp_path)
    assert described({0: 2, 1: -signal.SIGTERM}, tmp_path) == {"reason": "the loss is not finite", "passing": False}
