"""Settings that `pipe.yaml` had in earlier versions: an error for users, an upgrade for recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.config import Config, parse_config, parse_recorded
from pipeline.contract.errors import ConfigError
from pipeline.contract.settings.old_names import REPLACED
from pipeline.contract.settings.section import Section

MINIMAL: dict[str, Any] = {"name": "digits", "task": "task.py:Digits", "codec": "codec.py:DigitsCodec"}
OLD_SETTINGS = [name for name in REPLACED if "." in name]


def all_settings() -> set[str]:
    names = set()
    for section, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            names |= {f"{section}.{name}" for name in kind.model_fields}
        else:
            names.add(section)
    return names


def upgraded(**sections: Any) -> Config:
    return parse_recorded({**MINIMAL, **sections}, "run.json")


def test_pipe_yaml_has_at_most_179_settings() -> None:
    assert len(all_settings()) <= 179


@pytest.mark.parametrize("name", OLD_SETTINGS)
def test_an_old_name_gives_an_error_that_names_the_new_one(name: str) -> None:
    section, setting = name.split(".")
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, section: {setting: 1}}, "pipe.yaml")
    unknown = section if section == "jobs" else name
    assert str(caught.value) == f"pipe.yaml: unknown setting `{unknown}`; {REPLACED[name]}"


def test_no_old_name_is_a_setting_and_every_advised_one_is() -> None:
    settings = all_settings()
    assert not settings & REPLACED.keys()
    sections = Config.model_fields.keys()
    for advice in REPLACED.values():
        for section, name in re.findall(r"`(\w+)\.(\w+)", advice):
            assert section not in sections or f"{section}.{name}" in settings, advice


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"package": {"modelcar": True}}, "`package.modelcar`: it was a switch once; write `scratch`"),
        ({"deploy": {"mode": "inferenceservice"}}, "write `deploy.target=kserve`"),
    ],
)
def test_an_old_value_gives_an_error_that_names_the_new_one(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config({**MINIMAL, **section}, "pipe.yaml")


def test_a_record_with_every_old_setting_gives_the_defaults_of_today() -> None:
    recorded = json.loads((Path(__file__).parent / "recorded_config.json").read_text())
    assert {name for name in OLD_SETTINGS if name != "evaluate.force_reason"} - {
        f"{section}.{name}" for section, values in recorded.items() if isinstance(values, dict) for name in values
    } == set()
    defaults_of_then = {
        "tune": {"metric": "accuracy"},
        "train": {"precision": "fp32"},
        "evaluate": {"rule": "non-inferior", "margin": 0.01},
        "deploy": {"memory": "512Mi"},
    }
    today = {**MINIMAL, **defaults_of_then}
    assert parse_recorded(recorded, "run.json") == parse_config(today, "pipe.yaml")


def test_recorded_overrides_of_old_settings_are_upgraded_too() -> None:
    recorded = json.loads((Path(__file__).parent / "recorded_config.json").read_text())
    config = parse_recorded(recorded, "run.json", ["jobs.executor=kubernetes", "train.snapshot_every=3"])
    assert config.cluster.executor == "kubernetes"
    config = parse_recorded(recorded, "run.json", ["train.snapshot=memory", "train.restarts=7"])
    assert (config.train.snapshot, config.train.restarts) == ("memory:10", 7)


def test_an_upgrade_changes_no_configuration_of_today() -> None:
    config = parse_config({**MINIMAL, "train": {"snapshot": "memory:5"}, "deploy": {"ingress_class": "nginx"}}, "test")
    assert parse_recorded(config.model_dump(mode="json"), "run.json") == config


@pytest.mark.parametrize(
    ("train", "setting", "value"),
    [
        ({"parallel": "fsdp", "sync": "allreduce", "backend": "torch"}, "strategy", "fsdp"),
        ({"parallel": "ddp", "sync": "diloco", "backend": "torch"}, "strategy", "diloco"),
        ({"parallel": "ddp", "sync": "allreduce", "backend": "horovod"}, "strategy", "horovod"),
        ({"compress": "powersgd", "compress_rank": 4, "compress_share": 0.1}, "compress", "powersgd:4"),
        ({"compress": "topk", "compress_rank": 4, "compress_share": 0.1}, "compress", "topk:0.1"),
        ({"elastic": "close", "elastic_shards": 4}, "elastic_shards", 0),
        ({"elastic": "exact", "elastic_shards": 4}, "elastic_shards", 4),
        ({"snapshot": "memory", "snapshot_every": 5}, "snapshot", "memory:5"),
        ({"snapshot": "none", "snapshot_every": 5}, "snapshot", "none"),
        ({"warmup": 0.5}, "warmup_ratio", 0.5),
    ],
)
def test_a_recorded_training_keeps_its_meaning(train: dict[str, Any], setting: str, value: object) -> None:
    assert getattr(upgraded(train=train).train, setting) == value


def test_a_recorded_deployment_keeps_its_meaning() -> None:
    by_ingress = {
        "target": "kubernetes",
        "mode": "deployment",
        "expose": "ingress",
        "ingress_class": "",
        "gateway": "x",
    }
    config = upgraded(deploy={**by_ingress, "metrics_adapter": "none", "in_flight": 8})
    assert (config.deploy.target, config.deploy.ingress_class, config.deploy.gateway) == ("kubernetes", "default", "")
    assert config.deploy.target_concurrency == 0
    knative = {"target": "kubernetes", "mode": "inferenceservice", "kserve_mode": "Knative", "canary_percent": 10}
    config = upgraded(deploy=knative, cluster={"pull_secret": "registry"}, rollout={"canary": 0})
    assert (config.deploy.target, config.deploy.image_pull_secret) == ("kserve-knative", "registry")
    assert config.rollout.canary_percent == 10
    assert upgraded(serve={"canary": "10%"}).rollout.canary_percent == 10
    assert upgraded(jobs={"executor": "kubernetes", "steps": ["train"]}).cluster.executor == "kubernetes"


def test_a_recorded_gate_and_package_keep_their_meaning() -> None:
    config = upgraded(
        prepare={"drift": "off", "labels": "warn", "range": "off"},
        evaluate={"require": {"accuracy": 0.9}, "calibration": {"ece": 0.1}, "slice_min": 10},
        package={"build": "never", "modelcar": True, "modelcar_base": "", "base": "python:3.12"},
    )
    assert config.prepare.drift == "warn"
    assert config.evaluate.require == {"accuracy": 0.9, "ece": 0.1}
    assert (config.package.builder, config.package.modelcar) == ("none", "scratch")
    assert config.package.base_image == "python:3.12"
