"""Converting the weights of a folder to the names and layout of transformers' models.

Official files have experts one by one, and an FP8 matrix with its scales; the models have experts in one tensor. How
these belong together is transformers' own conversion table, translated here into sources of each weight.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pipeline.contract.errors import ConfigError, DataError
from train.pretrained.source import Concatenated, Dequantized, Entry, Source, Stacked, Whole

_SCALE = "_scale_inv"
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


def available_weights(entries: Mapping[str, Entry], config: Mapping[str, Any], converted: bool) -> dict[str, Source]:
    """Return the source of each weight by its name in the files or, if `converted`, in transformers' models."""
    plain = _with_scales(entries, config)
    return _convert(plain, str(config["model_type"])) if converted else plain


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


def _convert(plain: Mapping[str, Source], model_type: str) -> dict[str, Source]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    converters = get_checkpoint_conversion_mapping(model_type) or []
    sources: dict[str, Source] = {}
    groups: dict[tuple[str, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, source in plain.items():
        for position, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                groups[target, position][pattern].append(name)
                break
        else:
            sources[name] = source
    for (target, position), names in groups.items():
        sources[target] = _combine(target, converters[position], names, plain)
    return sources


def _combine(target: str, converter: Any, names: Mapping[str, list[str]], plain: Mapping[str, Source]) -> Source:
    """Stack the experts, and concatenate the stacks: the only operations of the supported architectures."""
    operations = [(type(operation).__name__, operation.dim) for operation in converter.operations]
    if (
        not operations
        or operations[0] != ("MergeModulelist", 0)
        or {name for name, _ in operations[1:]} - {"Concatenate"}
    ):
        raise ConfigError(f"model.pretrained: {target} needs the conversion {operations}, which is not supported")
    _refuse_gaps(target, converter.source_patterns, names)
    stacks = tuple(_stack(sorted(names[p], key=_expert_number), plain) for p in converter.source_patterns)
    return Concatenated(stacks, operations[1][1]) if len(operations) > 1 else stacks[0]


def _stack(names: list[str], plain: Mapping[str, Source]) -> Stacked:
    sources = tuple(plain[name] for name in names)
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
