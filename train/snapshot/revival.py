"""The newest snapshot of which all parts are left on some machine, brought to every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.spec.errors import PipelineError
from train.checkpoint.manifest import NAME, Damaged, Manifest, Written, decode
from train.checkpoint.saved import Saved
from train.checkpoint.search import problem_of
from train.group import Group
from train.snapshot.memory import check_room
from train.snapshot.mirrors import Mirrors
from train.snapshot.parcel import hand_out
from train.state import Progress


def newest_snapshot(
    mirrors: Mirrors, identity: Mapping[str, Any], group: Group, usable: Callable[[Progress], bool]
) -> Saved | None:
    """All take part and find the same. `usable` is asked on the first process."""
    told = group.gather(mirrors.shelf.manifests() if mirrors.neighbours.leads else {})
    for raw in candidates(told, identity):
        manifest = decode(raw)
        if group.share(usable(manifest.progress) if group.rank.first else None) and _bring(mirrors, raw, group):
            return Saved(mirrors.shelf, manifest)
    return None


def candidates(told: Sequence[Mapping[int, bytes]], identity: Mapping[str, Any]) -> list[bytes]:
    """Manifests that some machine has, newest first; two attempts may have made the same step in different parts."""
    found: dict[bytes, Manifest] = {}
    for raw in (raw for machine in told for raw in machine.values()):
        try:
            found[raw] = decode(raw)
        except Damaged as error:
            print(f"warning: a snapshot is passed over: {error}", file=sys.stderr)
    alike = [raw for raw, manifest in found.items() if manifest.identity == identity]
    return sorted(alike, key=lambda raw: (-found[raw].progress.step, raw))


def senders(names: Sequence[str], holders: Mapping[int, set[str]]) -> dict[str, int] | None:
    """Who sends each file that some machine lacks: `holders` says what each machine has, by its leader.

    None where nobody has a file any more.
    """
    found: dict[str, int] = {}
    for name in names:
        having = [leader for leader, held in holders.items() if name in held]
        if not having:
            return None
        if len(having) < len(holders):
            found[name] = having[0]
    return found


def _bring(mirrors: Mirrors, raw: bytes, group: Group) -> bool:
    """Every machine gets the files it lacks; false where that cannot be."""
    manifest = decode(raw)
    names = [file.name for file in manifest.files]
    holders = _holders(mirrors, manifest, group)
    sent = senders(names, holders)
    if sent is None or not _room_for(mirrors, manifest, sent, group):
        return False
    for file in manifest.files:
        if file.name in sent:
            _send(mirrors, manifest.progress.step, file, sent[file.name], holders, group)
    if mirrors.neighbours.leads:
        mirrors.shelf.fill(manifest.progress.step, NAME, memoryview(raw))
    group.gather(None)  # nobody reads before all is there
    return True


def _holders(mirrors: Mirrors, manifest: Manifest, group: Group) -> dict[int, set[str]]:
    """By the leader of each machine the files it has whole; the processes of a machine share the work of looking."""
    neighbours, step = mirrors.neighbours, manifest.progress.step
    mine = manifest.files[neighbours.here.index(group.rank.rank) :: len(neighbours.here)]
    whole = {file.name for file in mine if not problem_of(mirrors.shelf, step, [file])}
    told: dict[int, set[str]] = {leader: set() for leader in neighbours.leaders}
    for leader, found in group.gather((neighbours.here[0], whole)):
        told[leader] |= found
    return told


def _room_for(mirrors: Mirrors, manifest: Manifest, sent: Mapping[str, int], group: Group) -> bool:
    """A machine that held its share alone may not have the memory for all of it."""
    needed = sum(file.bytes for file in manifest.files if file.name in sent)
    problem = ""
    try:
        check_room(mirrors.folder, needed)
    except PipelineError as error:
        problem = str(error)
    told = [text for text in group.gather(problem) if text]
    if told and group.rank.first:
        print(f"warning: a snapshot is passed over: {told[0]}", file=sys.stderr)
    return not told


def _send(
    mirrors: Mirrors, step: int, file: Written, owner: int, holders: Mapping[int, set[str]], group: Group
) -> None:
    data: Tensor | None = None
    if group.rank.rank == owner:
        data = torch.clone(mirrors.shelf.read(step, file.name))  # it is mapped, and may be replaced
    data = hand_out(data, file.bytes, owner, mirrors.background.exchange)
    if mirrors.neighbours.leads and file.name not in holders[group.rank.rank]:
        mirrors.shelf.fill(step, file.name, data.numpy().data)
