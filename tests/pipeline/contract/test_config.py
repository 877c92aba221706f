from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.config import Config, load_config, override_config, parse_config
from pipeline.system.errors import ConfigError, ConflictError

MINIMAL: dict[str, Any] = {"name": "digits", "task": "task.py:Digits", "codec": "codec.py:DigitsCodec"}


def config(**sections: Any) -> Config:
    return parse_config({**MINIMAL, **sections}, source="pipe.yaml")


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").write_text("name: a\ntask: t.py:T\ncodec: c.py:C\ntrain: {epochs: 3, seed: 7}\n")
    found = load_config(tmp_path / "pipe.yaml", ["train.epochs=9", "evaluate.require.accuracy=0.5"])
    assert (found.train.epochs, found.train.seed, found.evaluate.require) == (9, 7, {"accuracy": 0.5})


@pytest.mark.parametrize(
    ("sections", "answer"),
    [
        ({"trian": {"epochs": 1}}, "unknown setting `trian`; did you mean `train`?"),
        ({"train": {"epoch": 1}}, "unknown setting `train.epoch`; did you mean `train.epochs`?"),
        ({"train": {"min_replicas": 3}}, "did you mean `deploy.min_replicas`?"),
        ({"prepare": {"qqqqqqqq": 1}}, "settings here: copies, leaks,"),
        (
            {"tune": {"space": {"train.lr": {"lo": 1, "high": 2}}}},
            "unknown setting `tune.space.train.lr.lo`; did you mean `tune.space.train.lr.low`?",
        ),
    ],
)
def test_unknown_setting_suggests_the_nearest_one(sections: dict[str, Any], answer: str) -> None:
    assert answer in refusal(**sections)


@pytest.mark.parametrize(("action", "copies"), [("error", "error"), (False, "exact"), ("off", "exact")])
def test_former_name_of_copies_keeps_its_meaning(action: Any, copies: str) -> None:
    found = config(prepare={"near_duplicates": action, "leaks": "warn"})
    assert (found.prepare.copies, found.prepare.leaks) == (copies, "warn")
    assert override_config(config(), [f"prepare.near_duplicates={action}"]).prepare.copies == copies


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="`task` is missing"):
        parse_config({"name": "x", "codec": "codec.py:C"}, source="pipe.yaml")


def test_every_mistake_is_reported_at_once() -> None:
    text = refusal(train={"epochs": -1, "lr": -1})
    assert "`train.epochs`" in text
    assert "`train.lr`" in text


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "epochs", "many"),
        ("train", "epochs", 2.5),
        ("train", "epochs", -1),
        ("train", "epochs", [3]),
        ("train", "optimizer", "adam"),
        ("train", "seed", -1),
        ("train", "seed", 2**64),
        ("train", "warmup", 1.5),
        ("evaluate", "confidence", 1.0),
        ("evaluate", "require", {"accuracy": "high"}),
        ("export", "batch_sizes", []),
        ("export", "batch_sizes", [0]),
        ("deploy", "port", 65536),
    ],
)
def test_a_wrong_value_is_refused_by_the_full_name_of_its_key(section: str, key: str, value: Any) -> None:
    assert f"`{section}.{key}" in refusal(**{section: {key: value}})


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("key", ["epochs", "lr", "seed"])
def test_boolean_is_refused_for_a_number(key: str, value: bool) -> None:
    assert f"`train.{key}`" in refusal(train={key: value})


@pytest.mark.parametrize("value", ["nan", "inf", ".nan", "-.inf"])
@pytest.mark.parametrize("key", ["train.lr", "evaluate.margin", "evaluate.require.accuracy", "export.rtol"])
def test_a_number_that_is_not_finite_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"`{key}`"):
        override_config(config(), [f"{key}={value}"])


def test_a_section_that_is_not_a_mapping_is_refused() -> None:
    assert "`train`" in refusal(train=3)


@pytest.mark.parametrize("name", ["Digits", "-digits", "digits-", "dig its", "d" * 41, ""])
def test_name_that_is_invalid_in_kubernetes_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="`name`"):
        parse_config({**MINIMAL, "name": name}, source="pipe.yaml")


def test_long_value_is_shortened_in_the_message() -> None:
    assert len(refusal(train={"epochs": "x" * 5000})) < 300


def test_numbers_with_an_exponent_but_no_dot_are_accepted() -> None:
    assert override_config(config(), ["train.lr=1e-3"]).train.lr == 1e-3
    assert config(train={"lr": "2e-4"}).train.lr == 2e-4


def test_an_override_may_hold_a_list_or_an_equals_sign() -> None:
    found = override_config(config(), ["export.batch_sizes=[1, 4]", "deploy.context=a=b"])
    assert found.export.batch_sizes == (1, 4)
    assert found.deploy.context == "a=b"


def test_an_override_without_a_value_empties_the_text() -> None:
    chosen = config(deploy={"context": "there"})
    assert override_config(chosen, ["deploy.context="]).deploy.context == ""


@pytest.mark.parametrize("override", ["train.epochs", "=3", "train.lr.deep=1", "train.lr=[1"])
def test_malformed_override_is_quoted(override: str) -> None:
    with pytest.raises(ConfigError, match="override") as caught:
        override_config(config(), [override])
    assert override in str(caught.value)


def test_configuration_round_trips_through_its_dump() -> None:
    found = config(train={"lr": 0.3}, export={"batch_sizes": [5]}, evaluate={"require": {"accuracy": 0.9}})
    assert parse_config(found.model_dump(mode="json"), source="run.json") == found


def test_a_missing_file_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipe init"):
        load_config(tmp_path / "pipe.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a mapping"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"train: {epochs: [1\nname: x", "not valid YAML"),
        (b"name: \xff\xfe\n", "not valid YAML"),
        (b"name: a\ntask: t.py:T\nname: b\n", "is set twice in the mapping at line 1"),
        (b"name: a\ntrain:\n  lr: 1\n  epochs: 2\n  lr: 3\n", "is set twice in the mapping at line 3"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_on_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "pipe.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / "pipe.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("axis", "complaint"),
    [
        ({"low": 1}, "write it as `low` and `high`, or as `choices`"),
        ([32, 64], "write a list as `choices: [32, 64]`"),
        ({}, "write it as `low` and `high`, or as `choices`"),
        ({"low": 1, "high": 2, "choices": [1]}, "write it as `low` and `high`, or as `choices`"),
        ({"low": 2, "high": 2}, "low must be smaller than high"),
        ({"low": 0, "high": 1, "log": True}, "log needs a range whose low is above 0"),
        ({"choices": [1], "log": True}, "log needs a range whose low is above 0"),
    ],
)
def test_search_space_must_be_a_range_or_choices(axis: Any, complaint: str) -> None:
    assert f"`tune.space.train.lr`: {complaint}" in refusal(tune={"space": {"train.lr": axis}})


def test_types_of_choices_are_preserved() -> None:
    space = config(tune={"space": {"train.lr": {"choices": [1, True, 1.5, "x"]}}}).tune.space
    assert [type(choice) for choice in space["train.lr"].choices] == [int, bool, float, str]


def test_conflict_error_only_if_every_setting_is_valid() -> None:
    with pytest.raises(ConflictError):
        config(train={"strategy": "diloco", "precision": "fp16"})
    with pytest.raises(ConfigError) as caught:
        config(train={"strategy": "diloco", "precision": "fp16"}, serve={"threads": -1})
    assert not isinstance(caught.value, ConflictError)
