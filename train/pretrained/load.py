"""Load pretrained weights from the files that prepare recorded into a task's model on the meta device.

Weights are converted to the names and layout of transformers' models. Official files have experts one by one, and an
FP8 matrix with its scales; the models have experts in one tensor. transformers' conversion table maps one to the other.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipeline.contract.pretrained import PRETRAINED_RECORD, Pretrained, locate_pretrained, open_pretrained
from pipeline.contract.run import Run
from pipeline.contract.task import transformers_model
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import digest_file, read_object
from pipeline.system.wording import join_names
from train.checkpoint.format import DTYPES
from train.optim import seed_step
from train.pretrained.adapter import ADAPTER_WEIGHTS, adapter_sources
from train.pretrained.materialize import BuildModel, Materializer, MetaModel
from train.pretrained.qlora import round_base_layers
from train.pretrained.random_weights import create_split
from train.pretrained.source import (
    Concatenated,
    Dequantized,
    Duplicates,
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


_LISTED = 8  # problems of each kind in the error; the log has all
# What peft adds to the name of a layer that it wraps.
_PEFT_NAMES = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.\w+)(?=\.|$)")


@dataclass
class Matching:
    """The result, by names of the model's state dict."""

    sources: dict[str, Source] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # → what the model has
    unexpected: dict[str, str] = field(default_factory=dict)  # by the name in the files → what they have
    misfits: dict[str, str] = field(default_factory=dict)  # → what differs
    # Weights that this model type is known not to use, and buffers that it computes, such as position ids.
    left_out: list[str] = field(default_factory=list)

    def require(self, allow: Sequence[str]) -> None:
        """Raise an error with all problems except those that `model.allow_mismatch` names.

        A weight whose misfit is allowed is initialized by the task.
        """
        self.missing |= {name: problem for name, problem in self.misfits.items() if _is_allowed(name, allow)}
        kinds = {
            "missing": _disallowed(self.missing, allow),
            "unexpected": _disallowed(self.unexpected, allow),
            "misfit": _disallowed(self.misfits, allow),
        }
        for kind, problems in kinds.items():
            for name, problem in problems.items():
                print(f"{kind}: {name} {problem}", file=sys.stderr)
        if any(kinds.values()):
            fix = _suggest_fix(kinds, self.sources)
            problem_text = "; ".join(f"{kind}: {_list_some(problems)}" for kind, problems in kinds.items() if problems)
            raise DataError(f"model.pretrained does not fit the task's model: {problem_text}; {fix}")


def match(model: nn.Module, offers: Mapping[str, Source], config: Mapping[str, Any]) -> Matching:
    """Match a model, whose parameters may be on the meta device, with the weights that files offer."""
    matching, used_names = Matching(), set[str]()
    named_tensors = _tensors(model)
    model_prefix, file_prefix = _alignment(model, [alias(name) for group, _ in named_tensors for name in group], offers)
    for group, tensor in named_tensors:
        names_in_files = {
            file_prefix + alias(name)[len(model_prefix) :] for name in group if alias(name).startswith(model_prefix)
        }
        matches = sorted(names_in_files & offers.keys())
        used_names.update(matches)
        if not matches:
            matching.missing[group[0]] = f"{list(tensor.shape)}, in no file"
            continue
        source = offers[matches[0]] if len(matches) == 1 else Duplicates(tuple(offers[name] for name in matches))
        if problem := _misfit(tensor, source):
            matching.misfits[group[0]] = problem
        else:
            matching.sources |= dict.fromkeys(group, source)
    computed_names = {
        file_prefix + alias(name)[len(model_prefix) :]
        for name, _ in model.named_buffers()
        if alias(name).startswith(model_prefix)
    }
    for name in sorted(offers.keys() - used_names):
        if name in computed_names or _is_ignored(name, model, config):
            matching.left_out.append(name)
        else:
            entry = offers[name].entries[0]
            matching.unexpected[name] = f"{list(offers[name].shape)} in {entry.file.name}"
    return matching


def alias(name: str) -> str:
    """Return the name the weight had before peft wrapped its layer."""
    return _PEFT_NAMES.sub("", name)


def _tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return each tensor with its names; tied weights have several."""
    tensors: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            tensors.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(tensors.values())


def _alignment(model: nn.Module, names: Sequence[str], offers: Mapping[str, Source]) -> tuple[str, str]:
    """Return the prefix of the model's names and the prefix of the files' names that it stands for.

    A model with a head has its body one level below, but files of the body alone do not; a task may also put the
    model into its own module. The pair that matches most names is returned.
    """
    core = transformers_model(model)
    wrapper = f"{alias(core[0])}." if core and core[0] else ""
    body = f"{core[1].base_model_prefix}." if core else ""
    prefixes = [("", ""), (wrapper, ""), (wrapper, body), (wrapper + body, ""), (wrapper + body, body)]
    inner_names = [name.removeprefix(wrapper) for name in names if name.startswith(wrapper)]
    for probe in inner_names[:1]:
        prefixes += [(wrapper, name.removesuffix(probe)) for name in sorted(offers) if name.endswith(f".{probe}")]

    def match_count(pair: tuple[str, str]) -> int:
        model_prefix, file_prefix = pair
        return sum(
            name.startswith(model_prefix) and file_prefix + name[len(model_prefix) :] in offers for name in names
        )

    return max(prefixes, key=match_count)  # the first one of several equal ones


def _misfit(tensor: Tensor, source: Source) -> str:
    """Return how the shape or type of the source differs; of combined sources each part is checked."""
    for part in source.parts if isinstance(source, Duplicates) else (source,):
        if tuple(tensor.shape) != part.shape:
            return (
                f"is {list(part.shape)} in {_location(part.entries[0], source)}, and {list(tensor.shape)} in the model"
            )
    expected = str(tensor.dtype).removeprefix("torch.")
    for entry in source.entries:
        kind = DTYPES[entry.dtype]
        if not (kind.is_floating_point if tensor.is_floating_point() else kind == tensor.dtype):
            return f"is of type {entry.dtype} in {_location(entry, source)}, and {expected} in the model"
    return ""


def _location(entry: Entry, source: Source) -> str:
    return entry.file.name if len(source.entries) == 1 else f"{entry.file.name} ({entry.name})"


def _is_ignored(name: str, model: nn.Module, config: Mapping[str, Any]) -> bool:
    """Return whether transformers ignores the weight: multi-token prediction layers come after the last layer."""
    core = transformers_model(model)
    module = core[1] if core else None
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    layers, extra = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    is_prediction = layer is not None and layers is not None and layers <= int(layer[1]) < layers + extra
    return is_prediction or any(re.search(pattern, name) for pattern in patterns)


def _is_allowed(name: str, allow: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow)


def _disallowed(problems: Mapping[str, str], allow: Sequence[str]) -> dict[str, str]:
    return {name: problem for name, problem in problems.items() if not _is_allowed(name, allow)}


def _list_some(problems: Mapping[str, str]) -> str:
    text = join_names([f"{name} {problem}" for name, problem in problems.items()], _LISTED)
    return text + (", all in the log" if len(problems) > _LISTED else "")


def _suggest_fix(kinds: Mapping[str, Mapping[str, str]], fitting: Iterable[str]) -> str:
    names = [name for problems in kinds.values() for name in problems]
    modules = {name.partition(".")[0] for name in fitting}
    globs = list(dict.fromkeys(_glob(name, modules) for name in names))
    return (
        "to fix it: build the model that these weights belong to, or allow the differences with "
        f"model.allow_mismatch={globs}"
    )


def _glob(name: str, fitting_modules: Container[str]) -> str:
    """Return a glob for a weight: for its outermost module if nothing there fits, else for all layers."""
    module, dot, _ = name.partition(".")
    return f"{module}.*" if dot and module not in fitting_modules else re.sub(r"\.\d+(?=\.)", ".*", name)
