"""Loading pretrained weights: from the files that prepare recorded, into a task's model that has no memory yet."""

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
from pipeline.contract.pretrained import PRETRAINED_RECORD, Pretrained, locate_pretrained, open_pretrained
from pipeline.contract.run import Run
from train.optim import seed_step
from train.pretrained.conversion import available_weights
from train.pretrained.matching import Matching, match, transformers_model
from train.pretrained.materialize import BuildModel, Materializer, MetaModel
from train.pretrained.source import Entry, Initialized, Placeholder, Source, read_header
from train.process_group import ProcessGroup


class PretrainedModel(NamedTuple):
    """A model whose parameters have no memory yet, and the reader of their values."""

    model: nn.Module
    materializer: Materializer


@contextlib.contextmanager
def open_recorded_weights(
    run: Run, root: Path, build: BuildModel, group: ProcessGroup, resumes: bool
) -> Iterator[Callable[[], PretrainedModel] | None]:
    """Yield a function that builds the pretrained model within the context; None if the task initializes its own.

    A resumed run takes all weights from its checkpoint: the pretrained files may be gone by then.
    """
    config = run.config
    if not config.model.pretrained:
        yield None
        return
    if resumes:
        yield partial(load_placeholder, build)
        return
    recorded = json.loads((run.output("prepare") / PRETRAINED_RECORD).read_text())
    folder = locate_pretrained(config.model, root, recorded["commit"], recorded["files"], recorded["run"])
    pretrained = open_pretrained(folder)
    before = _file_states(pretrained)
    check_recorded(pretrained, recorded["files"], group)
    seed = partial(seed_step, config.train.seed, -1, 0)
    yield partial(load_from_files, build, pretrained, config.model.allow_mismatch, seed)
    if _file_states(pretrained) != before:
        raise DataError(
            f"{pretrained.folder}: its files changed while they were read; "
            "to fix it: do not change them during training, then `pipe run all`"
        )
    if group.rank.first:
        print(f"starting from {config.model.pretrained}, digest {recorded['digest'][:12]}", flush=True)


def load_from_files(
    build: BuildModel, pretrained: Pretrained, allow: tuple[str, ...], seed: Callable[[], None]
) -> PretrainedModel:
    """Build the model and match it with the files; `seed` seeds weights that no file has, alike on every process."""
    meta, matching = match_weights(build, pretrained, allow)
    names = [name for name in matching.missing if name in dict(meta.model.named_parameters())]
    new: Mapping[str, nn.Parameter] = meta.initialize(names, seed) if names else {}
    sources: dict[str, Source] = {**matching.sources, **{name: Initialized(p.detach()) for name, p in new.items()}}
    return PretrainedModel(meta.model, Materializer(_by_every_name(meta.model, sources)))


def load_placeholder(build: BuildModel) -> PretrainedModel:
    """Build the model for a checkpoint that is about to be restored: no file is read."""
    model = MetaModel(build).model
    return PretrainedModel(model, Materializer({name: Placeholder(tuple(p.shape)) for name, p in _all_names(model)}))


def match_weights(build: BuildModel, pretrained: Pretrained, allow: tuple[str, ...]) -> tuple[MetaModel, Matching]:
    """Match the model with the files, of which only headers are read; `prepare` does it before training starts."""
    config = pretrained.config()
    meta = _build_meta_model(build, pretrained)
    converted = transformers_model(meta.model) is not None
    matching = match(meta.model, available_weights(_entries(pretrained.weights), config, converted), config)
    matching.require(allow)
    return meta, matching


def _build_meta_model(build: BuildModel, pretrained: Pretrained) -> MetaModel:
    try:
        return MetaModel(build)
    except Exception as error:
        if problem := _config_problem(pretrained):
            raise DataError(f"{pretrained.small['config.json']}: {problem}") from error
        raise  # the task's own error


def _config_problem(pretrained: Pretrained) -> str:
    """Return transformers' error for config.json, if the task uses transformers."""
    if "transformers" not in sys.modules:
        return ""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(pretrained.small["config.json"].parent)
    except Exception as error:  # one of a dozen types without a common base
        return " ".join(str(error).split())
    return ""


def _entries(weights: Mapping[str, Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in weights.values():
        for name, entry in read_header(path).items():
            if name in entries:
                raise DataError(f"{path}: {name} is in {entries[name].file.name}, too; to fix it: remove one of them")
            entries[name] = entry
    return entries


def _by_every_name(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Give tied weights, of which one name has a source, a source for every name."""
    by_tensor = {id(p): sources[name] for name, p in _all_names(model) if name in sources}
    return {**sources, **{name: by_tensor[id(p)] for name, p in _all_names(model)}}


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def check_recorded(pretrained: Pretrained, recorded: Mapping[str, Any], group: ProcessGroup) -> None:
    """Compare the files with those that prepare recorded; raises the same error on all processes.

    Each machine reads all of its files once: its processes divide them.
    """
    names = sorted(pretrained.files.keys() | recorded.keys())
    rank = group.rank
    own = names[rank.local_rank :: rank.local_size] if rank.local_size else names
    problems_by_rank = group.gather([problem for name in own if (problem := _difference(name, pretrained, recorded))])
    if problems := sorted({problem for problems in problems_by_rank for problem in problems}):
        raise DataError(f"{'; '.join(problems[:3])}; to fix it: `pipe run all`, which prepares the files again")


def _difference(name: str, pretrained: Pretrained, recorded: Mapping[str, Any]) -> str:
    path = pretrained.files.get(name)
    if path is None or name not in recorded:
        return f"{pretrained.folder / name}: {'missing' if path is None else 'new'} since prepare recorded the files"
    expected = recorded[name]
    if path.stat().st_size != expected["bytes"]:
        return f"{path}: {path.stat().st_size} bytes, {expected['bytes']} when prepare recorded it"
    if digest_file(path) != expected["sha256"]:
        return f"{path}: changed since prepare recorded it"
    return ""


def _file_states(pretrained: Pretrained) -> list[tuple[int, ...]]:
    stats = [path.stat() for path in pretrained.files.values()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
