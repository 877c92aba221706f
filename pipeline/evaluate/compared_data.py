"""The test set that a verdict is about, and what changed in it since the champion was judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.data import Fingerprint, Samples
from pipeline.contract.results import NEAR_COPIES
from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.rules import GateRule
from pipeline.system.files import read_object

SAMPLES_FILE = "test_samples.npy"  # a digest for each sample of the test set

Digests = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class DataOfTest:
    fingerprint: str
    samples: Digests


@dataclass(frozen=True)
class DataChange:
    """How the test set differs from the one that the champion was judged on."""

    own: str  # fingerprints
    champion: str
    removed: int | None  # samples that only the champion's has; None if its run is not here
    added: int | None

    @property
    def changed(self) -> bool:
        return self.own != self.champion

    def body(self) -> dict[str, Any]:
        return {"champion": self.champion, "removed": self.removed, "added": self.added}


def read_test_data(samples: Samples) -> DataOfTest:
    """Read the whole split and return its fingerprint and the digests of its samples."""
    digest, digests = Fingerprint(), []
    for batch in samples.single_rows(range(len(samples))):
        digests += digest.add(batch)
    return DataOfTest(digest.hexdigest(), np.array([int(text[:16], 16) for text in digests], dtype=np.uint64))


def read_near_copies(prepared: Path) -> tuple[int, ...]:
    """Return the test samples that prepare recorded as copies; none where it did not run."""
    path = prepared / NEAR_COPIES
    return tuple(read_object(path, "test")) if path.is_file() else ()


def compare_with_champion(own: DataOfTest, champion: str, run: Path) -> DataChange | None:
    """Compare with the champion's test set, by its fingerprint and if its run is here, by sample; None if unknown."""
    if not champion:
        return None
    removed = added = None
    path = run / "evaluate" / SAMPLES_FILE
    if champion != own.fingerprint and path.is_file():
        theirs = np.load(path, allow_pickle=False)
        removed = int((~np.isin(theirs, own.samples)).sum())
        added = int((~np.isin(own.samples, theirs)).sum())
    return DataChange(own.fingerprint, champion, removed, added)


def same_data_rule(config: Evaluate, change: DataChange) -> GateRule:
    """Require the test set on which the champion was judged: another one may have been chosen for its result."""
    how = "the digest of the test set, compared with the one on which the champion was judged"
    if not change.changed:
        return GateRule("test_set", True, f"the champion's test set, {change.own[:12]}", how=how)
    counts = "" if change.removed is None else f": {change.removed} samples removed, {change.added} added"
    text = f"the test set {change.own[:12]} is not the champion's {change.champion[:12]}{counts}"
    fix = "evaluate.test_set_changed=allow would have passed it, if the change is meant"
    return GateRule("test_set", config.test_set_changed == "allow", text, how=how, change=fix)
