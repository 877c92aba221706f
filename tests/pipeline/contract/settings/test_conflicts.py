from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pipeline.contract.config import parse_config
from pipeline.contract.settings.conflicts import CONFLICTS, MANY, Conflict, find_conflict
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError

DEFAULTS = Train().model_dump()
CHOICES: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp", "fsdp", "local_sgd", "diloco", "parameter_server", "horovod"),
    "weight_copies": (1, MANY),
    "tensor_parallel": (1, MANY),
    "expert_parallel": (1, MANY),
    "pipeline_parallel": (1, MANY),
    "accumulate": (1, MANY),
    "compress": ("none", "fp16", "bf16", "powersgd", "topk"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "balance": ("equal", "auto"),
    "batch_size": (64, "auto"),
    "workers": (0, 2),
    "threads": (0, MANY),
    "elastic_shards": (0, 1),
    "launcher": ("torchrun", "mpirun"),
    "nodes": (1, 2),
}
TRUTH = (False, True)


def smallest_conflict(conflict: Conflict) -> dict[str, Any]:
    """Return the smallest train section that breaks this conflict."""
    other = next(choice for choice in CHOICES.get(conflict.other, TRUTH) if choice not in conflict.allowed)
    return {conflict.setting: min(conflict.values, key=str), conflict.other: other}


def fixed(train: dict[str, Any], sentence: str) -> dict[str, Any]:
    """Return the section with the change that the error advises."""
    advice = re.search(r"; use (\w+)=(\w+)", sentence)
    return {**train, advice[1]: yaml.safe_load(advice[2])} if advice else train


def test_conflict_error_shows_the_values_as_written() -> None:
    assert find_conflict(DEFAULTS) == ""
    sentence = find_conflict({**DEFAULTS, "expert_parallel": 4, "pipeline_parallel": 8})
    assert sentence.startswith("expert_parallel=4 does not go with pipeline_parallel=8")
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": {"compress": "powersgd:4", "strategy": "fsdp"}}
    message = r"`train`: compress=powersgd:4 does not go with strategy=fsdp: .*; use compress="
    with pytest.raises(ConfigError, match=message):
        parse_config(values, source="pipe.yaml")


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: f"{conflict.setting}-{conflict.other}")
def test_a_conflict_names_both_settings_and_advice_that_resolves_it(conflict: Conflict) -> None:
    train = smallest_conflict(conflict)
    sentence = find_conflict({**DEFAULTS, **train})
    for name in train:
        assert f"{name}=" in sentence
    assert find_conflict({**DEFAULTS, **fixed(train, sentence)}) != sentence
