"""The prepare step: what the data is (fingerprints, class balance) and whether its splits leak."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.spec.data import Samples, check_columns, open_split
from pipeline.spec.errors import DataError
from pipeline.spec.files import write_json
from pipeline.spec.fingerprint import fingerprint, sample_digests
from pipeline.spec.run import Run
from pipeline.spec.step import run_step
from pipeline.spec.task import SPLITS, Classifier, Task, load_task

_LISTED = 100  # duplicates written out; all are counted


def prepare(run: Run, root: Path) -> None:
    config = run.config
    task = load_task(config.task, root)
    splits = {name: open_split(task, name) for name in SPLITS}
    for samples in splits.values():
        check_columns(task, samples)
    pairs = find_duplicates({name: sample_digests(samples, task.inputs) for name, samples in splits.items()})
    report: dict[str, Any] = {
        "splits": {name: _describe(task, samples) for name, samples in splits.items()},
        "duplicate_count": len(pairs),
        "duplicates": pairs[:_LISTED],
    }
    write_json(run.partial("prepare") / "data.json", report)
    for name, facts in report["splits"].items():
        print(f"{name}: {facts['samples']} samples, fingerprint {facts['fingerprint'][:12]}")
    if pairs:
        _judge(pairs, config.prepare.leaks, run.partial("prepare") / "data.json")


def find_duplicates(digests: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Every sample that also stands in an earlier split, as pairs of places."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for split, values in digests.items():
        for index, value in enumerate(values):
            places[value].append((split, index))
    pairs = []
    for found in places.values():
        first_split, first_index = found[0]
        for split, index in found[1:]:
            if split != first_split:
                pairs.append({"a": {"split": first_split, "index": first_index}, "b": {"split": split, "index": index}})
    return pairs


def _describe(task: Task, samples: Samples) -> dict[str, Any]:
    return {"samples": len(samples), "fingerprint": fingerprint(samples), "classes": _balance(task, samples)}


def _balance(task: Task, samples: Samples) -> dict[str, int] | None:
    """Samples of each class, for a task that has classes."""
    if not isinstance(task, Classifier):
        return None
    labels = torch.cat([task.actual(batch) for batch in samples.batches(range(len(samples)), 512)]).tolist()
    counts = Counter(labels)
    if strange := sorted(label for label in counts if not 0 <= label < len(task.classes)):
        raise DataError(f"data({samples.split!r}): label {strange[0]} is outside the {len(task.classes)} classes")
    return {str(name): counts.get(i, 0) for i, name in enumerate(task.classes)}


def _judge(pairs: list[dict[str, Any]], leaks: str, listing: Path) -> None:
    a, b = pairs[0]["a"], pairs[0]["b"]
    listed = "all are" if len(pairs) <= _LISTED else f"the first {_LISTED} are"
    text = (
        f"{len(pairs)} samples stand in more than one split, as {b['split']}[{b['index']}] = "
        f"{a['split']}[{a['index']}]; {listed} listed in {listing.parent.name}/{listing.name}. "
        "Remove them, or set prepare.leaks=warn to accept a test that is not fair"
    )
    if leaks == "error":
        for pair in pairs[:20]:
            print(f"duplicate: {pair['b']['split']}[{pair['b']['index']}] = {pair['a']['split']}[{pair['a']['index']}]")
        raise DataError(text)
    print(f"warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_step("prepare", prepare, sys.argv[1:]))
