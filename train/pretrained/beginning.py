"""A task's model about to be given pretrained weights, and what it is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import nn

from pipeline.spec.errors import DataError
from pipeline.spec.pretrained import Pretrained
from train.pretrained.bare import Bare, Make
from train.pretrained.conversion import offered
from train.pretrained.filling import Filling
from train.pretrained.header import Entry, read_header
from train.pretrained.matching import Matched, core_of, match
from train.pretrained.source import Held, Source, Wave


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
