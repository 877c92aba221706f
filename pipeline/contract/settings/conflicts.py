"""Check which settings of the `train` section go together, by a table, so that a run is refused before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Conflict(NamedTuple):
    """When `setting` has one of `values`, `other` must have one of `allowed`."""

    setting: str
    values: set[Any]
    other: str
    allowed: set[Any]
    reason: str
    fix: str


def find_conflict(train: Mapping[str, Any]) -> str:
    """Return the first conflict as a sentence; empty if there is none."""
    values = {**train, **{name: min(train[name], MANY) for name in _COUNTS}}
    values["compress"] = train["compress"].partition(":")[0]
    values["elastic_shards"] = min(train["elastic_shards"], 1)
    values["nodes"] = RANGE if isinstance(train["nodes"], str) else train["nodes"]
    for conflict in CONFLICTS:
        if values[conflict.setting] in conflict.values and values[conflict.other] not in conflict.allowed:
            first, second = (f"{name}={_yaml(train[name])}" for name in (conflict.setting, conflict.other))
            return f"{first} does not go with {second}: {conflict.reason}; {conflict.fix}"
    return ""


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


MANY = 2  # represents every number above one
RANGE = "2:4"  # represents every other range
_COUNTS = (
    "weight_copies",
    "tensor_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "accumulate",
    "workers",
    "threads",
)

NO_LOSS_SCALE = {"auto", "fp32", "bf16"}  # of precisions
COMPRESSED = {"fp16", "bf16", "powersgd", "topk"}
LOCAL = {"local_sgd", "diloco"}
WEIGHTS_DIFFER = {*LOCAL, "parameter_server"}  # processes do not have the same weights at every step
NEXT_STEP_KNOWN = {"ddp", "fsdp", "horovod", *LOCAL}  # every process knows its next step
NEEDS_WHOLE_GRADIENT = "it needs the whole gradient in every process"
NEEDS_WHOLE_WEIGHTS = "it needs the whole gradient of each matrix"
NUMBER = "use batch_size=64, or another number"
HOROVOD_EXCHANGES = "Horovod exchanges the gradients itself"
SHARDS = "it adds up whole gradients of shards"
DDP = "use strategy=ddp"

CONFLICTS = (
    Conflict(
        "compress",
        COMPRESSED,
        "strategy",
        {"ddp", "horovod"},
        "it compresses whole gradients, at every step",
        "use compress=none (fsdp sends half with precision=bf16)",
    ),
    Conflict("compress", COMPRESSED, "tensor_parallel", {1}, NEEDS_WHOLE_GRADIENT, "use compress=none"),
    Conflict("compress", COMPRESSED, "pipeline_parallel", {1}, NEEDS_WHOLE_GRADIENT, "use compress=none"),
    Conflict("strategy", WEIGHTS_DIFFER, "tensor_parallel", {1}, NEEDS_WHOLE_GRADIENT, DDP),
    Conflict("strategy", WEIGHTS_DIFFER, "pipeline_parallel", {1}, NEEDS_WHOLE_GRADIENT, DDP),
    Conflict(
        "strategy",
        WEIGHTS_DIFFER,
        "precision",
        NO_LOSS_SCALE,
        "processes cannot agree on a loss scale",
        "use precision=bf16",
    ),
    Conflict(
        "strategy", WEIGHTS_DIFFER, "balance", {"equal"}, "processes do not wait at every step", "use balance=equal"
    ),
    Conflict("strategy", {"parameter_server"}, "accumulate", {1}, "every gradient is sent at once", "use accumulate=1"),
    Conflict(
        "sync_overlap", {True}, "strategy", LOCAL, "it is for exchanges every few steps", "use strategy=local_sgd"
    ),
    Conflict("weight_copies", {MANY}, "expert_parallel", {1}, "experts have their own copies", "use expert_parallel=1"),
    Conflict("weight_copies", {MANY}, "strategy", {"fsdp"}, "it divides the processes of fsdp", "use strategy=fsdp"),
    Conflict(
        "sequence_parallel",
        {True},
        "pipeline_parallel",
        {1},
        "stages exchange whole sequences",
        "use pipeline_parallel=1",
    ),
    Conflict("sequence_parallel", {True}, "compile", {False}, "it gathers sequences in hooks", "use compile=false"),
    Conflict(
        "sequence_parallel", {True}, "tensor_parallel", {MANY}, "it divides what is between", "use tensor_parallel=2"
    ),
    Conflict(
        "expert_parallel",
        {MANY},
        "pipeline_parallel",
        {1},
        "it does not split pipeline stages",
        "use pipeline_parallel=1",
    ),
    Conflict(
        "expert_parallel", {MANY}, "precision", NO_LOSS_SCALE, "experts overflow separately", "use precision=bf16"
    ),
    Conflict(
        "expert_parallel", {MANY}, "compile", {False}, "the number of tokens changes at each step", "use compile=false"
    ),
    Conflict("expert_parallel", {MANY}, "compress", {"none"}, NEEDS_WHOLE_GRADIENT, "use compress=none"),
    Conflict("expert_parallel", {MANY}, "strategy", {"ddp", "fsdp"}, NEEDS_WHOLE_GRADIENT, DDP),
    Conflict(
        "expert_parallel",
        {MANY},
        "balance",
        {"equal"},
        "processes that share experts work in step",
        "use balance=equal",
    ),
    Conflict("expert_parallel", {MANY}, "elastic_shards", {0}, SHARDS, "use elastic_shards=0"),
    Conflict("batch_size", {"auto"}, "expert_parallel", {1}, "its trials hold the whole model", NUMBER),
    Conflict(
        "balance", {"auto"}, "strategy", {"ddp"}, "only DDP's slices can follow the measured speed", "use balance=equal"
    ),
    Conflict(
        "balance", {"auto"}, "tensor_parallel", {1}, "processes that share layers work in step", "use balance=equal"
    ),
    Conflict("balance", {"auto"}, "pipeline_parallel", {1}, "stages work in step", "use balance=equal"),
    Conflict(
        "workers", {1, MANY}, "balance", {"equal"}, "they load slices before their size is known", "use workers=0"
    ),
    Conflict(
        "workers",
        {1, MANY},
        "strategy",
        NEXT_STEP_KNOWN,
        "a process does not know its next step in advance",
        "use workers=0",
    ),
    Conflict("pipeline_parallel", {MANY}, "precision", NO_LOSS_SCALE, "no loss is scaled there", "use precision=bf16"),
    Conflict(
        "pipeline_parallel", {MANY}, "compile", {False}, "a stage is only a part of the model", "use compile=false"
    ),
    Conflict("batch_size", {"auto"}, "strategy", {"ddp"}, "its trials are runs of DDP", NUMBER),
    Conflict("batch_size", {"auto"}, "tensor_parallel", {1}, "its trials hold the whole model", NUMBER),
    Conflict("batch_size", {"auto"}, "pipeline_parallel", {1}, "its memory depends on the schedule", NUMBER),
    Conflict("batch_size", {"auto"}, "balance", {"equal"}, "its trials are of equal slices", NUMBER),
    Conflict("trace", {True}, "strategy", NEXT_STEP_KNOWN, "its processes have no common steps", "use trace=false"),
    Conflict("strategy", {"horovod"}, "tensor_parallel", {1}, HOROVOD_EXCHANGES, DDP),
    Conflict("strategy", {"horovod"}, "pipeline_parallel", {1}, HOROVOD_EXCHANGES, DDP),
    Conflict("strategy", {"horovod"}, "launcher", {"torchrun"}, "horovodrun takes its place", "use launcher=torchrun"),
    Conflict(
        "strategy",
        {"horovod"},
        "nodes",
        {1},
        "horovodrun needs the machines by name",
        "use nodes=1, or start it by hand",
    ),
    Conflict(
        "strategy", {"horovod"}, "compress", {"none", "fp16"}, "Horovod compresses to fp16 or not", "use compress=fp16"
    ),
    Conflict("batch_size", {"auto"}, "recompute", {"none"}, "its trials keep all activations", NUMBER),
    Conflict("optimizer", {"muon"}, "strategy", {"ddp", *LOCAL, "parameter_server"}, NEEDS_WHOLE_WEIGHTS, DDP),
    Conflict("optimizer", {"muon"}, "tensor_parallel", {1}, NEEDS_WHOLE_WEIGHTS, "use optimizer=adamw"),
    Conflict("nodes", {RANGE}, "launcher", {"torchrun"}, "others start a fixed number of processes", "use nodes=2"),
    Conflict("elastic_shards", {1}, "strategy", {"ddp"}, SHARDS, DDP),
    Conflict("elastic_shards", {1}, "tensor_parallel", {1}, SHARDS, "use tensor_parallel=1"),
    Conflict("elastic_shards", {1}, "pipeline_parallel", {1}, SHARDS, "use pipeline_parallel=1"),
    Conflict(
        "elastic_shards", {1}, "compress", {"none"}, "what is left out depends on the processes", "use compress=none"
    ),
    Conflict("elastic_shards", {1}, "balance", {"equal"}, "slices would depend on measured time", "use balance=equal"),
    Conflict("elastic_shards", {1}, "threads", {0, 1}, "the order of sums depends on their number", "use threads=0"),
    Conflict(
        "elastic_shards", {1}, "deterministic", {True}, "two runs may differ without it", "use deterministic=true"
    ),
    Conflict("batch_size", {"auto"}, "elastic_shards", {0}, "the size it finds depends on the processes", NUMBER),
    Conflict(
        "tensor_parallel",
        {MANY},
        "precision",
        NO_LOSS_SCALE,
        "parts of a layer overflow separately",
        "use precision=bf16",
    ),
    Conflict(
        "pipeline_parallel", {MANY}, "accumulate", {MANY}, "all stages but one would wait", "use accumulate=4, or more"
    ),
)
