"""Other names of a bundle's files: those in the runs it is reused by are ours, any other can change what is served."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.spec.errors import BundleError


def check_own(path: Path, found: os.stat_result) -> None:
    """A file with more names than its run and those that share it is refused, unless nothing can be written there."""
    if found.st_nlink == 1 or os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    strange = found.st_nlink - sum(1 for _ in _shared(path, found))
    if strange > 0:
        raise BundleError(
            f"{path}: has {strange} more name{'s' * (strange > 1)} elsewhere (a hard link), and whoever writes there "
            "changes what is served; copy the bundle with `cp -r` and take the copy"
        )


def _shared(path: Path, found: os.stat_result) -> Iterator[Path]:
    """Itself, and the same place in the other runs of its folder: what `pipe` reuses, it links."""
    absolute = path.absolute()
    run = next((parent for parent in absolute.parents if (parent / "run.json").is_file()), None)
    if run is None:
        yield path
        return
    step, *rest = absolute.relative_to(run).parts
    steps = {step.removesuffix(".partial"), step.removesuffix(".partial") + ".partial"}
    for other in run.parent.iterdir():
        for name in steps:
            place = other.joinpath(name, *rest)
            try:
                same = os.path.samestat(place.lstat(), found)
            except OSError:  # not there
                continue
            if same:
                yield place
