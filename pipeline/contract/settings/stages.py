"""The sections of `pipe.yaml`: one frozen model per step, a line of documentation under each field.

The section of `pipe.yaml` on what is checked before training.

The section `evaluate` of `pipe.yaml`.

The `export` section of `pipe.yaml`.

The `model` section: where the weights begin.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.contract.settings.cluster import ServingPods
from pipeline.contract.settings.conflicts import conflict
from pipeline.contract.settings.section import (
    BytesRequest,
    CpuRequest,
    Fraction,
    Namespace,
    Natural,
    Port,
    Positive,
    Section,
    Seed,
    share_of,
)


class Train(Section):
    """How the model is trained."""

    epochs: Positive = Field(10, description="passes over the training split, at most")
    batch_size: Positive | Literal["auto"] = Field(
        64, description="samples per optimizer step, over all processes together; `auto` measures what fits and is fast"
    )
    samples: Natural = Field(0, description="only the first so many training samples; 0: all of them")
    memory_mb: Natural = Field(
        0, description="memory `batch_size: auto` may fill, per process; 0: most of what is free"
    )
    accumulate: Positive = Field(1, description="micro-batches each process cuts its slice of the batch into")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="`adamw`, or `sgd` with momentum 0.9")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay (L2 for sgd)")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="learning rate after the warm-up")
    warmup: Fraction = Field(0.05, description="share of all steps spent raising the learning rate from zero")
    clip_norm: float = Field(1.0, ge=0, description="largest gradient norm; 0 switches clipping off")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="autocast type; fp16 scales its gradients")
    compile: bool = Field(False, description="let torch.compile make kernels for the model; on CPU it needs a compiler")
    patience: Natural = Field(0, description="epochs without a better validation loss before stopping; 0 never stops")
    seed: Seed = Field(0, description="seed of weights, data order and augmentation")
    deterministic: bool = Field(True, description="ask torch for deterministic algorithms")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto` takes GPUs when torch sees them")
    workers: Natural = Field(0, description="processes that load samples for each training process; columns need none")
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="every process holds the model, or a share of it")
    tensor: Positive = Field(1, description="processes that share every layer (tensor parallel)")
    expert: Positive = Field(1, description="processes that share the experts of every mixture (expert parallel)")
    expert_balance: float = Field(
        0.001, ge=0, description="DeepSeek-V3's routers: how far a step moves their bias towards idle experts; 0: not"
    )
    pipeline: Positive = Field(1, description="processes that hold consecutive layers (pipeline parallel)")
    pipeline_schedule: Literal["gpipe", "1f1b"] = Field("1f1b", description="order in which stages take micro-batches")
    sync: Literal["allreduce", "local_sgd", "diloco", "parameter_server"] = Field(
        "allreduce", description="how processes come to the same weights"
    )
    sync_every: Positive = Field(16, description="steps between two exchanges of local_sgd and diloco")
    sync_overlap: bool = Field(False, description="local_sgd and diloco: exchange while the next steps are computed")
    outer_lr: float = Field(0.7, gt=0, description="diloco: learning rate of the outer step")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="diloco: Nesterov momentum of the outer step")
    staleness: Natural = Field(8, description="parameter_server: updates a gradient may be behind before it is redone")
    compress: Literal["none", "fp16", "bf16", "powersgd", "topk"] = Field(
        "none", description="how gradients are packed for the exchange"
    )
    compress_rank: Positive = Field(2, description="powersgd: rank of the approximation")
    compress_share: float = Field(0.01, gt=0, le=1, description="topk: share of the gradient that is sent")
    bucket_mb: float = Field(0, ge=0, description="size of gradient buckets; 0: one on CPU, torch's own choice on GPUs")
    static_graph: bool = Field(False, description="promise DDP that every step uses the same parameters")
    balance: Literal["equal", "auto"] = Field(
        "equal", description="`auto`: slices follow each process's measured speed"
    )
    backend: Literal["torch", "horovod"] = Field("torch", description="library that carries the gradients")
    launcher: Literal["torchrun", "mpirun", "srun"] = Field("torchrun", description="what starts the processes")
    processes: Natural = Field(0, description="processes per node; 0 means one a GPU, or 2 on CPU")
    nodes: Positive | Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")] = Field(
        1, description="machines that train together; `2:4`: as many as there are, 2 at least and 4 at most"
    )
    rendezvous: str = Field("", description="`host:port` all nodes reach, needed by torchrun when `nodes` is above 1")
    image: str = Field("", description="container image of the training pods on a cluster")
    restarts: Natural = Field(
        3, description="times in a row training starts again by itself without a new checkpoint; 0: never"
    )
    elastic: Literal["close", "exact"] = Field(
        "close", description="another number of processes gives the same batches; `exact`: the same bits"
    )
    elastic_shards: Positive = Field(4, description="elastic=exact: parts of each batch, summed in a fixed order")
    snapshot: Literal["none", "memory"] = Field("none", description="`memory`: mirror the state in a peer's memory")
    snapshot_every: Positive = Field(10, description="optimizer steps between two snapshots in memory")
    checkpoints: str = Field("", description="folder or fsspec URL that keeps the checkpoints; empty: in the run")
    checkpoint_every: Natural = Field(100, description="optimizer steps between checkpoints; 0: only at epoch ends")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints kept, beside the best")
    log_every: Positive = Field(10, description="optimizer steps between two lines of metrics.jsonl")
    trace: bool = Field(False, description="record a timeline of all processes, for Perfetto or chrome://tracing")
    trace_steps: tuple[Natural, Positive] = Field((3, 5), description="first step of the timeline, and how many")
    timeout_seconds: Positive = Field(300, description="longest wait for another process before giving up")

    @property
    def fewest_nodes(self) -> int:
        return int(str(self.nodes).partition(":")[0])

    @property
    def most_nodes(self) -> int:
        return int(str(self.nodes).rpartition(":")[2])

    @model_validator(mode="after")
    def _fewest_before_most(self) -> Train:
        if self.fewest_nodes > self.most_nodes:
            problem = f"nodes={self.nodes}: write the fewest first, as in nodes={self.most_nodes}:{self.fewest_nodes}"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return self

    @model_validator(mode="after")
    def _words_go_together(self) -> Train:
        if problem := conflict(self.model_dump()):
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return self


class Package(Section):
    """The container of the prediction service, and that of the training pods."""

    build: Literal["auto", "never", "require"] = Field("auto", description="`auto` builds where a builder works")
    builder: Literal["auto", "docker", "podman", "buildah"] = Field("auto", description="which builder")
    base: str = Field("python:3.11-slim", description="base image; name it by digest to pin it")
    image: str = Field("", description="image name without tag, as in registry/name; empty means the model's name")
    accelerator: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="`gpu` brings CUDA; `auto` does where `serve.provider` is cuda or pods ask for GPUs"
    )
    push: bool = Field(False, description="push what is built to the registry its name says; `--push` sets it")
    modelcar: bool = Field(False, description="also write the bundle as a data-only OCI image for KServe's `oci://`")
    modelcar_base: str = Field(
        "", description="image, by digest, under the data of a modelcar; KServe's sidecar form needs one with `sh`"
    )
    wheels: str = Field("", description="folder of wheels in the project that pip takes before asking an index")
    include: tuple[str, ...] = Field((), description="globs of further project files that the training image holds")


class Serve(Section):
    """The prediction service. What concerns the model itself travels in its bundle."""

    provider: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="ONNX Runtime provider; `cuda` never falls back"
    )
    threads: Natural = Field(0, description="threads inside one inference; 0 lets ONNX Runtime choose")
    max_batch_size: Positive = Field(1024, description="most instances in one request")
    max_body_bytes: Positive = Field(64 << 20, description="largest request body, also once it is decompressed")
    batch_rows: Positive = Field(32, description="most instances that waiting requests are merged to; 1 merges none")
    batch_delay_ms: float = Field(0.0, ge=0, description="longest wait for company, under load only")
    max_waiting: Positive = Field(1024, description="most requests that wait; more are answered 503 at once")
    deadline_seconds: float = Field(
        0.0, ge=0, description="of requests that name none; 0: they wait as long as it takes"
    )
    max_cache_bytes: Positive = Field(
        256 << 20, description="language models: memory for keys and values of all texts that are being written"
    )
    keep_versions: Positive = Field(
        2, description="versions that stay loaded after a swap of the bundle, the current one among them"
    )
    page: bool = Field(True, description="a page for people at `GET /`")
    log_requests: float = Field(0.0, ge=0, le=1, description="share of requests that get a line each in the log")
    canary: str = Field("", description="share of requests that a new bundle gets at first, as in 10%; empty: all")
    shadow: str = Field("", description="bundle that gets a copy of requests off the critical path: a run or a folder")
    shadow_share: float = Field(1.0, gt=0, le=1, description="share of requests that the shadow gets")
    api_keys: str = Field("", description="file with one API key a line; empty: anybody may ask")
    require_signature: str = Field("", description="file of public keys; bundles that none of them signed are refused")
    tls_certificate: str = Field("", description="PEM file; with `tls_key` HTTP and gRPC are encrypted")
    tls_key: str = Field("", description="PEM file of the certificate's private key")

    @field_validator("canary", mode="before")
    @classmethod
    def _a_share_below_all(cls, value: Any) -> Any:
        if value == "" or not isinstance(value, str | int | float):
            return value
        try:
            whole = share_of(str(value)) == 1
        except ValueError as error:
            raise PydanticCustomError("conflict", "{problem}", {"problem": str(error)}) from None
        if whole:
            problem = "a canary gets less than all requests; leave it empty to give the new bundle all"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return str(value)


def watching(serve: Serve) -> list[str]:
    """Of what a deployment chooses, that which people see of the service, as its options."""
    options = [] if serve.page else ["--no-page"]
    return [*options, *(["--log-requests", f"{serve.log_requests:g}"] if serve.log_requests else [])]


class Deploy(ServingPods):
    """Where the service runs."""

    target: Literal["local", "kubernetes"] = Field("local", description="a background process here, or a cluster")
    host: str = Field("127.0.0.1", description="address the local service listens on")
    port: Port = Field(8080, description="HTTP port; locally the next free one is taken, said aloud")
    grpc_port: Natural = Field(0, description="gRPC port of the local service; 0 means the HTTP port plus 1")
    timeout_seconds: Positive = Field(120, description="longest wait for a ready service")
    mode: Literal["deployment", "inferenceservice"] = Field("deployment", description="plain Kubernetes or KServe")
    namespace: Namespace = Field("default", description="Kubernetes namespace")
    context: str = Field("", description="kubeconfig context; empty means the current one")
    image: str = Field("", description="image to run; empty means the one `package` named")
    render: bool = Field(False, description="only write the Kubernetes manifests; `--render` sets it")
    replicas: Positive = Field(2, description="replicas the autoscaler never goes below")
    max_replicas: Positive = Field(6, description="replicas the autoscaler never goes above")
    cpu: CpuRequest = Field("500m", description="CPU request of a serving pod")
    memory: BytesRequest = Field("512Mi", description="memory request and limit of a serving pod")
    gpus: Natural = Field(0, description="GPUs a serving pod asks for")


class Axis(Section):
    """The values one key may take."""

    low: float | None = Field(None, description="smallest value of a range")
    high: float | None = Field(None, description="largest value of a range, included")
    log: bool = Field(False, description="search the range by orders of magnitude")
    choices: tuple[bool | int | float | str, ...] = Field((), description="or else: the values themselves")

    @model_validator(mode="after")
    def _a_range_or_choices(self) -> Axis:
        ends = [end for end in (self.low, self.high) if end is not None]
        if len(ends) != (0 if self.choices else 2):
            raise PydanticCustomError("axis", "write it as `low` and `high`, or as `choices`")
        if ends and ends[0] >= ends[1]:
            raise PydanticCustomError("axis", "low must be smaller than high")
        if self.log and (not ends or ends[0] <= 0):
            raise PydanticCustomError("axis", "log needs a range whose low is above 0")
        return self


class Tune(Section):
    """What `pipe tune` searches, and how; `pipe run` does not look at it."""

    metric: str = Field("accuracy", description="metric of the task on the validation split, or `loss`")
    direction: Literal["maximize", "minimize"] = Field("maximize", description="which values of the metric are better")
    trials: Positive = Field(20, description="trials in all, over all workers and restarts")
    space: dict[str, Axis] = Field(
        {},
        description="keys to search, as in `{train.lr: {low: 0.0001, high: 0.1, log: true}}` or `{choices: [32, 64]}`",
    )
    pruner: Literal["median", "halving", "none"] = Field(
        "median", description="which trials are ended early: the worse half, all but a leading share, or none"
    )
    startup_trials: Natural = Field(5, description="median: trials that finish before any is pruned")
    warmup_epochs: Positive = Field(1, description="epochs a trial trains before it may be pruned")
    seed: Seed = Field(0, description="seed of the search")
    workers: Positive = Field(1, description="trials under way at once on this machine; they share its cores and GPUs")

    @model_validator(mode="after")
    def _a_loss_is_minimized(self) -> Tune:
        if self.metric == "loss" and self.direction == "maximize":
            problem = "metric=loss does not go with direction=maximize: the smaller the better; use direction=minimize"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return self


Severity: TypeAlias = Literal["error", "warn", "off"]


class Prepare(Section):
    """What is checked before training."""

    leaks: Literal["error", "warn"] = Field("error", description="what a sample found in two splits does to the road")
    near: Severity = Field("warn", description="what samples of two splits that are nearly one do")
    near_distance: float = Field(
        0.25, gt=0, le=1, description="how near they are, as a share of what lies between a sample and its neighbour"
    )
    columns: Severity = Field(
        "error", description="what other types, shapes or classes do, in a split or since the champion was trained"
    )
    missing: Severity = Field("error", description="what numbers that are NaN or infinite do")
    missing_share: Fraction = Field(0.0, description="share of a column in one split that may be missing")
    range: Severity = Field("warn", description="what a feature does most of whose values lie outside the known range")
    labels: Severity = Field("warn", description="what other labels do than in training, or than the champion's")
    drift: Severity = Field("warn", description="what other inputs do than in training, or than the champion's")
    drift_psi: float = Field(0.2, ge=0, description="population stability index up to which a difference is small")
    drift_p: float = Field(
        0.01, gt=0, lt=1, description="chance of one false alarm among all features of all splits (Holm)"
    )
    ignore: tuple[str, ...] = Field((), description="columns that none of these checks looks at")
    files: tuple[str, ...] = Field(
        (), description="globs of data files the task reads; a change in one reruns the road"
    )

    @field_validator("near", "columns", "missing", "range", "labels", "drift", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        return "off" if value is False else value


class Evaluate(Section):
    """What the candidate must prove."""

    metric: str = Field("accuracy", description="the candidate is compared by it: one of metrics(), or as r2 or ndcg")
    rule: Literal["non-inferior", "superior"] = Field(
        "non-inferior", description="no worse than the baseline by the margin, or better than it by the margin"
    )
    margin: float = Field(
        0.01, ge=0, description="how far below the baseline, or above it to be `superior`, the interval must end"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="level of the bootstrap interval (BCa)")
    resamples: int = Field(10_000, ge=100, description="bootstrap resamples")
    require: dict[str, float] = Field(
        {}, description="absolute floors, as in `{accuracy: 0.9}`; ceilings of mae and rmse, which are errors"
    )
    slices: tuple[str, ...] = Field(
        (), description="columns of whole numbers in the test data to slice by, beside the true class and `slices()`"
    )
    slice_min: Positive = Field(30, description="samples a slice needs to be judged; smaller ones are only told")
    slice_margin: float | None = Field(
        None,
        ge=0,
        description="how far a slice may fall below the baseline's other than by chance; else 0.05 or `margin`",
    )
    calibration: dict[Literal["ece", "brier", "brier_margin"], float] = Field(
        {}, description="most `ece` and `brier` (0 to 2) may be; `brier_margin`: how much worse than the baseline's"
    )
    batch_size: Positive = Field(256, description="samples per forward pass")
    processes: Positive = Field(1, description="processes that share the test set")
    seed: Seed = Field(0, description="seed of the bootstrap")

    @property
    def slice_allowance(self) -> float:
        """A margin that is wide for the whole is wide for its parts."""
        return max(0.05, self.margin) if self.slice_margin is None else self.slice_margin


VariantName = Literal["fp32", "fp16", "int8-dynamic", "int8-static"]
FormatName = Literal["onnx", "pt2", "savedmodel"]
Cost = Literal["p50_ms", "p99_ms", "megabytes"]
FASTEST: Literal["fastest-that-passes"] = "fastest-that-passes"


class Export(Section):
    """How the ONNX file is made and what it must agree on."""

    opset: Annotated[int, Field(ge=18, le=25)] = Field(20, description="ONNX operator set")
    rtol: float = Field(1e-3, ge=0, description="relative tolerance against torch")
    atol: float = Field(1e-4, ge=0, description="absolute tolerance against torch")
    batch_sizes: tuple[Positive, ...] = Field((1, 2, 7, 256), min_length=1, description="sizes the test set is run at")
    external_data: Literal["auto", "always"] = Field("auto", description="`auto` keeps weights inside up to 1 GiB")
    optimize: Literal["none", "basic", "extended", "transformers"] = Field(
        "none",
        description="passes over the file before it is verified: ONNX Runtime's for any device, its fusions for the "
        "CPU too, or fusions of attention and norms; what does not verify is not used",
    )
    formats: tuple[FormatName, ...] = Field(
        ("onnx",), description="forms of the model beside the bundle: pt2 is torch's own, savedmodel TensorFlow's"
    )
    tensorflow_python: str = Field(
        "", description="python of an environment with onnx2tf and tensorflow, for savedmodel; empty: this one"
    )
    golden: Positive = Field(4, description="test samples kept in the bundle as golden requests")
    variants: tuple[VariantName, ...] = Field(
        ("fp32",), description="files made of the model, each judged by itself; fp32 is always one"
    )
    choose: VariantName | Literal["fastest-that-passes"] = Field("fp32", description="the variant that is shipped")
    variant_margin: Annotated[float, Field(ge=0)] | Literal["evaluate.margin"] = Field(
        "evaluate.margin", description="how much worse than torch a variant may be in `evaluate.metric`"
    )
    least_gain: Fraction = Field(
        0.1, description="fastest-that-passes: time a variant must save against fp32, beyond doubt, to be chosen"
    )
    fp16_tolerance: float = Field(
        0.05, gt=0, description="largest error of fp16, in standard deviations of the output it is in"
    )
    int8_noise: float = Field(
        0.5, gt=0, le=1, description="largest error of int8 (root mean square), in standard deviations of the output"
    )
    int8_weight_bits: Literal[7, 8] = Field(
        7, description="8 is finer, but sums overflow on processors without VNNI, where it was not judged"
    )
    calibration_samples: Positive = Field(256, description="training samples that int8-static takes its ranges from")
    timing_seconds: float = Field(2, gt=0, le=600, description="time spent on timing each variant")
    budget: dict[Cost, Annotated[float, Field(gt=0)]] = Field(
        {}, description="what is shipped may cost, as in `{p50_ms: 2, p99_ms: 5, megabytes: 20}`; times of one instance"
    )

    @model_validator(mode="after")
    def _what_is_chosen_is_made(self) -> Export:
        if len(set(self.variants)) != len(self.variants):
            _conflict(f"variants={list(self.variants)}: a variant is named twice")
        if self.choose not in ("fp32", FASTEST, *self.variants):
            _conflict(f"choose={self.choose} is not made: add it to variants={list(self.variants)}")
        return self

    @model_validator(mode="after")
    def _the_bundle_holds_onnx(self) -> Export:
        if "onnx" not in self.formats or len(set(self.formats)) != len(self.formats):
            _conflict(f"formats={list(self.formats)}: onnx is always one, and each is named once")
        if "savedmodel" in self.formats and self.optimize in ("extended", "transformers"):
            _conflict(f"formats: savedmodel takes ONNX's own operators, and optimize={self.optimize} brings others")
        return self

    @property
    def made(self) -> tuple[VariantName, ...]:
        """fp32 first: it is what the others are held against."""
        return ("fp32", *(name for name in self.variants if name != "fp32"))


def _conflict(problem: str) -> None:
    raise PydanticCustomError("conflict", "{problem}", {"problem": problem})


class Model(Section):
    """Pretrained weights that training begins with; without them the task builds a model of its own."""

    pretrained: str = Field(
        "",
        description="folder with config.json and safetensors, Hugging Face id, or another project: its newest good run",
    )
    revision: str = Field(
        "", description="commit, tag or branch of a Hugging Face id; a branch is taken as prepare finds it"
    )
    allow: tuple[str, ...] = Field(
        (), description="globs of weights that may be missing (they begin by the seed), left over or of another shape"
    )

    @model_validator(mode="after")
    def _words_about_pretrained_weights(self) -> Model:
        if (self.revision or self.allow) and not self.pretrained:
            word = "revision" if self.revision else "allow"
            problem = f"{word} says more about `pretrained`, which is not set; set it, or leave {word} out"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return self
