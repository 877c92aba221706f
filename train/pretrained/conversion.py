"""What a folder's files offer, under the names and in the layout that transformers' models have today.

Official files hold experts one by one, and an FP8 matrix beside its scales; the models have experts in one tensor.
How these belong together is transformers' own table, read here as a plan of what to read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pipeline.contract.errors import ConfigError, DataError
from train.pretrained.source import Entry, Join, Leaf, Scaled, Source, Stack

_SCALE = "_scale_inv"
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


def offered(entries: Mapping[str, Entry], config: Mapping[str, Any], converted: bool) -> dict[str, Source]:
    """By the names in the files or, `converted`, by those that transformers' models have instead."""
    plain = _dequantised(entries, config)
    return _converted(plain, str(config["model_type"])) if converted else plain


def _dequantised(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, Source]:
    """Eight-bit matrices with their scales; everything else as it stands."""
    found: dict[str, Source] = {}
    block = _block_of(entries, config)
    for name, entry in entries.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in entries:
            continue
        if entry.dtype not in _EIGHT_BITS:
            found[name] = Leaf(entry)
            continue
        scale = entries.get(name + _SCALE)
        if scale is None:
            raise DataError(f"{entry.file}: {name} is of type {entry.dtype} and no file has its {name}{_SCALE}")
        _check_scale(entry, scale, block)
        found[name] = Scaled(entry, scale, block)
    return found


def _block_of(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> tuple[int, int]:
    said = config.get("quantization_config")
    if said is None:
        if odd := next((entry for entry in entries.values() if entry.dtype in _EIGHT_BITS), None):
            raise DataError(f"{odd.file}: {odd.name} is of type {odd.dtype}; config.json has no quantization_config")
        return (0, 0)
    method, block = said.get("quant_method"), said.get("weight_block_size")
    if method != "fp8" or not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) for b in block)):
        raise ConfigError(
            f"model.pretrained: quantised by {method!r} with weight_block_size {block}; of quantised weights fp8 with "
            "blocks of two sizes is read; take the weights in bf16"
        )
    if min(block) < 1:
        raise ConfigError(f"model.pretrained: weight_block_size {block} must be of numbers above zero")
    return block[0], block[1]


def _check_scale(weight: Entry, scale: Entry, block: tuple[int, int]) -> None:
    expected = tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=False))
    if len(weight.shape) != 2 or scale.shape != expected:
        raise DataError(
            f"{scale.file}: {scale.name} is {list(scale.shape)}; {weight.name} of {list(weight.shape)} in blocks of "
            f"{list(block)} has scales of {list(expected)}"
        )
    if scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
        raise DataError(f"{scale.file}: {scale.name} is of type {scale.dtype}; scales are floating-point numbers")


def _converted(plain: Mapping[str, Source], kind: str) -> dict[str, Source]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    converters = get_checkpoint_conversion_mapping(kind) or []
    found: dict[str, Source] = {}
    groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, source in plain.items():
        for place, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                groups[target, place][pattern].append(name)
                break
        else:
            found[name] = source
    for (target, place), parts in groups.items():
        found[target] = _joined(target, converters[place], parts, plain)
    return found


def _joined(target: str, converter: Any, parts: Mapping[str, list[str]], plain: Mapping[str, Source]) -> Source:
    """Stacked, and what was stacked joined: the operations of every mixture of experts that is read."""
    operations = [(type(operation).__name__, operation.dim) for operation in converter.operations]
    if (
        not operations
        or operations[0] != ("MergeModulelist", 0)
        or {kind for kind, _ in operations[1:]} - {"Concatenate"}
    ):
        raise ConfigError(f"model.pretrained: {target} is made from the files by {operations}, which is not known here")
    _refuse_gaps(target, converter.source_patterns, parts)
    stacks = tuple(_stack(sorted(parts[p], key=_number), plain) for p in converter.source_patterns)
    return Join(stacks, operations[1][1]) if len(operations) > 1 else stacks[0]


def _stack(names: list[str], plain: Mapping[str, Source]) -> Stack:
    sources = tuple(plain[name] for name in names)
    for name, source in zip(names, sources, strict=True):
        if source.shape != sources[0].shape:
            raise DataError(
                f"{source.leaves[0].file}: {name} is {list(source.shape)}, the first one, {names[0]}, "
                f"{list(sources[0].shape)}; the model has all in one tensor"
            )
    return Stack(sources)


def _refuse_gaps(target: str, patterns: list[str], parts: Mapping[str, list[str]]) -> None:
    """Every expert has every matrix; the last ones may all be absent, which the shape tells."""
    count = 1 + max(_number(name) for names in parts.values() for name in names)
    gaps = [
        pattern.replace("*", str(number), 1)
        for pattern in patterns
        for number in sorted(set(range(count)) - {_number(name) for name in parts.get(pattern, ())})
    ]
    if gaps:
        raise DataError(f"model.pretrained: {target} is made of the weights of {count} experts; missing: {gaps}")


def _number(name: str) -> int:
    """Of the expert: the last number of the name."""
    return int(re.findall(r"\.(\d+)\.", name)[-1])
