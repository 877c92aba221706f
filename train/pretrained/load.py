"""Load pretrained weights from the files that prepare recorded into a task's model on the meta device.

Weights are converted to the names and layout of transformers' models. Official files have experts one by one, and an
FP8 matrix with its scales; the models have experts in one tensor. transformers' conversion table maps one to the other.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from pipeline.contract.pretrained import PRETRAINED_RECORD, Pretrained, locate_pretrained, open_pretrained
from pipeline.contract.run import Run
from pipeline.contract.task import transformers_model
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import digest_file, read_object
from train.optim import seed_step
from train.pretrained.adapter import ADAPTER_WEIGHTS, adapter_sources
from train.pretrained.matching import Matching, match
from train.pretrained.materialize import BuildModel, Materializer, MetaModel
from train.pretrained.qlora import round_base_layers
from train.pretrained.random_weights import create_split
from train.pretrained.source import (
    Concatenated,
    Dequantized,
    Entry,
    Initialized,
    Placeholder,
    Rows,
    Source,
    Stacked,
    Whole,
    read_header,
)
from train.process_group import ProcessGroup


class PretrainedModel(NamedTuple):
    """A model whose parameters have no memory yet, and the reader of their values."""

    model: nn.Module
    materializer: Materializer


CreateModel: TypeAlias = Callable[[], tuple[nn.Module, Materializer | None]]  # None: the model has its weights


@contextlib.contextmanager
def open_recorded_weights(
    run: Run, root: Path, build: BuildModel, group: ProcessGroup, resumes: bool
) -> Iterator[CreateModel]:
    """Yield a function that builds the model within the context.

    A resumed run takes all weights from its checkpoint: the pretrained files may be gone by then.
    """
    config = run.config

    def rounded(create: CreateModel) -> CreateModel:
        return partial(create_rounded, create, group.device) if config.model.adapter == "qlora" else create

    seed = partial(seed_step, config.train.seed, -1, 0)
    if not config.model.pretrained:
        splits = config.train.strategy == "fsdp" or config.train.expert_parallel * group.model_size > 1
        if splits and group.size > 1 and config.model.adapter == "none":
            yield partial(create_split, build, seed, group, resumes)
        else:
            yield rounded(lambda: (build(), None))
        return
    if resumes:
        yield rounded(partial(load_placeholder, build))
        return
    recorded = read_object(run.output("prepare") / PRETRAINED_RECORD)
    folder = locate_pretrained(config.model, root, recorded["commit"], recorded["files"], recorded["run"])
    pretrained = open_pretrained(folder)
    states_before = _file_states(pretrained)
    check_recorded(pretrained, recorded["files"], group)
    adapter, allow = config.model.adapter != "none", config.model.allow_mismatch
    yield rounded(partial(load_from_files, build, pretrained, allow, seed, adapter=adapter))
    if _file_states(pretrained) != states_before:
        raise DataError(
            f"{pretrained.folder}: its files changed while they were read; "
            "to fix it: do not change them during training, then `pipe run all`"
        )
    if group.rank.first:
        print(f"starting from {config.model.pretrained}, digest {recorded['digest'][:12]}", flush=True)


def create_rounded(create_model: CreateModel, device: torch.device) -> tuple[nn.Module, Materializer | None]:
    """Create a model whose weights below the adapters are rounded to 4 bits."""
    model, materializer = create_model()
    round_base_layers(model, materializer, device)
    return model, materializer


def load_from_files(
    build: BuildModel,
    pretrained: Pretrained,
    allow: tuple[str, ...],
    seed: Callable[[], None],
    *,
    adapter: bool = False,
) -> PretrainedModel:
    """Build the model and match it with the files; `seed` seeds weights that no file has, alike on every process.

    `adapter`: `build` adds the one of `model.adapter`, which no file has.
    """
    meta, matching = match_weights(build, pretrained, (*allow, ADAPTER_WEIGHTS) if adapter else allow)
    adapters = adapter_sources(meta.model, matching.missing, matching.sources, seed) if adapter else {}
    parameters = dict(meta.model.named_parameters())
    names = [name for name in matching.missing if name in parameters and name not in adapters]
    initialized: Mapping[str, nn.Parameter] = meta.initialize(names, seed) if names else {}
    sources: dict[str, Source] = {
        **matching.sources,
        **adapters,
        **{name: Initialized(p.detach()) for name, p in initialized.items()},
    }
    return PretrainedModel(meta.model, Materializer(_add_tied_names(meta.model, sources)))


def load_placeholder(build: BuildModel) -> PretrainedModel:
    """Build the model for a checkpoint that is about to be restored: no file is read."""
    model = MetaModel(build).model
    return PretrainedModel(model, Materializer({name: Placeholder(tuple(p.shape)) for name, p in _all_names(model)}))


def match_weights(build: BuildModel, pretrained: Pretrained, allow: tuple[str, ...]) -> tuple[MetaModel, Matching]:
    """Match the model with the files, of which only headers are read; the check step does it before training starts."""
    config = pretrained.config()
    meta = _build_meta_model(build, pretrained)
    located = transformers_model(meta.model)
    offers = _with_scales(_entries(pretrained.weights), config)
    if located:
        offers = _convert(offers, located[1])
    matching = match(meta.model, offers, config)
    matching.require(allow)
    return meta, matching


def _build_meta_model(build: BuildModel, pretrained: Pretrained) -> MetaModel:
    """Build the model; where transformers cannot read config.json, that is the error."""
    try:
        return MetaModel(build)
    except Exception as error:
        if "transformers" in sys.modules and (path := pretrained.small.get("config.json")):
            from transformers import AutoConfig

            try:
                AutoConfig.from_pretrained(path.parent)
            except Exception as problem:  # one of a dozen types without a common base
                raise DataError(f"{path}: {' '.join(str(problem).split())}") from error
        raise  # the task's own error


def _entries(weights: Mapping[str, Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in weights.values():
        for name, entry in read_header(path).items():
            if name in entries:
                raise DataError(f"{path}: {name} is in {entries[name].file.name}, too; to fix it: remove one of them")
            entries[name] = entry
    return entries


def _add_tied_names(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, Source]:
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
    own_names = names[rank.local_rank :: rank.local_size] if rank.local_size else names
    problems_by_rank = group.gather(
        [problem for name in own_names if (problem := _difference(name, pretrained, recorded))]
    )
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


_SCALE = "_scale_inv"
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


def _with_scales(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, Source]:
    """Combine eight-bit matrices with their scales; other weights stay as they are."""
    sources: dict[str, Source] = {}
    block = _scale_block(entries, config)
    for name, entry in entries.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in entries:
            continue
        if entry.dtype not in _EIGHT_BITS:
            sources[name] = Whole(entry)
            continue
        scale = entries.get(name + _SCALE)
        if scale is None:
            raise DataError(
                f"{entry.file}: {name} is of type {entry.dtype}, but no file has its {name}{_SCALE}; "
                "to fix it: fetch the missing file"
            )
        _check_scale(entry, scale, block)
        sources[name] = Dequantized(entry, scale, block)
    return sources


def _scale_block(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size of the blocks that have one scale each."""
    quantization = config.get("quantization_config")
    if quantization is None:
        if entry := next((entry for entry in entries.values() if entry.dtype in _EIGHT_BITS), None):
            raise DataError(
                f"{entry.file}: {entry.name} is of type {entry.dtype}, but config.json has no quantization_config"
            )
        return (0, 0)
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) for b in block)):
        raise ConfigError(
            f"model.pretrained: weights are quantized by {method!r} with weight_block_size {block}; only fp8 with "
            "two-dimensional blocks is supported; to fix it: use the weights in bf16"
        )
    if min(block) < 1:
        raise ConfigError(f"model.pretrained: weight_block_size {block} must have positive numbers")
    return block[0], block[1]


def _check_scale(weight: Entry, scale: Entry, block: tuple[int, int]) -> None:
    expected = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=False))
    if len(weight.shape) != 2 or scale.shape != expected:
        raise DataError(
            f"{scale.file}: {scale.name} is {list(scale.shape)}; {weight.name} of {list(weight.shape)} in blocks of "
            f"{list(block)} needs scales of {list(expected)}"
        )
    if scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
        raise DataError(f"{scale.file}: {scale.name} is of type {scale.dtype}; scales are floating-point numbers")


def _convert(sources: Mapping[str, Source], model: Any) -> dict[str, Source]:
    """Apply transformers' own table: names of earlier versions, and experts in one tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_renamings

    transforms = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    by_name = {apply_renamings(name, renamings): source for name, source in sources.items()}
    converted: dict[str, Source] = {}
    groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, source in by_name.items():
        for position, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                groups[target, position][pattern].append(name)
                break
        else:
            converted[name] = source
    for (target, position), names in groups.items():
        converted.update(_combine(target, converters[position], names, by_name))
    return converted


def _combine(
    target: str, converter: Any, names: Mapping[str, list[str]], sources: Mapping[str, Source]
) -> Mapping[str, Source]:
    """Split a tensor, or stack the experts and concatenate the stacks: all that the supported architectures need."""
    operations: list[tuple[str, Any]] = [
        (type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations
    ]
    targets = converter.target_patterns
    if operations == [("Chunk", 0)] and len(targets) > 1:
        (whole,) = (sources[name] for group in names.values() for name in group)
        return {
            target.replace(targets[0], pattern, 1): Rows(whole, index, len(targets))
            for index, pattern in enumerate(targets)
        }
    if (
        not operations
        or operations[0] != ("MergeModulelist", 0)
        or {name for name, _ in operations[1:]} - {"Concatenate"}
    ):
        raise ConfigError(f"model.pretrained: {target} needs the conversion {operations}, which is not supported")
    _refuse_gaps(target, converter.source_patterns, names)
    stacks = tuple(_stack(sorted(names[p], key=_expert_number), sources) for p in converter.source_patterns)
    return {target: Concatenated(stacks, operations[1][1]) if len(operations) > 1 else stacks[0]}


def _stack(names: list[str], sources_by_name: Mapping[str, Source]) -> Stacked:
    sources = tuple(sources_by_name[name] for name in names)
    for name, source in zip(names, sources, strict=True):
        if source.shape != sources[0].shape:
            raise DataError(
                f"{source.entries[0].file}: {name} is {list(source.shape)}, but {names[0]} is "
                f"{list(sources[0].shape)}; the model has both in one tensor"
            )
    return Stacked(sources)


def _refuse_gaps(target: str, patterns: list[str], names: Mapping[str, list[str]]) -> None:
    """Refuse an expert without one of its matrices; if the last experts are missing, the shape will differ."""
    count = 1 + max(_expert_number(name) for group in names.values() for name in group)
    gaps = [
        pattern.replace("*", str(number), 1)
        for pattern in patterns
        for number in sorted(set(range(count)) - {_expert_number(name) for name in names.get(pattern, ())})
    ]
    if gaps:
        raise DataError(f"model.pretrained: {target} needs the weights of {count} experts; missing: {gaps}")


def _expert_number(name: str) -> int:
    """Return the number of the expert, the last one in the name."""
    return int(re.findall(r"\.(\d+)\.", name)[-1])
