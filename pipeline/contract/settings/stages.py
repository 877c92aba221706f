"""Define the sections of `pipe.yaml` for the steps, one frozen model each; `cluster.py` has those for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeAlias

from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.contract.settings.bundled import BundledLimits, BundledRuntime
from pipeline.contract.settings.cluster import ServingPods
from pipeline.contract.settings.conflicts import find_conflict
from pipeline.contract.settings.section import (
    Bytes,
    CpuRequest,
    Fraction,
    Namespace,
    Natural,
    Port,
    Positive,
    Section,
    Seed,
)
from pipeline.system.errors import ConfigError


def _conflict(problem: str) -> NoReturn:
    raise PydanticCustomError("conflict", "{problem}", {"problem": problem})


Severity: TypeAlias = Literal["error", "warn", "off"]
TrackerName: TypeAlias = Literal["tensorboard", "mlflow", "wandb"]


class Prepare(Section):
    """Checks of the data before training."""

    copies: Literal["error", "warn", "exact", "off"] = Field(
        "warn",
        description="action when two splits contain identical or nearly identical samples; `exact`: warn of identical "
        "ones only",
    )
    leaks: Severity = Field("error", description="action when one column alone predicts the label")
    overlap: Severity = Field("error", description="action when splits overlap in time or have a group in common")
    columns: Severity = Field(
        "error",
        description="action when column types, shapes or classes differ between splits or from the champion's training "
        "data",
    )
    missing: Severity = Field("error", description="action when numbers are NaN or infinite")
    missing_share: Fraction = Field(0.0, description="fraction of a column in one split that may be missing")
    drift: Severity = Field(
        "warn",
        description="action when feature values or labels are distributed differently than in training or in the "
        "champion's training data",
    )
    time_column: str = Field(
        "", description="column with the time of each sample: no test sample may be earlier than a training sample"
    )
    group_column: str = Field(
        "", description="column with the group of each sample, such as a person: no group may be in train and in test"
    )
    ignore: tuple[str, ...] = Field((), description="columns excluded from these checks")
    files: tuple[str, ...] = Field(
        (), description="globs of data files that the task reads, or folders; a change in one reruns the pipeline"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_former_name(cls, values: Any) -> Any:
        """Read `near_duplicates`, the former name of `copies`, whose `off` still left identical samples."""
        if isinstance(values, dict) and "near_duplicates" in values:
            action = values.pop("near_duplicates")
            values["copies"] = "exact" if action in ("off", False) else action
        return values

    @field_validator("copies", "leaks", "overlap", "columns", "missing", "drift", mode="before")
    @classmethod
    def _read_false_as_off(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        return "off" if value is False else value


class Model(Section):
    """Pretrained weights to start from; without them the task builds its own model. Adapters on top of the weights."""

    pretrained: str = Field(
        "",
        description="pretrained weights: Hugging Face model id, with `@` and a commit, tag or branch if wanted; folder "
        "with config.json and safetensors; a file `.safetensors`, whose model the task builds; or another project (its "
        "newest run that passed the gate)",
    )
    allow_mismatch: tuple[str, ...] = Field(
        (),
        description="globs of weights that may be missing, unexpected or of another shape; missing ones are initialized"
        " from the seed",
    )
    adapter: Literal["none", "lora", "dora", "qlora"] = Field(
        "none",
        description="train adapters of peft in the linear layers of the transformer, whose weights stay frozen; "
        "`qlora`: in 4 bits",
    )
    rank: Positive = Field(8, description="rank of the adapters")
    alpha: Annotated[float, Field(gt=0)] = Field(16.0, description="adapters are scaled by alpha / rank")
    targets: tuple[str, ...] = Field(
        (), description="layers with adapters, such as `[q_proj, v_proj]`; empty: every linear layer except the head"
    )

    @model_validator(mode="after")
    def _needs_adapter(self) -> Model:
        changed = self.model_fields_set & {"rank", "alpha", "targets"} if self.adapter == "none" else set()
        if any(getattr(self, name) != type(self).model_fields[name].default for name in changed):
            setting = min(changed)
            _conflict(f"{setting} has no effect without `adapter`; set adapter=lora, or leave {setting} out")
        return self

    @model_validator(mode="after")
    def _needs_pretrained(self) -> Model:
        if self.allow_mismatch and not self.pretrained:
            _conflict("allow_mismatch has no effect without `pretrained`; set `pretrained`, or leave it out")
        return self

    @property
    def is_described(self) -> bool:
        """Whether a config.json beside the weights describes the model, which adapt() then builds."""
        return bool(self.pretrained) and not self.pretrained.endswith(".safetensors")


Decay = Annotated[float, Field(ge=0, lt=1)]


class Train(Section):
    """Training: optimization, distribution over processes and machines, checkpoints."""

    OPERATIONAL: ClassVar = frozenset(
        {"workers", "threads", "launcher", "rendezvous", "image", "restarts", "timeout_seconds", "log_every", "trace"}
        | {"checkpoints", "checkpoint_every", "keep_checkpoints"}
    )

    epochs: Natural = Field(
        10, description="maximum passes over the training split; 0: the pretrained weights are taken as they are"
    )
    batch_size: Positive | Literal["auto"] = Field(
        64,
        description="global batch size: samples per optimizer step over all processes; `auto` measures the fastest size"
        " that fits into memory",
    )
    max_steps: Natural = Field(0, description="maximum optimizer steps, even within an epoch; 0: only `epochs` counts")
    max_tokens: Natural = Field(
        0, description="maximum training tokens: positions of `input_ids`, with padding; 0: only `epochs` counts"
    )
    max_samples: Natural = Field(0, description="use only the first N training samples; 0: all")
    accumulate: Positive = Field(1, description="gradient accumulation: micro-batches per process and optimizer step")
    optimizer: Literal["adamw", "sgd", "muon"] = Field(
        "adamw", description="`adamw`, `sgd`, or `muon`: Muon for linear layers except the last one, AdamW for the rest"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW's decay rates of the two moments")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's term for numerical stability")
    momentum: Decay | None = Field(None, description="momentum of sgd (by default 0.9) or muon (0.95)")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay (L2 for sgd)")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="learning rate schedule after warm-up; `wsd`: constant, then linear decay at the end"
    )
    min_lr_ratio: Fraction = Field(0.0, description="learning rate at the end of the decay, as a fraction of the peak")
    decay_ratio: Fraction = Field(0.2, description="schedule=wsd: fraction of all steps in which the rate decays")
    warmup_ratio: Fraction = Field(
        0.05, description="fraction of all steps over which the learning rate rises from zero"
    )
    clip_norm: float = Field(1.0, ge=0, description="maximum gradient norm; 0: no clipping")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="autocast precision; `auto`: bf16 on a GPU that has it, otherwise fp32; fp16 uses gradient scaling",
    )
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "high",
        description="products of fp32 numbers on a GPU: `highest` in fp32, `high` in TF32, `medium` in bf16; "
        "convolutions in TF32 unless `highest`",
    )
    recompute: Literal["none", "blocks"] = Field(
        "none",
        description="`blocks`: activation checkpointing; the backward pass computes repeated blocks again instead of "
        "keeping their activations",
    )
    compile: bool | Literal["blocks"] = Field(
        False,
        description="compile the model with torch.compile; `blocks`: each repeated block, equal ones once; on CPU this "
        "needs a C++ compiler",
    )
    early_stopping_patience: Natural = Field(
        0, description="validations without a better loss before training stops; 0: never"
    )
    validate_every: Natural = Field(
        0, description="optimizer steps between two validations; 0: only at the end of an epoch"
    )
    seed: Seed = Field(0, description="seed of weight initialization, data order and augmentation")
    deterministic: bool = Field(True, description="use torch's deterministic algorithms")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto` uses GPUs if torch finds any")
    workers: Natural = Field(
        0, description="DataLoader worker processes per training process; not needed for in-memory columns"
    )
    strategy: Literal["ddp", "fsdp", "local_sgd", "diloco", "parameter_server", "horovod"] = Field(
        "ddp", description="distributed strategy: `ddp`, `fsdp`, `local_sgd`, `diloco`, `parameter_server` or `horovod`"
    )
    weight_copies: Positive = Field(
        1, description="with fsdp: number of whole copies of the sharded weights, such as one per machine"
    )
    tensor_parallel: Positive = Field(
        1, description="number of processes that each layer is split over (tensor parallelism)"
    )
    sequence_parallel: bool = Field(
        False,
        description="with tensor_parallel: between the split layers, each process has a part of the sequence, which "
        "saves memory",
    )
    expert_parallel: Positive = Field(
        1, description="number of processes that the experts of a mixture are split over (expert parallelism)"
    )
    pipeline_parallel: Positive = Field(
        1, description="number of processes that the layers are split over in sequence (pipeline parallelism)"
    )
    sync_every: Positive = Field(
        16, description="strategy=local_sgd, diloco: optimizer steps between two synchronizations"
    )
    sync_overlap: bool = Field(
        False, description="strategy=local_sgd, diloco: synchronize while the next steps are computed"
    )
    compress: str = Field(
        "none",
        pattern=r"^(none|fp16|bf16|powersgd(:[1-9]\d*)?|topk(:(0?\.\d*[1-9]\d*|1(\.0)?))?)$",
        description="gradient compression: `none`, `fp16`, `bf16`, `powersgd[:RANK]` (default rank 2) or "
        "`topk[:FRACTION]` (default 0.01)",
    )
    balance: Literal["equal", "auto"] = Field(
        "equal", description="`auto`: each process's slice of a batch follows its measured speed"
    )
    launcher: Literal["torchrun", "mpirun", "srun"] = Field(
        "torchrun", description="program that starts the processes; strategy=horovod uses horovodrun"
    )
    processes: Natural = Field(0, description="processes per node; 0: one per GPU, or 2 on CPU")
    threads: Natural = Field(
        0,
        description="CPU threads per process; 0: `OMP_NUM_THREADS` if it is set, otherwise the cores are divided among "
        "the processes; another number may change the last bits of results, but runs nothing again",
    )
    nodes: Positive | Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")] = Field(
        1, description="number of nodes; `2:4`: elastic, at least 2 and at most 4"
    )
    rendezvous: str = Field(
        "", description="`host:port` that all nodes can reach; required by torchrun if `nodes` is above 1"
    )
    image: str = Field("", description="container image of the pods that run the steps")
    restarts: Natural = Field(
        3, description="automatic restarts in a row without a new checkpoint before training fails; 0: none"
    )
    elastic_shards: Natural = Field(
        0,
        description="split each batch into this many shards that are summed in a fixed order, so that up to as many "
        "processes give identical bits; 0: equal up to rounding",
    )
    checkpoints: str = Field("", description="folder or fsspec URL for checkpoints; empty: inside the run")
    checkpoint_every: Natural = Field(
        100, description="optimizer steps between two checkpoints; 0: only at the end of an epoch"
    )
    keep_checkpoints: Positive = Field(2, description="number of newest checkpoints to keep, besides the best")
    log_every: Positive = Field(10, description="optimizer steps between two lines of metrics.jsonl")
    trace: bool = Field(False, description="record a timeline of all processes for Perfetto or chrome://tracing")
    timeout_seconds: Positive = Field(300, description="timeout for waiting on other processes")

    @property
    def operational(self) -> frozenset[str]:
        exact = {"processes", "nodes"} if self.elastic_shards else set()  # any number of processes gives the same bits
        return self.OPERATIONAL | exact

    @property
    def fewest_nodes(self) -> int:
        return int(str(self.nodes).partition(":")[0])

    @property
    def most_nodes(self) -> int:
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def compress_kind(self) -> str:
        return self.compress.partition(":")[0]

    @property
    def powersgd_rank(self) -> int:
        return int(self.compress.partition(":")[2] or 2)

    @property
    def topk_fraction(self) -> float:
        return float(self.compress.partition(":")[2] or 0.01)

    @field_validator("rendezvous")
    @classmethod
    def _rendezvous_has_a_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            _conflict(f"write it as host:port, as in {value.partition(':')[0] or 'node0'}:29400")
        return value

    @model_validator(mode="after")
    def _fewest_before_most(self) -> Train:
        if self.fewest_nodes > self.most_nodes:
            _conflict(f"nodes={self.nodes}: write the fewest first, as in nodes={self.most_nodes}:{self.fewest_nodes}")
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Train:
        effects = {
            "betas": self.optimizer != "sgd",
            "eps": self.optimizer != "sgd",
            "momentum": self.optimizer != "adamw",
            "min_lr_ratio": self.schedule != "constant",
            "decay_ratio": self.schedule == "wsd",
        }
        for name, has_effect in effects.items():
            if not has_effect and getattr(self, name) != type(self).model_fields[name].default:
                by = "schedule" if name.endswith("ratio") else "optimizer"
                _conflict(f"{name} has no effect with {by}={getattr(self, by)}; leave it out")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            _conflict(f"warmup_ratio={self.warmup_ratio} and decay_ratio={self.decay_ratio} are more than all steps")
        return self

    @model_validator(mode="after")
    def _settings_go_together(self) -> Train:
        if problem := find_conflict(self.model_dump()):
            _conflict(problem)
        return self


_CALIBRATION = ("ece", "brier", "brier_margin")
RuleName = Literal["non-inferior", "superior"]


class Evaluate(Section):
    """The quality gate: comparison with the baseline, and limits that the candidate must meet."""

    OPERATIONAL: ClassVar = frozenset({"processes"})

    _unit: float = PrivateAttr(1.0)  # of the compared metric
    _opponent: Literal["baseline", "champion"] = PrivateAttr("baseline")  # to which rule and margin apply
    metric: str = Field(
        "accuracy",
        description="metric that is compared with the baseline: a name from metrics(), or a built-in one such as r2 or "
        "ndcg",
    )
    rule: RuleName = Field(
        "superior",
        description="rule for the task's baseline(); `superior`: better than it by more than the margin; "
        "`non-inferior`: not worse by more than the margin",
    )
    margin: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="margin of `rule`, in units of the metric; the whole confidence interval of the difference must "
        "be on the right side of it; by default 0 if superior; if non-inferior 0.01, and 1 % of the baseline's value "
        "for a metric without limits, such as mae",
    )
    champion_rule: RuleName = Field(
        "non-inferior", description="rule for the champion, with which a new model is compared once one is deployed"
    )
    champion_margin: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="margin of `champion_rule`; by default `margin` if both rules are the same, else the default of a "
        "margin",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="confidence level of the interval of the difference")
    inconclusive: Literal["fail", "pass"] = Field(
        "fail",
        description="what happens if the test set is too small to show whether the difference is within the margin",
    )
    widen: Literal["shared", "always", "never"] = Field(
        "shared",
        description="whether each further comparison on a test set widens the interval; `shared`: once it has more "
        "than one author",
    )
    require: dict[str, float] = Field(
        {},
        description="absolute limits, as in `{accuracy: 0.9}`; upper limits for errors: mae, rmse, ece, brier, and "
        "brier_margin (excess over the baseline's Brier score)",
    )
    slices: tuple[str, ...] = Field(
        (), description="integer columns of the test data to slice by, in addition to the true class and slices()"
    )
    test_set_changed: Literal["fail", "allow"] = Field(
        "fail", description="what happens if the test set is not the one on which the champion was judged"
    )
    answers: Literal["any", "proven"] = Field(
        "any",
        description="whether every field of an answer must be `proven`: explained by what the model returned for the "
        "test data, from the raw instances on",
    )
    class_slices: bool = Field(True, description="whether each true class is a slice")
    batch_size: Positive = Field(256, description="samples per forward pass")
    processes: Positive = Field(1, description="processes that the test set is split over")

    @property
    def metric_limits(self) -> dict[str, float]:
        """Return the limits of metrics, without those of calibration."""
        return {name: limit for name, limit in self.require.items() if name not in _CALIBRATION}

    @property
    def named_metrics(self) -> frozenset[str]:
        """Return the metrics that decide, without those of calibration."""
        return frozenset({self.metric, *self.metric_limits})

    @property
    def calibration_limits(self) -> dict[str, float]:
        return {name: limit for name, limit in self.require.items() if name in _CALIBRATION}

    @property
    def opponent(self) -> str:
        """What `rule` and `margin` compare the candidate with: "baseline" or "champion"."""
        return self._opponent

    @property
    def margin_setting(self) -> str:
        """The setting that `margin` comes from."""
        return "evaluate.champion_margin" if self._opponent == "champion" else "evaluate.margin"

    @property
    def applied_margin(self) -> float:
        """The margin in units of the metric."""
        if self.margin is None:
            return 0.0 if self.rule == "superior" else 0.01 * self._unit
        return self.margin

    @property
    def accepted_loss(self) -> float:
        """How much worse another form of a model may be: as much as a new model than the champion."""
        against = self.against_champion()
        return against.applied_margin if against.rule == "non-inferior" else 0.01 * self._unit

    @property
    def slice_allowance(self) -> float:
        """Return how far a slice may fall: a margin that is wide for the whole is wide for its parts."""
        return max(0.05 * self._unit, self.applied_margin)

    def in_units_of(self, size: float) -> Evaluate:
        """Return these settings for a metric without limits, whose values are about this large."""
        scaled = self.model_copy()
        scaled._unit = size
        return scaled

    def against_champion(self) -> Evaluate:
        """Return these settings with the rule and the margin that apply to the champion."""
        same, margin = self.champion_rule == self.rule, self.champion_margin
        changes = {"rule": self.champion_rule, "margin": self.margin if same and margin is None else margin}
        copy = self.model_copy(update=changes)
        copy._opponent = "champion"
        return copy


VariantName = Literal["fp32", "fp16", "int8-dynamic", "int8-static", "int8", "int4", "int4-128", "int4-gptq"]
FormatName = Literal["onnx", "pt2", "savedmodel", "genai"]
Cost = Literal["p50_ms", "p99_ms", "megabytes", "perplexity"]
FASTEST: Literal["fastest-that-passes"] = "fastest-that-passes"


class Export(Section):
    """Conversion to ONNX, its verification, and model variants."""

    opset: Annotated[int, Field(ge=18, le=25)] = Field(20, description="ONNX opset version")
    rtol: float = Field(
        1e-3,
        ge=0,
        description="tolerance of the comparison with torch, relative to the distance from the mean of a column",
    )
    atol: float = Field(
        1e-4,
        ge=0,
        description="tolerance of the comparison with torch for all values of an output, in its standard deviations on "
        "the test set",
    )
    batch_sizes: tuple[Positive, ...] = Field(
        (1, 2, 7, 256),
        min_length=1,
        description="batch sizes at which the ONNX model is compared with torch on the test set",
    )
    optimize: Literal["none", "basic", "extended", "transformers"] = Field(
        "none",
        description="graph optimization before verification: ONNX Runtime's `basic` or `extended` level, or the "
        "`transformers` fusions; a graph that fails verification is not used",
    )
    formats: tuple[FormatName, ...] = Field(
        ("onnx",),
        description="additional formats next to ONNX: pt2 (torch.export), savedmodel (TensorFlow), and genai "
        "(language models, onnxruntime-genai)",
    )
    adapter: Literal["merged", "separate"] = Field(
        "merged",
        description="with model.adapter: write merged weights to `export/weights`, or keep only `train/adapter`; the "
        "ONNX file always has the merged ones",
    )
    variants: tuple[VariantName, ...] = Field(
        ("fp32",),
        description="model variants to build and evaluate; fp32 is always built; int8 and int4 (blocks of 32 or 128 "
        "weights) are for language models, int8-dynamic and int8-static for others",
    )
    choose: VariantName | Literal["fastest-that-passes"] = Field(
        "fp32", description="variant to ship; `fastest-that-passes` selects by measured time"
    )
    variant_margin: Annotated[float, Field(ge=0)] | Literal["evaluate.margin"] = Field(
        "evaluate.margin",
        description="allowed drop of `evaluate.metric` in a variant, compared with torch; `evaluate.margin`: what the "
        "gate allows against the champion",
    )
    budget: dict[Cost, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="limits for the shipped variant, as in `{p50_ms: 2, p99_ms: 5, megabytes: 20}`; latencies are for "
        "one instance, or a token of a language model; perplexity: increase that a variant may have, by default 0.01",
    )

    @field_validator("variants", mode="before")
    @classmethod
    def _bf16_cannot_run(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and "bf16" in value:
            _conflict("bf16 cannot run on a CPU, where ONNX Runtime has no products of it; use fp16, of the same size")
        return value

    @model_validator(mode="after")
    def _chosen_variant_is_built(self) -> Export:
        if len(set(self.variants)) != len(self.variants):
            _conflict(f"variants={list(self.variants)}: a variant is named twice")
        if self.choose not in ("fp32", FASTEST, *self.variants):
            _conflict(f"choose={self.choose} is not made: add it to variants={list(self.variants)}")
        return self

    @model_validator(mode="after")
    def _formats_include_onnx(self) -> Export:
        if "onnx" not in self.formats or len(set(self.formats)) != len(self.formats):
            _conflict(f"formats={list(self.formats)}: onnx is always one, and each is named once")
        if "savedmodel" in self.formats and self.optimize in ("extended", "transformers"):
            _conflict(f"formats: savedmodel takes ONNX's own operators, and optimize={self.optimize} brings others")
        return self

    @property
    def built_variants(self) -> tuple[VariantName, ...]:
        """Return the variants to build, fp32 first: the others are compared with it."""
        return ("fp32", *(name for name in self.variants if name != "fp32"))


WHEELS_FOLDER = "wheels"  # of the project: packages that pip takes before it looks into an index


class Package(Section):
    """The images of the prediction service and of the training pods."""

    builder: Literal["auto", "none", "docker", "podman", "buildah"] = Field(
        "auto",
        description="container builder; `auto`: the first that works, without one only the build context is written; "
        "`none`: do not build; a named builder is required to work",
    )
    base_image: str = Field("python:3.11-slim", description="base image; specify a digest to pin it")
    image: str = Field(
        "", description="image name without tag, as in registry/name; empty: localhost/ and the model's name"
    )
    push: bool = Field(False, description="push built images to their registry; `--push` sets it")
    modelcar: str = Field(
        "",
        description="also write the bundle as an OCI image for KServe's `oci://`: `scratch`, or a base image by digest "
        "(KServe's sidecar mode needs one with `sh`); empty: no",
    )
    include: tuple[str, ...] = Field(
        (), description="globs of additional project files to copy into the training image"
    )


class Serve(BundledLimits, BundledRuntime):
    """The prediction service. Settings that concern the model itself travel in its bundle."""

    workers: Positive | Literal["auto"] = Field(
        1, description="processes that share the ports and the weights; `auto`: one per usable core"
    )
    page: bool = Field(True, description="serve an HTML page at `GET /`")
    log_requests: Fraction = Field(0.0, description="fraction of requests to log, 0 to 1")
    sample: Fraction = Field(
        0.0, description="fraction of requests to keep with their answers, 0 to 1; `POST /feedback` then takes labels"
    )
    sample_to: str = Field(
        "samples", description="folder or fsspec URL for samples and labels, on Kubernetes a URL; empty: no files"
    )
    sample_max_bytes: Positive = Field(1 << 30, description="bytes of samples to keep; then the oldest are deleted")
    sample_url: str = Field(
        "", description="URL that also gets each sample as CloudEvents, like those of KServe's inference logger"
    )
    shadow: str = Field(
        "",
        description="target=local: bundle (run or folder) that receives a copy of each request; its responses are only "
        "compared",
    )
    api_keys: str = Field("", description="file with one API key per line; empty: no authentication")
    require_signature: str = Field(
        "", description="file of trusted public keys; bundles without a valid signature are refused"
    )
    tls_certificate: str = Field(
        "", description="PEM file of the TLS certificate; with `tls_key`, HTTP and gRPC are encrypted"
    )
    tls_key: str = Field("", description="PEM file of the certificate's private key")

    @property
    def sample_packages(self) -> tuple[str, ...]:
        """Return what an image needs to write samples: nothing, or pyarrow, fsspec and the package of the store."""
        scheme, mark, _ = self.sample_to.partition("://")
        stores = {"s3": ("s3fs",), "gs": ("gcsfs",), "gcs": ("gcsfs",), "az": ("adlfs",), "abfs": ("adlfs",)}
        return ("fsspec", "pyarrow", *stores.get(scheme, ())) if self.sample and mark else ()


def sampling_options(serve: Serve, root: Path | None) -> list[str]:
    """Return the options of `python -m serve` for samples; `root` is the project's folder, None on a cluster."""
    if not serve.sample:
        return []
    folder = serve.sample_to
    if folder and "://" not in folder:
        if root is None:
            raise ConfigError(
                f"serve.sample_to={folder}: a pod's folders end with it; to fix it: name an fsspec URL, as in "
                "s3://bucket/samples, or leave it empty and set serve.sample_url"
            )
        folder = str((root / folder).absolute())
    options = ["--sample", f"{serve.sample:g}", "--sample-max-bytes", str(serve.sample_max_bytes)]
    options += ["--sample-to", folder] if folder else []
    return options + (["--sample-url", serve.sample_url] if serve.sample_url else [])


def service_view_options(serve: Serve) -> list[str]:
    """Return the options of `python -m serve` for its processes, its page and its request log."""
    options = [] if serve.workers == 1 else ["--workers", str(serve.workers)]
    options += [] if serve.page else ["--no-page"]
    return [*options, *(["--log-requests", f"{serve.log_requests:g}"] if serve.log_requests else [])]


class Deploy(ServingPods):
    """Where the service runs: as a process on this machine, or on Kubernetes."""

    target: Literal["local", "kubernetes", "kserve"] = Field(
        "local",
        description="`local`: background process on this machine; `kubernetes`: Deployment; `kserve`: InferenceService "
        "in Standard mode",
    )
    host: str = Field("127.0.0.1", description="address that the local service listens on")
    port: Port = Field(8080, description="HTTP port of the service; locally the next free port is used if it is taken")
    timeout_seconds: Positive = Field(120, description="timeout for the service to become ready")
    namespace: Namespace = Field("default", description="Kubernetes namespace of the service and of the steps' pods")
    context: str = Field("", description="kubeconfig context; empty: the current one")
    image: str = Field("", description="image to run; empty: the one built by package")
    render: bool = Field(False, description="only write the Kubernetes manifests; `--render` sets it")
    min_replicas: Positive = Field(2, description="minimum replicas of the autoscaler")
    max_replicas: Positive = Field(6, description="maximum replicas of the autoscaler")
    cpu: CpuRequest = Field("500m", description="CPU request of a serving pod")
    memory: Bytes = Field("", description="memory request and limit of a serving pod; empty: by the bundle's size")
    gpus: Natural = Field(0, description="GPUs per serving pod")

    @property
    def on_cluster(self) -> bool:
        return self.target != "local"

    @property
    def by_kserve(self) -> bool:
        return self.target == "kserve"


class Monitor(Section):
    """Monitoring of the live service by `pipe monitor`."""

    alpha: float = Field(
        0.01, gt=0, lt=1, description="probability of any false alarm, over all columns, the metric and all looks"
    )
    metric: str = Field("", description="metric that must stay as the verdict promised; empty: that of `evaluate`")
    every: str = Field(
        "",
        description="interval at which a CronJob of the service on a cluster runs `pipe monitor`, as in 1h; empty: no "
        "CronJob",
    )
    on_alert: Literal["report", "run"] = Field(
        "report",
        description="`run`: after an alarm, start `pipe run all --since RUN`, once for each bundle; the gate decides "
        "whether the new model is deployed",
    )


class Axis(Section):
    """The values one setting may take in a search."""

    low: float | None = Field(None, description="smallest value of a range")
    high: float | None = Field(None, description="largest value of a range, included")
    log: bool = Field(False, description="search the range by orders of magnitude")
    choices: tuple[bool | int | float | str, ...] = Field((), description="or else: the values themselves")

    @model_validator(mode="before")
    @classmethod
    def _no_plain_list(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            raise PydanticCustomError("axis", "write a list as `choices: {values}`", {"values": list(value)})
        return value

    @model_validator(mode="after")
    def _range_or_choices(self) -> Axis:
        ends = [end for end in (self.low, self.high) if end is not None]
        if len(ends) != (0 if self.choices else 2):
            raise PydanticCustomError("axis", "write it as `low` and `high`, or as `choices`")
        if ends and ends[0] >= ends[1]:
            raise PydanticCustomError("axis", "low must be smaller than high")
        if self.log and (not ends or ends[0] <= 0):
            raise PydanticCustomError("axis", "log needs a range whose low is above 0")
        return self


class Tune(Section):
    """The search for better settings by `pipe tune`; `pipe run` ignores this section."""

    metric: str = Field(
        "", description="metric to optimize on the validation split, or `loss`; empty: that of `evaluate`"
    )
    trials: Positive = Field(20, description="total number of trials over all workers and restarts")
    space: dict[str, Axis] = Field(
        {},
        description="settings to search, as in `{train.lr: {low: 0.0001, high: 0.1, log: true}}` or `{choices: [32, "
        "64]}`",
    )
    pruner: Literal["median", "halving", "none"] = Field(
        "median", description="how unpromising trials are stopped early: `median`, successive `halving` or `none`"
    )
