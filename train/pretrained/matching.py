"""Which weight of the files each weight of a model takes, and everything that does not go together."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeline.contract.errors import DataError
from train.pretrained.source import Entry, Same, Source

_TOLD = 8  # of each kind in the error; the log lists all
_FLOATS = {"F64", "F32", "F16", "BF16"}
_WHOLE = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# How peft names a layer that it has put another one around.
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.\w+)(?=\.|$)")
Value = TypeVar("Value")


@dataclass
class Matched:
    """By the names of the model's state."""

    sources: dict[str, Source] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # → what the model wants
    unexpected: dict[str, str] = field(default_factory=dict)  # by the name in the files → what is there
    misfits: dict[str, str] = field(default_factory=dict)  # → what differs
    left_out: list[str] = field(default_factory=list)  # that this kind of model is known not to use

    def require(self, allow: Sequence[str]) -> None:
        """All problems are listed; those that `model.allow` names are none. A misfit begins by the seed then."""
        self.missing |= {name: said for name, said in self.misfits.items() if _named(name, allow)}
        kinds = {
            "missing": _others(self.missing, allow),
            "unexpected": _others(self.unexpected, allow),
            "misfit": _others(self.misfits, allow),
        }
        for kind, problems in kinds.items():
            for name, said in problems.items():
                print(f"{kind}: {name} {said}", file=sys.stderr)
        if any(kinds.values()):
            told = "; ".join(f"{kind}: {_some(problems)}" for kind, problems in kinds.items() if problems)
            raise DataError(f"model.pretrained does not fit the task's model: {told}. {_mend(kinds)}")


def match(model: nn.Module, offers: Mapping[str, Source], config: Mapping[str, Any]) -> Matched:
    """Of a model whose parameters need no memory."""
    found, used = Matched(), set[str]()
    names = _by_tensor(model)
    below, above = _alignment(model, [alias(name) for group in names.values() for name in group], offers)
    for group, tensor in ((group, _tensor(model, group[0])) for group in names.values()):
        wanted = {above + alias(name)[len(below) :] for name in group if alias(name).startswith(below)}
        taken = sorted(wanted & offers.keys())
        used.update(taken)
        if not taken:
            found.missing[group[0]] = f"{list(tensor.shape)}, in no file"
            continue
        source = offers[taken[0]] if len(taken) == 1 else Same(tuple(offers[name] for name in taken))
        if problem := _misfit(tensor, source):
            found.misfits[group[0]] = problem
        else:
            found.sources |= dict.fromkeys(group, source)
    for name in sorted(offers.keys() - used):
        if _known_to_be_left(name, model, config):
            found.left_out.append(name)
        else:
            leaf = offers[name].leaves[0]
            found.unexpected[name] = f"{list(offers[name].shape)} in {leaf.file.name}"
    return found


def alias(name: str) -> str:
    """As the weight was called before somebody put a layer around it."""
    return _WRAPPED.sub("", name)


def core_of(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The outermost model of transformers, and its name; nobody has built one where that was never imported."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return next(((name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)), None)


def _by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """Tied weights have several names."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), []).append(name)
    return found


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    found = module._parameters.get(own)
    return found if found is not None else module.get_buffer(own)


def _alignment(model: nn.Module, names: Sequence[str], offers: Mapping[str, Source]) -> tuple[str, str]:
    """What the model's names begin with in place of what those in the files begin with.

    A model with a head has its body one level below, files of a body alone have not; a task may put all into a module
    of its own. Whichever pair makes most names meet is meant; the rest is listed as missing and unexpected.
    """
    core = core_of(model)
    outer = f"{alias(core[0])}." if core and core[0] else ""
    body = f"{core[1].base_model_prefix}." if core else ""
    pairs = [("", ""), (outer, ""), (outer, body), (outer + body, ""), (outer + body, body)]
    inner = [name.removeprefix(outer) for name in names if name.startswith(outer)]
    for probe in inner[:1]:
        pairs += [(outer, name.removesuffix(probe)) for name in sorted(offers) if name.endswith(f".{probe}")]

    def meetings(pair: tuple[str, str]) -> int:
        below, above = pair
        return sum(name.startswith(below) and above + name[len(below) :] in offers for name in names)

    return max(pairs, key=meetings)  # of several as good, the first


def _misfit(tensor: Tensor, source: Source) -> str:
    """Of what is made of many, as experts are, each is looked at."""
    for part in source.parts if isinstance(source, Same) else (source,):
        if tuple(tensor.shape) != part.shape:
            return f"is {list(part.shape)} in {_place(part.leaves[0], source)}, and {list(tensor.shape)} in the model"
    wanted = str(tensor.dtype).removeprefix("torch.")
    for leaf in source.leaves:
        if not _fits(leaf.dtype, tensor):
            return f"is of type {leaf.dtype} in {_place(leaf, source)}, and {wanted} in the model"
    return ""


def _fits(kind: str, tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return kind in _FLOATS or kind.startswith("F8")
    return _WHOLE.get(kind) == tensor.dtype


def _place(leaf: Entry, source: Source) -> str:
    return leaf.file.name if len(source.leaves) == 1 else f"{leaf.file.name} ({leaf.name})"


def _known_to_be_left(name: str, model: nn.Module, config: Mapping[str, Any]) -> bool:
    """Layers that predict further tokens stand after the last one; the models of transformers have none of them."""
    core = core_of(model)
    patterns = (getattr(core[1], "_keys_to_ignore_on_load_unexpected", None) or ()) if core else ()
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    layers, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    predicts = layer is not None and layers is not None and layers <= int(layer[1]) < layers + further
    return predicts or any(re.search(pattern, name) for pattern in patterns)


def _named(name: str, allow: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in allow)


def _others(problems: Mapping[str, str], allow: Sequence[str]) -> dict[str, str]:
    return {name: said for name, said in problems.items() if not _named(name, allow)}


def _some(problems: Mapping[str, str]) -> str:
    listed = ", ".join(f"{name} {said}" for name, said in list(problems.items())[:_TOLD])
    return listed + (f" and {len(problems) - _TOLD} more, all in the log" if len(problems) > _TOLD else "")


def _mend(kinds: Mapping[str, Mapping[str, str]]) -> str:
    first: Iterator[str] = (name for problems in kinds.values() for name in problems)
    return f"Build the model these weights are of, or name what is meant in model.allow, as [{next(first)!r}]"
