"""Matching the weights of files with those of a model, and reporting every difference."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pipeline.contract.task import transformers_model
from pipeline.system.errors import DataError
from pipeline.system.wording import join_names
from train.checkpoint.format import DTYPES
from train.pretrained.source import Duplicates, Entry, Source

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
