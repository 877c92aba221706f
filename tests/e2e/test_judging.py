from __future__ import annotations

import json
from typing import Any

from .walker import Walker


def verdict_of(walker: Walker) -> dict[str, Any]:
    return walker.latest.verdict()


def test_a_rejected_candidate_stops_the_road_and_a_forced_one_is_on_record_for_ever(copied: Walker) -> None:
    floor = "evaluate.require={accuracy: 1.5}"
    said = copied.pipe("run", "--until", "export", floor, expect=3).stderr
    assert "below the required 1.5" in said.splitlines()[-1]
    assert copied.latest.read().steps["evaluate"].status == "rejected"
    assert verdict_of(copied)["verdict"] == "fail"
    assert not copied.latest.output("export").exists()
    reason = "wanted for a demonstration"
    copied.pipe("run", "--until", "export", floor, f"evaluate.force_reason={reason}")
    assert verdict_of(copied)["verdict"] == "forced"
    assert reason in json.dumps(verdict_of(copied))
    assert reason in (copied.latest.bundle_path / "card.md").read_text()
    assert copied.latest.bundle().manifest.verdict == "forced"
