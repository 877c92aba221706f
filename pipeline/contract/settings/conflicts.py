"""Which words of the train section go together: a table, so that a run refuses before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """When `word` is one of `values`, `other` must be one of `allowed`."""

    word: str
    values: set[Any]
    other: str
    allowed: set[Any]
    why: str
    instead: str


def conflict(train: Mapping[str, Any]) -> str:
    """The first conflict as a sentence, or nothing."""
    words = {
        **train,
        **{name: min(train[name], MANY) for name in ("tensor", "expert", "pipeline", "accumulate", "workers")},
    }
    words["bucket_mb"] = train["bucket_mb"] > 0
    words["nodes"] = RANGE if isinstance(train["nodes"], str) else train["nodes"]
    for rule in RULES:
        if words[rule.word] in rule.values and words[rule.other] not in rule.allowed:
            first, second = (f"{name}={_shown(train[name])}" for name in (rule.word, rule.other))
            return f"{first} does not go with {second}: {rule.why}; {rule.instead}"
    return ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


MANY = 2  # stands for every number above one
RANGE = "2:4"  # stands for every other one
PACKED = {"fp16", "bf16", "powersgd", "topk"}
SELDOM = {"local_sgd", "diloco"}
LOOSE = {*SELDOM, "parameter_server"}
WHOLE = "it needs the whole gradient in every process"
NUMBER = "use batch_size=64, or another number"
BUCKETS = "the buckets are DDP's"
OWN = "Horovod carries the gradients itself"
SHARDS = "it adds up whole gradients of shards"

RULES = (
    Rule("compress", PACKED, "parallel", {"ddp"}, WHOLE, "use compress=none (fsdp sends half with precision=bf16)"),
    Rule("compress", PACKED, "tensor", {1}, WHOLE, "use compress=none"),
    Rule("compress", PACKED, "pipeline", {1}, WHOLE, "use compress=none"),
    Rule("compress", PACKED, "sync", {"allreduce"}, "weights are sent, not gradients", "use sync=allreduce"),
    Rule("sync", LOOSE, "parallel", {"ddp"}, WHOLE, "use sync=allreduce"),
    Rule("sync", LOOSE, "tensor", {1}, WHOLE, "use sync=allreduce"),
    Rule("sync", LOOSE, "pipeline", {1}, WHOLE, "use sync=allreduce"),
    Rule("sync", LOOSE, "precision", {"fp32", "bf16"}, "processes cannot agree on a loss scale", "use precision=bf16"),
    Rule("sync", LOOSE, "balance", {"equal"}, "processes do not wait at every step", "use balance=equal"),
    Rule("sync", {"parameter_server"}, "accumulate", {1}, "every gradient is sent at once", "use accumulate=1"),
    Rule("sync_overlap", {True}, "sync", SELDOM, "it is for exchanges every few steps", "use sync=local_sgd"),
    Rule("static_graph", {True}, "parallel", {"ddp"}, "it is a promise to DDP", "use static_graph=false"),
    Rule("static_graph", {True}, "sync", {"allreduce"}, "it is a promise to DDP", "use static_graph=false"),
    Rule("static_graph", {True}, "tensor", {1}, "it is a promise to DDP", "use static_graph=false"),
    Rule("static_graph", {True}, "pipeline", {1}, "it is a promise to DDP", "use static_graph=false"),
    Rule("bucket_mb", {True}, "parallel", {"ddp"}, BUCKETS, "use bucket_mb=0"),
    Rule("bucket_mb", {True}, "tensor", {1}, BUCKETS, "use bucket_mb=0"),
    Rule("bucket_mb", {True}, "pipeline", {1}, BUCKETS, "use bucket_mb=0"),
    Rule("bucket_mb", {True}, "sync", {"allreduce"}, BUCKETS, "use bucket_mb=0"),
    Rule("bucket_mb", {True}, "backend", {"torch"}, BUCKETS, "use bucket_mb=0"),
    Rule("parallel", {"fsdp"}, "pipeline", {1}, "its stages are not cut again", "use parallel=ddp"),
    Rule(
        "tensor",
        {MANY},
        "pipeline",
        {1},
        "only one of them can cut the model",
        "use pipeline=1; tensor goes with parallel=fsdp",
    ),
    Rule("expert", {MANY}, "pipeline", {1}, "its stages are not cut again", "use pipeline=1"),
    Rule("expert", {MANY}, "precision", {"fp32", "bf16"}, "experts overflow apart", "use precision=bf16"),
    Rule("expert", {MANY}, "compile", {False}, "other numbers of tokens travel at each step", "use compile=false"),
    Rule("expert", {MANY}, "compress", {"none"}, WHOLE, "use compress=none"),
    Rule("expert", {MANY}, "sync", {"allreduce"}, WHOLE, "use sync=allreduce"),
    Rule("expert", {MANY}, "static_graph", {False}, "it is a promise to DDP", "use static_graph=false"),
    Rule("expert", {MANY}, "bucket_mb", {False}, BUCKETS, "use bucket_mb=0"),
    Rule("expert", {MANY}, "balance", {"equal"}, "processes that share experts work in step", "use balance=equal"),
    Rule("expert", {MANY}, "backend", {"torch"}, OWN, "use backend=torch"),
    Rule("expert", {MANY}, "elastic", {"close"}, SHARDS, "use elastic=close"),
    Rule("batch_size", {"auto"}, "expert", {1}, "its trials hold the whole model", NUMBER),
    Rule("balance", {"auto"}, "parallel", {"ddp"}, "shards are waited for within the passes", "use balance=equal"),
    Rule("balance", {"auto"}, "tensor", {1}, "processes that share layers work in step", "use balance=equal"),
    Rule("balance", {"auto"}, "pipeline", {1}, "stages work in step", "use balance=equal"),
    Rule("workers", {1, MANY}, "balance", {"equal"}, "they load slices before their size is known", "use workers=0"),
    Rule("workers", {1, MANY}, "sync", {"allreduce", *SELDOM}, "nobody knows its next step before", "use workers=0"),
    Rule("pipeline", {MANY}, "precision", {"fp32", "bf16"}, "no loss is scaled there", "use precision=bf16"),
    Rule(
        "pipeline", {MANY}, "compile", {False}, "a stage ends its pass in the midst of the model", "use compile=false"
    ),
    Rule("batch_size", {"auto"}, "parallel", {"ddp"}, "its trials hold the whole model", NUMBER),
    Rule("batch_size", {"auto"}, "tensor", {1}, "its trials hold the whole model", NUMBER),
    Rule("batch_size", {"auto"}, "pipeline", {1}, "its memory depends on the schedule", NUMBER),
    Rule("batch_size", {"auto"}, "balance", {"equal"}, "its trials are of equal slices", NUMBER),
    Rule("batch_size", {"auto"}, "backend", {"torch"}, "its trials exchange by torch", NUMBER),
    Rule("batch_size", {"auto"}, "sync", {"allreduce"}, "it is for batches that processes share out", NUMBER),
    Rule("trace", {True}, "sync", {"allreduce", *SELDOM}, "its processes have no common steps", "use trace=false"),
    Rule("backend", {"horovod"}, "parallel", {"ddp"}, OWN, "use backend=torch"),
    Rule("backend", {"horovod"}, "tensor", {1}, OWN, "use backend=torch"),
    Rule("backend", {"horovod"}, "pipeline", {1}, OWN, "use backend=torch"),
    Rule("backend", {"horovod"}, "sync", {"allreduce"}, OWN, "use sync=allreduce"),
    Rule("backend", {"horovod"}, "balance", {"equal"}, OWN, "use balance=equal"),
    Rule("backend", {"horovod"}, "launcher", {"torchrun"}, "horovodrun takes its place", "use launcher=torchrun"),
    Rule("backend", {"horovod"}, "nodes", {1}, "horovodrun wants machines by name", "use nodes=1, or start it by hand"),
    Rule("nodes", {RANGE}, "launcher", {"torchrun"}, "others start a fixed number of processes", "use nodes=2"),
    Rule("backend", {"horovod"}, "static_graph", {False}, OWN, "use static_graph=false"),
    Rule("backend", {"horovod"}, "compress", {"none", "fp16"}, "Horovod packs as fp16 or not", "use compress=fp16"),
    Rule("elastic", {"exact"}, "parallel", {"ddp"}, SHARDS, "use parallel=ddp"),
    Rule("elastic", {"exact"}, "tensor", {1}, SHARDS, "use tensor=1"),
    Rule("elastic", {"exact"}, "pipeline", {1}, SHARDS, "use pipeline=1"),
    Rule("elastic", {"exact"}, "sync", {"allreduce"}, SHARDS, "use sync=allreduce"),
    Rule("elastic", {"exact"}, "compress", {"none"}, "what is left out depends on who packs", "use compress=none"),
    Rule("elastic", {"exact"}, "backend", {"torch"}, OWN, "use backend=torch"),
    Rule("elastic", {"exact"}, "balance", {"equal"}, "slices would depend on measured time", "use balance=equal"),
    Rule("elastic", {"exact"}, "deterministic", {True}, "no two runs need be equal then", "use deterministic=true"),
    Rule("bucket_mb", {True}, "elastic", {"close"}, BUCKETS, "use bucket_mb=0"),
    Rule("static_graph", {True}, "elastic", {"close"}, "it is a promise to DDP", "use static_graph=false"),
    Rule("batch_size", {"auto"}, "elastic", {"close"}, "what it finds depends on the processes", NUMBER),
    Rule("tensor", {MANY}, "precision", {"fp32", "bf16"}, "parts of a layer overflow apart", "use precision=bf16"),
    Rule(
        "snapshot", {"memory"}, "sync", {"allreduce", *SELDOM}, "its state is whole at epoch ends", "use snapshot=none"
    ),
    Rule("pipeline", {MANY}, "accumulate", {MANY}, "all stages but one would wait", "use accumulate=4, or more"),
)
