from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train import link, loops
from benchmarks.train.environment import peers_python
from benchmarks.train.loops import ratios_to, rows_of
from benchmarks.train.race import Course, Lap, race, rotations
from pipeline.system.errors import ResourceError, StageError

PYTHON = Path(sys.executable)


def test_every_contestant_has_every_position_equally_often() -> None:
    names = ["a", "b", "c"]
    orders = list(rotations(names, 6))
    assert all(sorted(order) == names for order in orders)
    for place in range(3):
        assert Counter(order[place] for order in orders) == {"a": 2, "b": 2, "c": 2}


def test_ratio_of_a_lap_faster_than_the_bare_loop_is_above_one() -> None:
    bare, ours = [Lap(2.0, 1.0), Lap(4.0, 1.0)], [Lap(1.0, 0.5), Lap(5.0, 0.5)]
    assert ratios_to(bare, ours) == [2.0, 0.8]
    course = Course("digits", processes=1, threads=1, lap=10, warm_laps=0, laps=2)
    rows = rows_of(course, [{"bare": bare, "ours": ours}, {"bare": bare, "ours": bare}])
    assert [(row.loop, row.median, row.low, row.high) for row in rows] == [
        ("bare", 1.0, 1.0, 1.0),
        ("ours", 1.0, 0.8, 2.0),
    ]
    assert [row.cpu_ms_per_step for row in rows] == [100.0, 75.0]


@pytest.mark.long
def test_a_quick_race_prints_a_ratio_for_every_loop() -> None:
    words = ["--quick", "--table", "loops", "--processes", "1", "--no-peers", "--threads", "1", "-o", "json"]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    argv = [sys.executable, "-m", "benchmarks.train", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["loops"]["rows"]
    assert [(row["workload"], row["processes"], row["loop"]) for row in rows] == [
        ("digits", 1, "ours"),
        ("digits", 1, "bare"),
        ("digits", 1, "tuned"),
    ]
    assert all(row["median"] > 0 and row["cpu_ms_per_step"] > 0 for row in rows)


def test_failing_contestant_is_named_with_its_error() -> None:
    course = Course("no-such-workload", processes=1, threads=1, lap=1, warm_laps=1, laps=1)
    with pytest.raises(StageError, match=r"bare gave up: .*KeyError: 'no-such-workload'"):
        race(course, {"bare": PYTHON})


def test_peers_that_cannot_be_installed_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="no environment for the peers"):
        peers_python(tmp_path / "file" / "peers")
    monkeypatch.setattr(loops, "FOLDER", tmp_path / "file" / "peers")
    found = loops.loops(loops.QUICK, [], [1], threads=1, peers=True)
    assert "peers skipped: no environment" in loops.text(found)


def test_without_root_the_slow_link_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "skipped: network namespaces need root" in link.text(link.link(quick=True))
