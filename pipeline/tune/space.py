"""What is searched: each key checked against the configuration, and as Optuna takes it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from pipeline.plan import with_upstream
from pipeline.spec.config import Config, override_config
from pipeline.spec.errors import ConfigError, ConflictError
from pipeline.spec.sections import Axis
from pipeline.steps import KINDS

STEPS = with_upstream(("train",))  # what a trial walks


def distributions(config: Config) -> dict[str, BaseDistribution]:
    """The search space; a key or a value that the configuration refuses is told before the first trial."""
    if not config.tune.space:
        raise ConfigError(
            "tune.space is empty; name what to search, as in `train.lr: {low: 0.0001, high: 0.1, log: true}`"
        )
    return {key: _distribution(config, key, axis) for key, axis in config.tune.space.items()}


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """As they would be typed."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _distribution(config: Config, key: str, axis: Axis) -> BaseDistribution:
    for value in axis.choices or (axis.low, axis.high):
        _check(config, key, value)
    _check_reach(key)
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    assert axis.low is not None and axis.high is not None
    kinds = set(_kinds(_annotation(key)))
    if float in kinds:
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    if int in kinds:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    raise ConfigError(f"tune.space.{key}: it takes no numbers; give it `choices`")


def _check(config: Config, key: str, value: bool | int | float | str | None) -> None:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    with contextlib.suppress(ConflictError):  # another searched key may settle it; if none does, the trial tells
        override_config(config, as_overrides({key: number}), source="tune.space")


def _check_reach(key: str) -> None:
    """A setting that training does not depend on would give the same value in every trial."""
    reach = {setting for step in STEPS for setting in KINDS[step].settings}
    if not {key, key.partition(".")[0]} & reach:
        raise ConfigError(
            f"tune.space.{key}: training does not depend on it, so all trials would be alike; "
            f"search keys of {', '.join(sorted(reach))}"
        )


def _annotation(key: str) -> Any:
    found: Any = Config
    for name in key.split("."):
        found = found.model_fields[name].annotation
    return found


def _kinds(annotation: Any) -> Iterator[Any]:
    """Of a key that takes a number or a word, both."""
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)
