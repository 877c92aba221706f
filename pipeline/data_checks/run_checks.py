"""All checks of one prepare step: read each split once, compare, write `profile.json` and `checks.json`, tell.

The champion whose training data new data is held against, and what that data looked like.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeline.contract.data import Samples
from pipeline.contract.errors import DataError
from pipeline.contract.files import write_json
from pipeline.contract.registry import Entry, read_registry
from pipeline.contract.run import Run
from pipeline.contract.task import Classifier, HasAxes, Task
from pipeline.data_checks.champion import entry_of, gone, profile_of
from pipeline.data_checks.near_duplicates import Pair, Search, Text, different_bits, different_tables
from pipeline.data_checks.profile import Floats, Integers, Profile, write_profile
from pipeline.data_checks.rules import Finding
from pipeline.data_checks.scan import Kin, Plan, Reading, look_ahead, of_places, read
from pipeline.data_checks.verdict import judge, near_copies

_LISTED = 100  # near copies written out; all are counted
_TOLD = 5  # findings on the terminal; all are written


@dataclass(frozen=True)
class Look:
    """What was read, and what is to be said of it."""

    readings: Mapping[str, Reading]
    profile: Profile
    findings: Sequence[Finding]
    near: Mapping[str, Sequence[Pair]]  # by column
    rival: Entry | None
    notes: Sequence[str] = field(default_factory=tuple)


def look(run: Run, task: Task, splits: Mapping[str, Samples]) -> Look:
    config = run.config.prepare
    registry = read_registry(run.runs, run.config.registry)
    rival = entry_of(registry, run.runs, run)
    theirs = profile_of(rival, run.runs) if rival else None
    plan = look_ahead(task, splits["train"], config.ignore, config.near != "off")
    features = theirs.features if theirs else ()
    readings = {
        name: read(task, samples, plan, features if name == "train" else ()) for name, samples in splits.items()
    }
    profile = _profile(task, plan, readings)
    compared = (theirs, readings["train"].again) if theirs else None
    near = {kin.name: _near(kin, plan, readings, splits, config.near_distance) for kin in plan.kin}
    findings = [*judge(profile, isinstance(task, HasAxes), config, compared), *near_copies(near, config)]
    notes = [*plan.notes, *_constant(profile), *_uncompared(gone(registry, run.runs), rival, theirs)]
    return Look(readings, profile, findings, near, rival if theirs else None, notes)


def write_look(found: Look, directory: Path) -> None:
    """Apart from data.json, by whose digest training knows its data: a limit or a champion changes no data."""
    write_profile(directory / "profile.json", found.profile)
    pairs = [pair.row(column) for column, some in found.near.items() for pair in some]
    rival = {"bundle": found.rival.bundle, "run": found.rival.run} if found.rival else None
    body = {
        "checks": [finding.row() for finding in found.findings],
        "near_duplicate_count": len(pairs),
        "near_duplicates": pairs[:_LISTED],
        "champion": rival,
        "notes": list(found.notes),
    }
    write_json(directory / "checks.json", body)


def tell(found: Look) -> None:
    """Warnings are printed; errors stop the road, with all of them in the log and the first in the message."""
    for note in found.notes:
        print(f"note: {note}")
    _say("warning", [finding for finding in found.findings if finding.level == "warn"])
    if wrong := [finding for finding in found.findings if finding.level == "error"]:
        if len(wrong) > 1:
            _say("wrong", wrong)
        more = f" (and {len(wrong) - 1} more, in prepare.partial/checks.json)" if len(wrong) > 1 else ""
        raise DataError(f"data: {wrong[0].sentence()}{more}")


def _say(word: str, findings: Sequence[Finding]) -> None:
    for finding in findings[:_TOLD]:
        print(f"{word}: {finding.sentence()}", file=sys.stderr)
    if len(findings) > _TOLD:
        print(f"{word}: {len(findings) - _TOLD} more of the kind, in prepare/checks.json", file=sys.stderr)


def _profile(task: Task, plan: Plan, readings: Mapping[str, Reading]) -> Profile:
    features = []
    for feature in plan.features:
        splits = {
            split: reading.histograms[feature.name]
            for split, reading in readings.items()
            if feature.name in reading.histograms
        }
        features.append(feature.model_copy(update={"splits": splits}))
    return Profile(
        inputs=tuple(task.inputs),
        classes=tuple(map(str, task.classes)) if isinstance(task, Classifier) else None,
        columns={split: reading.facts for split, reading in readings.items()},
        features=tuple(features),
    )


def _near(
    kin: Kin, plan: Plan, readings: Mapping[str, Reading], splits: Mapping[str, Samples], limit: float
) -> list[Pair]:
    search = Search(
        {split: reading.codes[kin.name] for split, reading in readings.items()},
        {split: reading.digests for split, reading in readings.items()},
    )

    def distances(a: tuple[str, Integers], b: tuple[str, Integers]) -> Floats:
        sides = [of_places(splits[split], places, kin.columns, plan.rows) for split, places in (a, b)]
        found = [kin.distances(x, y) for x, y in zip(*sides, strict=True)]
        return np.concatenate(found) if found else np.empty(0)

    if isinstance(kin, Text):
        places = search.candidates(different_tables, kin.furthest)
    else:
        places = search.candidates(different_bits, kin.furthest(plan.pilot, limit))
    return search.confirm(places, distances, limit)


def _constant(profile: Profile) -> list[str]:
    """Features that say nothing, as they never change where training sees them."""
    found = []
    for feature in profile.features:
        train = feature.splits.get("train")
        if feature.kind == "numbers" and train and train.samples > 1 and train.low == train.high is not None:
            found.append(feature.name)
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return [f"the same in all samples of train: {', '.join(found[:10])}{more}"] if found else []


def _uncompared(gone: str, rival: Entry | None, theirs: Profile | None) -> list[str]:
    if gone:
        return [gone]
    if rival is None or theirs is not None:
        return []
    told = f"run {rival.run} of the champion has no prepare/profile.json that this version reads"
    return [f"{told}, so the data was not compared with what the champion was trained on"]
