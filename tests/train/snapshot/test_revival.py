from __future__ import annotations

from typing import Any

import pytest

from train.checkpoint import Progress
from train.checkpoint.manifest import Manifest, Written
from train.snapshot.revival import candidates, senders

IDENTITY = {"samples": 37}


def manifest(step: int, digest: str = "a", **more: Any) -> bytes:
    body = {"scaler": {}, "identity": IDENTITY, "world_size": 1, "files": (Written("0.safetensors", 1, digest),)}
    return Manifest(Progress(step), **{**body, **more}).encode()


def test_candidates_are_newest_first_and_those_of_other_data_are_none() -> None:
    strange = manifest(99, identity={"samples": 38})
    told = [{10: manifest(10), 20: manifest(20)}, {20: manifest(20), 30: manifest(30), 99: strange}]
    assert candidates(told, IDENTITY) == [manifest(30), manifest(20), manifest(10)]


def test_one_step_made_twice_in_different_parts_is_two_candidates() -> None:
    assert len(candidates([{20: manifest(20, "a")}, {20: manifest(20, "b")}], IDENTITY)) == 2


def test_a_damaged_manifest_is_passed_over_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    flipped = manifest(20).replace(b'"step": 20', b'"step": 21')
    assert candidates([{20: flipped, 10: manifest(10)}], IDENTITY) == [manifest(10)]
    assert "warning: a snapshot is passed over: the digest of its manifest does not match" in capsys.readouterr().err


def test_what_a_machine_lacks_is_sent_by_the_first_that_has_it() -> None:
    names = ["0", "1", "2"]
    assert senders(names, {0: {"0", "1", "2"}, 2: {"0", "1", "2"}}) == {}
    assert senders(names, {0: {"0", "2"}, 2: {"1", "2"}}) == {"0": 0, "1": 2}


def test_what_nobody_has_makes_it_no_snapshot() -> None:
    assert senders(["0", "1"], {0: {"0"}, 2: {"0"}}) is None
