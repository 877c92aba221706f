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


def test_of_several_that_ended_the_one_is_told_that_others_fell_with(tmp_path: Path) -> None:
    statuses = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGABRT}
    assert described(statuses, tmp_path) == {"reason": f"rank 1 on {HOST} was killed (SIGKILL)"}


def test_lost_contact_without_a_cause_here_is_an_echo_of_one_elsewhere(tmp_path: Path) -> None:
    write_error(LostContact("rank 1 lost contact"), tmp_path)
    assert described({1: 1}, tmp_path) == {"reason": "rank 1 lost contact", "echo": True}


def test_processes_that_were_asked_to_go_are_told_where_nobody_else_ended(tmp_path: Path) -> None:
    assert described({0: -15, 1: -15}, tmp_path) == {"reason": f"rank 0 on {HOST} was ended by SIGTERM"}


def test_a_process_that_ends_without_a_word_would_do_so_again(tmp_path: Path) -> None:
    found = described({0: 3}, tmp_path)
    assert found == {"reason": f"rank 0 on {HOST} exited with status 3 and left no reason", "passing": False}
