"""Read, override and check `pipe.yaml`; an unknown setting or a wrong type is an error with a fix."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pipeline.contract.settings.cluster import Cluster, Rollout
from pipeline.contract.settings.section import Section, section_of
from pipeline.contract.settings.stages import (
    Deploy,
    Evaluate,
    Export,
    Model,
    Monitor,
    Package,
    Prepare,
    Serve,
    TrackerName,
    Train,
    Tune,
)
from pipeline.system.errors import ConfigError, ConflictError


class Config(Section):
    """The whole of `pipe.yaml`."""

    name: str = Field(
        pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", description="model name, used in URLs and for cluster objects"
    )
    task: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_]\w*$", description="`file.py:Class` of the task")
    codec: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_]\w*$", description="`file.py:Class` of the codec")
    registry: str = Field("", description="folder or fsspec URL of the model registry; empty: next to the runs")
    track: tuple[TrackerName, ...] = Field(
        ("tensorboard",),
        description="where a run is recorded besides its folder: `tensorboard`, `mlflow`, `wandb`; changing it runs "
        "nothing again",
    )
    prepare: Prepare = Field(default_factory=Prepare, description="checks of the data")
    model: Model = Field(default_factory=Model, description="pretrained weights")
    train: Train = Field(default_factory=Train, description="training")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="the quality gate")
    export: Export = Field(default_factory=Export, description="conversion to ONNX and its verification")
    package: Package = Field(default_factory=Package, description="container images")
    serve: Serve = Field(default_factory=Serve, description="the prediction service")
    deploy: Deploy = Field(default_factory=Deploy, description="where the service runs")
    cluster: Cluster = Field(default_factory=Cluster, description="the steps as pods on a cluster")
    rollout: Rollout = Field(default_factory=Rollout, description="how a new bundle replaces the one that serves")
    monitor: Monitor = Field(default_factory=Monitor, description="monitoring of the live service")
    tune: Tune = Field(default_factory=Tune, description="the search for better settings")

    @model_validator(mode="after")
    def _adapter_goes_with_other_sections(self) -> Config:
        problem = ""
        if self.model.adapter == "dora" and self.train.tensor_parallel > 1:
            problem = (
                f"model.adapter=dora does not go with train.tensor_parallel={self.train.tensor_parallel}: its norms "
                "need whole layers; use model.adapter=lora or train.strategy=fsdp"
            )
        train = self.train
        if self.model.adapter == "qlora" and (
            train.strategy != "ddp" or max(train.tensor_parallel, train.pipeline_parallel, train.expert_parallel) > 1
        ):
            problem = "model.adapter=qlora goes only with train.strategy=ddp without parallel layers; or use lora"
        if self.model.adapter == "none" and self.export.adapter == "separate":
            problem = "export.adapter=separate has no effect without model.adapter; set model.adapter, or leave it out"
        if not self.trains and (not self.model.pretrained or self.model.adapter != "none"):
            problem = "train.epochs=0 takes weights as they are: set model.pretrained, without model.adapter"
        if problem:
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return self

    @property
    def trains(self) -> bool:
        """Whether the weights are trained, and not taken as they are."""
        return self.train.epochs > 0

    @property
    def external_trackers(self) -> tuple[TrackerName, ...]:
        """Return the trackers with a client of their own; training itself writes the files of TensorBoard."""
        return tuple(dict.fromkeys(name for name in self.track if name != "tensorboard"))


def all_sections() -> dict[str, type[Section]]:
    return {name: kind for name, field in Config.model_fields.items() if (kind := section_of(field))}


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield recorded settings by their full names, also those of mappings in a section."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting_names() -> list[str]:
    """Return the names of all settings, as in `train.lr`."""
    names: list[str] = []
    for name, field in Config.model_fields.items():
        section = section_of(field)
        names += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return names


def setting_choices(name: str) -> list[str]:
    """Return the values of a setting that has only few; empty for another."""
    section, _, key = name.partition(".")
    field = all_sections().get(section, Config).model_fields.get(key or section)
    annotation: Any = field.annotation if field else None
    parts = [annotation, *get_args(annotation)] if get_origin(annotation) is not Literal else [annotation]
    choices = [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    return choices + (["true", "false"] if bool in parts else [])


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read `pipe.yaml` and apply `key=value` overrides."""
    try:
        values = yaml.load(path.read_text(), _Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `pipe init NAME` writes one") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, found {type(values).__name__}")
    return parse_config(values, f"{path} with overrides" if overrides else str(path), overrides)


def override_config(config: Config, overrides: Iterable[str], source: str = "override") -> Config:
    """Return the configuration with `key=value` overrides applied."""
    return parse_config(config.model_dump(mode="json"), source, overrides)


def parse_config(recorded: Mapping[str, Any], source: str, overrides: Iterable[str] = ()) -> Config:
    """Check settings after `key=value` overrides of them."""
    values = copy.deepcopy(dict(recorded))
    for override in overrides:
        _apply(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        kind = ConflictError if {item["type"] for item in error.errors()} == {"conflict"} else ConfigError
        raise kind(f"{source}: " + "; ".join(_sentences(error))) from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes `2:4` for minutes and seconds, and reads 124; of two equal keys PyYAML drops the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if doubled := next((key for i, key in enumerate(keys) if key in keys[:i]), None):
            line = node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(problem=f"{doubled!r} is set twice in the mapping at line {line}")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    text = loader.construct_scalar(node)
    return text if ":" in str(text) else loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    *sections, last = key.split(".")
    for name in sections:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {name} is not a section")
        values = inner
    try:
        values[last] = yaml.load(text, _Loader) if text else ""  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error


def _sentences(error: ValidationError) -> list[str]:
    """Return one sentence for each key: a key that takes a number or a text fails as both."""
    errors: dict[tuple[int | str, ...], dict[str, Any]] = {}
    for item in error.errors():
        is_union = item["loc"] and str(item["loc"][-1]).startswith(("constrained-", "literal["))
        location = item["loc"][:-1] if is_union else item["loc"]
        if location in errors:
            errors[location]["msg"] += f" or {item['msg'].removeprefix('Input should be ')}"
        else:
            errors[location] = {**item, "loc": location}
    return [_sentence(item) for item in errors.values()]


def _sentence(item: dict[str, Any]) -> str:
    setting = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown setting `{setting}`{_nearest(item['loc'])}"
    if item["type"] == "missing":
        return f"`{setting}` is missing"
    if item["type"] == "string_pattern_mismatch":
        patterns = {
            "name": "small letters, digits and dashes, a letter first, 40 at most",
            "task": "`file.py:Class`",
            "codec": "`file.py:Class`",
        }
        pattern = patterns.get(setting, f"what fits {item['ctx']['pattern']}")
        return f"`{setting}`: write it as {pattern} (found {item['input']!r})"
    if item["type"] == "conflict" and not item["loc"]:  # between two sections
        return str(item["msg"])
    if item["type"] in ("conflict", "form"):
        return f"`{setting}`: {item['msg']}"
    value = repr(item["input"])
    message = item["msg"][:1].lower() + item["msg"][1:]
    return f"`{setting}`: {message} (found {value if len(value) <= 60 else value[:57] + '...'})"


def _nearest(location: tuple[str | int, ...]) -> str:
    """Suggest the same key in another section, or else the most similar key of this section."""
    *sections, name_in_section = (str(part) for part in location)
    model: Any = Config
    for name in sections:  # of a section the field, of a mapping what its values are
        model = model.model_fields[name].annotation if hasattr(model, "model_fields") else get_args(model)[-1]
    other_sections = [section for section, kind in all_sections().items() if name_in_section in kind.model_fields]
    if other_sections:
        return f"; did you mean `{other_sections[0]}.{name_in_section}`?"
    similar = difflib.get_close_matches(name_in_section, list(model.model_fields), n=1, cutoff=0.5)
    if similar:
        return f"; did you mean `{'.'.join([*sections, similar[0]])}`?"
    return f"; settings here: {', '.join(model.model_fields)}"
