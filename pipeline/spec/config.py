"""`pipe.yaml`: one frozen model per step; an unknown key or a wrong type is an error with its mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from pipeline.spec.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]  # what every generator takes
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    # Built at first use: `pipe --help` validates nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Python, and so pydantic, takes true for 1: `epochs: yes` would train one epoch."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("truth", "input should not be true or false")
        return value


class Prepare(Section):
    """What is checked before training."""

    leaks: Literal["error", "warn"] = Field("error", description="what a sample found in two splits does to the road")
    files: tuple[str, ...] = Field(
        (), description="globs of data files the task reads; a change in one reruns the road"
    )


class Train(Section):
    """How the model is trained."""

    epochs: Positive = Field(10, description="passes over the training split, at most")
    batch_size: Positive = Field(64, description="samples per optimizer step, over all processes together")
    accumulate: Positive = Field(1, description="micro-batches each process cuts its slice of the batch into")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="`adamw`, or `sgd` with momentum 0.9")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay (L2 for sgd)")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="learning rate after the warm-up")
    warmup: Fraction = Field(0.05, description="share of all steps spent raising the learning rate from zero")
    clip_norm: float = Field(1.0, ge=0, description="largest gradient norm; 0 switches clipping off")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="autocast type; fp16 scales its gradients")
    patience: Natural = Field(0, description="epochs without a better validation loss before stopping; 0 never stops")
    seed: Seed = Field(0, description="seed of weights, data order and augmentation")
    deterministic: bool = Field(True, description="ask torch for deterministic algorithms")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto` takes GPUs when torch sees them")
    processes: Natural = Field(0, description="processes per node; 0 means one a GPU, or 2 on CPU")
    nodes: Positive = Field(1, description="machines that train together")
    rendezvous: str = Field("", description="`host:port` all nodes reach, needed when `nodes` is above 1")
    image: str = Field("", description="container image of the training pods on a cluster")
    checkpoint_every: Natural = Field(100, description="optimizer steps between checkpoints; 0: only at epoch ends")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints kept, beside the best")
    log_every: Positive = Field(10, description="optimizer steps between two lines of metrics.jsonl")
    timeout_seconds: Positive = Field(300, description="longest wait for another process before giving up")


class Evaluate(Section):
    """What the candidate must prove."""

    metric: str = Field("accuracy", description="metric of the task the candidate is compared by; higher is better")
    margin: float = Field(0.01, ge=0, description="how much worse than the baseline the interval's lower bound may be")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="level of the bootstrap interval")
    resamples: int = Field(10_000, ge=100, description="bootstrap resamples")
    require: dict[str, float] = Field({}, description="absolute floors, as in `{accuracy: 0.9}`")
    force_reason: str = Field("", description="pass a failing candidate, with this reason on record for ever")
    batch_size: Positive = Field(256, description="samples per forward pass")
    processes: Positive = Field(1, description="processes that share the test set")
    seed: Seed = Field(0, description="seed of the bootstrap")


class Export(Section):
    """How the ONNX file is made and what it must agree on."""

    opset: Annotated[int, Field(ge=18, le=25)] = Field(20, description="ONNX operator set")
    rtol: float = Field(1e-3, ge=0, description="relative tolerance against torch")
    atol: float = Field(1e-4, ge=0, description="absolute tolerance against torch")
    batch_sizes: tuple[Positive, ...] = Field((1, 2, 7, 256), min_length=1, description="sizes the test set is run at")
    external_data: Literal["auto", "always"] = Field("auto", description="`auto` keeps weights inside up to 1 GiB")
    golden: Positive = Field(4, description="test samples kept in the bundle as golden requests")


class Package(Section):
    """The container of the prediction service."""

    build: Literal["auto", "never", "require"] = Field("auto", description="`auto` builds where a builder works")
    builder: Literal["auto", "docker", "podman", "buildah"] = Field("auto", description="which builder")
    base: str = Field("python:3.11-slim", description="base image; name it by digest to pin it")
    image: str = Field("", description="image name without tag; empty means the model's name")


class Serve(Section):
    """Limits and runtime of the prediction service; they travel in the bundle."""

    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="ONNX Runtime provider; `cuda` never falls back"
    )
    threads: Natural = Field(0, description="threads inside one inference; 0 lets ONNX Runtime choose")
    max_batch_size: Positive = Field(1024, description="most instances in one request")
    max_body_bytes: Positive = Field(64 << 20, description="largest request body")


class Deploy(Section):
    """Where the service runs."""

    target: Literal["local", "kubernetes"] = Field("local", description="a background process here, or a cluster")
    host: str = Field("127.0.0.1", description="address the local service listens on")
    port: Port = Field(8080, description="HTTP port; locally the next free one is taken, said aloud")
    grpc_port: Natural = Field(0, description="gRPC port of the local service; 0 means the HTTP port plus 1")
    timeout_seconds: Positive = Field(120, description="longest wait for a ready service")
    mode: Literal["deployment", "inferenceservice"] = Field("deployment", description="plain Kubernetes or KServe")
    namespace: str = Field("default", description="Kubernetes namespace")
    context: str = Field("", description="kubeconfig context; empty means the current one")
    image: str = Field("", description="image to run; empty means the one `package` named")
    render: bool = Field(False, description="only write the Kubernetes manifests; `--render` sets it")
    replicas: Positive = Field(2, description="replicas the autoscaler never goes below")
    max_replicas: Positive = Field(6, description="replicas the autoscaler never goes above")
    cpu: str = Field("500m", description="CPU request of a serving pod")
    memory: str = Field("512Mi", description="memory request and limit of a serving pod")
    gpus: Natural = Field(0, description="GPUs a serving pod asks for")


class Config(Section):
    """The whole of `pipe.yaml`."""

    name: str = Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$", description="model name in URLs and on the cluster")
    task: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_]\w*$", description="`file.py:Class` of the task")
    codec: str = Field(pattern=r"^[^:]+\.py:[A-Za-z_]\w*$", description="`file.py:Class` of the codec")
    prepare: Prepare = Field(default_factory=Prepare, description="checks of the data")
    train: Train = Field(default_factory=Train, description="training")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="the gate")
    export: Export = Field(default_factory=Export, description="ONNX and its proof")
    package: Package = Field(default_factory=Package, description="the container")
    serve: Serve = Field(default_factory=Serve, description="the service's limits")
    deploy: Deploy = Field(default_factory=Deploy, description="where it runs")


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read `pipe.yaml` and apply `key=value` overrides."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `pipe init NAME` writes one") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, found {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return parse_config(values, source=f"{path} with overrides" if overrides else str(path))


def override_config(config: Config, overrides: Iterable[str]) -> Config:
    """A configuration with `key=value` overrides on top."""
    values = config.model_dump(mode="json")
    for override in overrides:
        _apply(values, override)
    return parse_config(values, source="override")


def parse_config(values: Mapping[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_sentence(dict(item)) for item in error.errors())) from error


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
        values[last] = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error


def _sentence(item: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key `{place}`{_nearest(item['loc'])}"
    if item["type"] == "missing":
        return f"`{place}` is missing"
    if item["type"] == "string_pattern_mismatch":
        form = "small letters, digits and dashes, 40 at most" if place == "name" else "`file.py:Class`"
        return f"`{place}`: write it as {form} (found {item['input']!r})"
    found = repr(item["input"])
    message = item["msg"][:1].lower() + item["msg"][1:]
    return f"`{place}`: {message} (found {found if len(found) <= 60 else found[:57] + '...'})"


def _nearest(location: tuple[str | int, ...]) -> str:
    """The same key in another section, or else the key of this one that looks most like it."""
    *sections, last = (str(part) for part in location)
    model: Any = Config
    for name in sections:
        model = model.model_fields[name].annotation
    elsewhere = [
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        for name in field.annotation.model_fields
        if name == last
    ]
    if elsewhere:
        return f"; did you mean `{elsewhere[0]}`?"
    near = difflib.get_close_matches(last, list(model.model_fields), n=1, cutoff=0.5)
    if near:
        return f"; did you mean `{'.'.join([*sections, near[0]])}`?"
    return f"; known keys here: {', '.join(model.model_fields)}"
