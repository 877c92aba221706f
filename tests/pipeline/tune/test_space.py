from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from pipeline.spec.config import override_config
from pipeline.spec.errors import ConfigError
from pipeline.tune.space import as_overrides, distributions

from .conftest import MakeConfig


def test_the_kind_of_a_range_is_that_of_its_key(make_config: MakeConfig) -> None:
    space = {
        "train.lr": {"low": "1e-4", "high": 1, "log": True},
        "train.batch_size": {"low": 16, "high": 64},
        "train.optimizer": {"choices": ["sgd", "adamw"]},
    }
    assert distributions(make_config(space)) == {
        "train.lr": FloatDistribution(1e-4, 1.0, log=True),
        "train.batch_size": IntDistribution(16, 64),
        "train.optimizer": CategoricalDistribution(("sgd", "adamw")),
    }


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        ({}, "tune.space is empty; name what to search"),
        ({"train.lrr": {"choices": [1]}}, r"unknown key `train\.lrr`; did you mean `train\.lr`\?"),
        ({"lr": {"choices": [1]}}, r"unknown key `lr`; did you mean `train\.lr`\?"),
        (
            {"train.lr": {"choices": [0.1, -1]}},
            r"tune\.space: `train\.lr`: input should be greater than 0 \(found -1\)",
        ),
        ({"train.warmup": {"low": 0.5, "high": 1.5}}, r"`train\.warmup`: input should be less than or equal to 1"),
        ({"train.epochs": {"low": 1.5, "high": 3}}, r"`train\.epochs`: input should be a valid integer"),
        ({"train.optimizer": {"choices": ["sgd", "lion"]}}, r"`train\.optimizer`: input should be 'adamw' or 'sgd'"),
        ({"train.optimizer": {"low": 1, "high": 2}}, r"`train\.optimizer`: input should be 'adamw' or 'sgd'"),
        ({"train.rendezvous": {"choices": [True]}}, r"`train\.rendezvous`: input should not be true or false"),
        ({"serve.threads": {"choices": [1, 2]}}, r"tune\.space\.serve\.threads: training does not depend on it"),
        ({"tune.seed": {"choices": [1, 2]}}, r"tune\.space\.tune\.seed: training does not depend on it"),
    ],
)
def test_a_key_or_a_value_that_the_configuration_refuses_is_told(
    make_config: MakeConfig, space: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        distributions(make_config(space))


def test_values_that_do_not_go_together_are_left_to_the_trials(make_config: MakeConfig) -> None:
    """Neither of these goes with the defaults' fp16, but other trials have other precisions."""
    space = {"train.sync": {"choices": ["allreduce", "diloco"]}, "train.precision": {"choices": ["fp32", "fp16"]}}
    config = override_config(make_config(space), ["train.precision=fp16"])
    assert set(distributions(config)) == set(space)


def test_overrides_give_back_the_very_values(make_config: MakeConfig) -> None:
    values = {"train.lr": 1.2345678901234567e-05, "train.rendezvous": "no", "train.compile": True, "train.epochs": 3}
    train = override_config(make_config(), as_overrides(values)).train
    assert [train.lr, train.rendezvous, train.compile, train.epochs] == list(values.values())
