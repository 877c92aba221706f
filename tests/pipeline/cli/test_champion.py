from __future__ import annotations

from .conftest import Pipe


def test_only_a_bundle_can_be_promoted(pipe: Pipe) -> None:
    assert "has a bundle yet" in pipe("promote", expect=2).stderr


def test_there_must_be_something_to_go_back_to(pipe: Pipe) -> None:
    assert "there is no previous champion to go back to" in pipe("rollback", expect=2).stderr
