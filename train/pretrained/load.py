"""A task's model about to be given pretrained weights, and what it is given.

The weights that prepare has recorded, found again by training and still the same.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from pipeline.contract.errors import DataError
from pipeline.contract.files import digest_file
from pipeline.contract.pretrained import RECORD, Pretrained, locate, open_pretrained
from pipeline.contract.run import Run
from train.optim import seed_step
from train.pretrained.conversion import offered
from train.pretrained.fill import Bare, Filling, Make
from train.pretrained.matching import Matched, core_of, match
from train.pretrained.source import Entry, Held, Source, Wave, read_header
from train.process_group import Group


class Beginning(NamedTuple):
    """A model whose parameters have no memory yet, and what fills them."""

    model: nn.Module
    filling: Filling


def from_files(make: Make, found: Pretrained, allow: tuple[str, ...], seeded: Callable[[], None]) -> Beginning:
    """`seeded` sets the generators that weights of no file are begun with, alike on every process."""
    bare, matched = fitted(make, found, allow)
    names = [name for name in matched.missing if name in dict(bare.model.named_parameters())]
    begun: Mapping[str, nn.Parameter] = bare.begun(names, seeded) if names else {}
    sources: dict[str, Source] = {**matched.sources, **{name: Held(new.detach()) for name, new in begun.items()}}
    return Beginning(bare.model, Filling(_by_every_name(bare.model, sources)))


def from_nothing(make: Make) -> Beginning:
    """For a checkpoint that is about to be restored: no file is read."""
    model = Bare(make).model
    return Beginning(model, Filling({name: Wave(tuple(p.shape)) for name, p in _all_names(model)}))


def fitted(make: Make, found: Pretrained, allow: tuple[str, ...]) -> tuple[Bare, Matched]:
    """The files' headers alone are read: also `prepare` asks, long before any process is started for training."""
    config = found.config()
    bare = _built(make, found)
    offers = offered(_entries(found.weights), config, converted=core_of(bare.model) is not None)
    matched = match(bare.model, offers, config)
    matched.require(allow)
    return bare, matched


def _built(make: Make, found: Pretrained) -> Bare:
    try:
        return Bare(make)
    except Exception as error:
        if why := _why_unreadable(found):
            raise DataError(f"{found.small['config.json']}: {why}") from error
        raise  # the task's own


def _why_unreadable(found: Pretrained) -> str:
    """What transformers, where the task has asked it, has against the configuration."""
    if "transformers" not in sys.modules:
        return ""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(found.small["config.json"].parent)
    except Exception as error:  # of a dozen types without a common base
        return " ".join(str(error).split())
    return ""


def _entries(weights: Mapping[str, Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in weights.values():
        for name, entry in read_header(path).items():
            if name in entries:
                raise DataError(f"{path}: {name} stands in {entries[name].file.name} too; one of them must go")
            entries[name] = entry
    return entries


def _by_every_name(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """A tied weight is begun by one of its names."""
    by_tensor = {id(p): sources[name] for name, p in _all_names(model) if name in sources}
    return {**sources, **{name: by_tensor[id(p)] for name, p in _all_names(model)}}


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


@contextlib.contextmanager
def beginning_of(
    run: Run, root: Path, make: Make, group: Group, resumes: bool
) -> Iterator[Callable[[], Beginning] | None]:
    """What makes the model within this context; nothing where the task begins its own.

    A run that goes on takes all from its checkpoint: it looks for no pretrained files, which may be gone by then.
    """
    config = run.config
    if not config.model.pretrained:
        yield None
        return
    if resumes:
        yield partial(from_nothing, make)
        return
    recorded = json.loads((run.output("prepare") / RECORD).read_text())
    found = open_pretrained(locate(config.model, root, recorded["commit"], recorded["files"], recorded["run"]))
    before = _stands(found)
    check_recorded(found, recorded["files"], group)
    yield partial(from_files, make, found, config.model.allow, partial(seed_step, config.train.seed, -1, 0))
    if _stands(found) != before:
        raise DataError(f"{found.folder}: its files changed while they were read; leave them be, then `pipe run all`")
    if group.rank.first:
        print(f"begins with {config.model.pretrained}, digest {recorded['digest'][:12]}", flush=True)


def check_recorded(found: Pretrained, recorded: Mapping[str, Any], group: Group) -> None:
    """Each machine reads all of its files once: its processes share them out. All hear of every difference."""
    names = sorted(found.files.keys() | recorded.keys())
    rank = group.rank
    mine = names[rank.local_rank :: rank.local_size] if rank.local_size else names
    told = group.gather([problem for name in mine if (problem := _difference(name, found, recorded))])
    if problems := sorted({problem for problems in told for problem in problems}):
        raise DataError(f"{'; '.join(problems[:3])}; `pipe run all` prepares it anew")


def _difference(name: str, found: Pretrained, recorded: Mapping[str, Any]) -> str:
    path = found.files.get(name)
    if path is None or name not in recorded:
        return f"{found.folder / name}: {'gone' if path is None else 'new'} since prepare looked at it"
    wanted = recorded[name]
    if path.stat().st_size != wanted["bytes"]:
        return f"{path}: {path.stat().st_size} bytes, prepare found {wanted['bytes']}"
    if digest_file(path) != wanted["sha256"]:
        return f"{path}: changed since prepare looked at it"
    return ""


def _stands(found: Pretrained) -> list[tuple[int, ...]]:
    stats = [path.stat() for path in found.files.values()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
