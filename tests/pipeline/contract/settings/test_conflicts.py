from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from pipeline.contract.config import parse_config
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.conflicts import MANY, RULES, Rule, conflict
from pipeline.contract.settings.stages import Train

DEFAULTS = Train().model_dump()
CHOICES: dict[str, tuple[Any, ...]] = {
    "parallel": ("ddp", "fsdp"),
    "tensor": (1, MANY),
    "expert": (1, MANY),
    "pipeline": (1, MANY),
    "accumulate": (1, MANY),
    "sync": ("allreduce", "local_sgd", "diloco", "parameter_server"),
    "compress": ("none", "fp16", "bf16", "powersgd", "topk"),
    "precision": ("fp32", "bf16", "fp16"),
    "balance": ("equal", "auto"),
    "batch_size": (64, "auto"),
    "workers": (0, 2),
    "backend": ("torch", "horovod"),
    "elastic": ("close", "exact"),
}
TRUTH = (False, True)


def breaking(rule: Rule) -> dict[str, Any]:
    """The smallest train section that breaks this rule."""
    value = 25 if rule.word == "bucket_mb" else min(rule.values, key=str)
    other = next(choice for choice in CHOICES.get(rule.other, TRUTH) if choice not in rule.allowed)
    return {rule.word: value, rule.other: other}


def mended(train: dict[str, Any], sentence: str) -> dict[str, Any]:
    """What the sentence says to do."""
    found = re.search(r"; use (\w+)=(\w+)", sentence)
    return {**train, found[1]: yaml.safe_load(found[2])} if found else train


def test_the_words_of_a_plain_run_go_together() -> None:
    assert conflict(DEFAULTS) == ""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.word}-{rule.other}")
def test_a_conflict_names_both_words_and_a_choice_that_mends_it(rule: Rule) -> None:
    train = breaking(rule)
    sentence = conflict({**DEFAULTS, **train})
    for name in train:
        assert f"{name}=" in sentence
    assert conflict({**DEFAULTS, **mended(train, sentence)}) != sentence


def test_the_command_refuses_with_one_sentence() -> None:
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": {"compress": "powersgd", "parallel": "fsdp"}}
    with pytest.raises(
        ConfigError, match=r"`train`: compress=powersgd does not go with parallel=fsdp: .*; use compress="
    ):
        parse_config(values, source="pipe.yaml")


def test_a_number_above_two_is_shown_as_it_was_written() -> None:
    assert conflict({**DEFAULTS, "tensor": 4, "pipeline": 8}).startswith("tensor=4 does not go with pipeline=8")


def test_a_loss_is_not_maximized() -> None:
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "tune": {"metric": "loss"}}
    with pytest.raises(ConfigError, match="metric=loss does not go with direction=maximize"):
        parse_config(values, source="pipe.yaml")
