"""Name what replaced each setting that `pipe.yaml` no longer has, and upgrade the configurations of older runs.

A user who writes an old name gets an error that names the new one. Only recorded configurations are upgraded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_RENAMED = {
    "prepare.near": "prepare.near_duplicates",
    "model.allow": "model.allow_mismatch",
    "train.samples": "train.max_samples",
    "train.warmup": "train.warmup_ratio",
    "train.patience": "train.early_stopping_patience",
    "train.tensor": "train.tensor_parallel",
    "train.expert": "train.expert_parallel",
    "train.pipeline": "train.pipeline_parallel",
    "package.base": "package.base_image",
    "deploy.ingress_secret": "deploy.ingress_tls_secret",
    "deploy.monitor_labels": "deploy.service_monitor_labels",
    "deploy.monitor_secret": "deploy.service_monitor_secret",
    "deploy.stable_uri": "deploy.stable_storage_uri",
    "deploy.replicas": "deploy.min_replicas",
    "deploy.pull_secret": "deploy.image_pull_secret",
    "cluster.claim": "cluster.volume_claim",
    "cluster.claim_size": "cluster.volume_size",
    "cluster.claim_class": "cluster.storage_class",
    "cluster.claim_access": "cluster.access_mode",
    "cluster.secret": "cluster.env_secret",
    "cluster.deadline_seconds": "cluster.active_deadline_seconds",
    "rollout.canary": "rollout.canary_percent",
    "rollout.requests": "rollout.min_requests",
    "rollout.take_over": "rollout.force_conflicts",
    "jobs.executor": "cluster.executor",
}

REPLACED = {old: f"write `{new}`" for old, new in _RENAMED.items()} | {
    "prepare.near_distance": "it was removed; samples nearer than 0.25 are near duplicates",
    "prepare.range": "write `prepare.drift`, which covers values, ranges and labels",
    "prepare.labels": "write `prepare.drift`, which covers values, ranges and labels",
    "prepare.drift_psi": "it was removed; drift is a PSI above 0.2",
    "prepare.drift_p": "it was removed; drift is a p-value below 0.01",
    "train.memory_mb": "it was removed; `batch_size: auto` uses four fifths of the free memory",
    "train.parallel": "write `train.strategy`, as in strategy=fsdp",
    "train.sync": "write `train.strategy`, as in strategy=diloco",
    "train.backend": "write `train.strategy`, as in strategy=horovod",
    "train.expert_balance": "it was removed; the bias of DeepSeek-V3's routers moves by 0.001 a step",
    "train.pipeline_schedule": "it was removed; the schedule is 1F1B, or GPipe if `accumulate` is below the stages",
    "train.outer_lr": "it was removed; DiLoCo's outer learning rate is 0.7",
    "train.outer_momentum": "it was removed; DiLoCo's outer momentum is 0.9",
    "train.staleness": "it was removed; a gradient more than 8 updates behind is computed again",
    "train.compress_rank": "write it into `train.compress`, as in compress=powersgd:4",
    "train.compress_share": "write it into `train.compress`, as in compress=topk:0.01",
    "train.bucket_mb": "it was removed; torch chooses the size of gradient buckets",
    "train.static_graph": "it was removed; DDP finds the parameters of a step itself",
    "train.elastic": "write `train.elastic_shards`, as in elastic_shards=4",
    "train.snapshot_every": "write it into `train.snapshot`, as in snapshot=memory:10",
    "train.trace_steps": "it was removed; a trace has 5 steps from step 3 on",
    "evaluate.calibration": "write its limits into `evaluate.require`, as in `{ece: 0.05}`",
    "evaluate.slice_min": "it was removed; a slice of fewer than 30 samples is not judged",
    "evaluate.slice_margin": "it was removed; a slice may fall by 0.05, or by `evaluate.margin` if that is more",
    "evaluate.seed": "it was removed; the significance tests always use the same seed",
    "evaluate.force_reason": "record an override with `pipe gate override RUN`",
    "export.external_data": "it was removed; weights above 1 GiB are written beside the ONNX file",
    "export.tensorflow_python": "set the environment variable PIPE_TENSORFLOW_PYTHON",
    "export.golden": "it was removed; a bundle has 4 golden requests",
    "export.least_gain": "it was removed; a variant must save a tenth of fp32's time",
    "export.fp16_tolerance": "it was removed; the limit is 0.05 standard deviations of the output",
    "export.int8_noise": "it was removed; the limit is 0.5 standard deviations of the output",
    "export.int8_weight_bits": "it was removed; weights have 7 bits, which no processor overflows",
    "export.calibration_samples": "it was removed; 256 training samples calibrate int8-static",
    "export.timing_seconds": "it was removed; each variant is timed for 2 seconds",
    "package.build": "write `package.builder=none` for never, or the name of a builder that has to work",
    "package.accelerator": "it follows from `serve.provider` and `deploy.gpus`",
    "package.modelcar_base": "write the base image into `package.modelcar`",
    "package.wheels": "it was removed; pip takes packages from the project's folder `wheels`, if there is one",
    "serve.batch_delay_ms": "it was removed; set BATCH_DELAY_MS in `deploy.environment` if you need it",
    "serve.keep_versions": "it was removed; the service keeps 2 versions",
    "serve.canary": "write `rollout.canary_percent`, as in canary_percent=10",
    "serve.shadow_share": "it was removed; the shadow gets a copy of every request",
    "cluster.pull_secret": "write `deploy.image_pull_secret`, which is for all pods",
    "cluster.shared_memory": "it was removed; /dev/shm may take `cluster.memory`",
    "cluster.keep_seconds": "it was removed; a finished job is kept for a week",
    "deploy.sidecar": "label the namespace istio-injection=disabled, or apply the overlay istio-free",
    "deploy.expose": "write `deploy.ingress_class` (`default` is the cluster's own) or `deploy.gateway`",
    "deploy.answer_seconds": "it follows from `serve.deadline_seconds`; it is 60 at least",
    "deploy.metrics_adapter": "write `deploy.target_concurrency`, as in target_concurrency=8",
    "deploy.in_flight": "write `deploy.target_concurrency`, as in target_concurrency=8",
    "deploy.service_monitor": "write `deploy.service_monitor_labels`, as in `{release: prometheus}`",
    "deploy.mode": "write `deploy.target=kserve` or `deploy.target=kserve-knative`",
    "deploy.kserve_mode": "write `deploy.target=kserve` (Standard) or `deploy.target=kserve-knative` (Knative)",
    "deploy.canary_percent": "write `rollout.canary_percent`",
    "deploy.grpc_port": "it is `deploy.port` plus 1, or the next free port",
    "rollout.patience": "it was removed; a canary with too few requests is observed 5 times",
    "rollout.slow_margin": "it was removed; the share of slow requests may be 0.05 larger",
    "rollout.confidence": "it was removed; the confidence is 0.95",
    "rollout.wait_seconds": "it was removed; another deployment of this model is awaited for 120 s",
    "rollout.force_reason": "record an override with `pipe gate override RUN`",
    "jobs": "write `cluster.executor`; the other settings of `jobs` were removed",
    "jobs.steps": "it was removed; prepare, train, evaluate and export run on the cluster",
    "jobs.project": "it was removed; the project is in /project",
    "jobs.timeout_seconds": "it was removed; a pod that cannot start is awaited for 300 s",
    "tune.direction": "it was removed; the loss and metrics whose `directions` in the task are `lower` are minimized",
    "tune.startup_trials": "it was removed; 5 trials finish before one is pruned",
    "tune.warmup_epochs": "it was removed; a trial trains 1 epoch before it may be pruned",
    "tune.seed": "it was removed; the search always uses the same seed",
    "tune.workers": "use the option `pipe tune --workers N`",
}  # fmt: skip


def upgrade(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of an older run by the names of today; one of today is returned unchanged."""
    config = {name: dict(value) if isinstance(value, Mapping) else value for name, value in recorded.items()}
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    for section, change in _CHANGED.items():
        if section in sections:
            change(sections[section], config)
    for old, new in _RENAMED.items():
        section, name = old.split(".")
        if name in sections.get(section, {}):
            new_section, new_name = new.split(".")
            config.setdefault(new_section, {}).setdefault(new_name, sections[section][name])
    for old in REPLACED:
        section, _, name = old.partition(".")
        sections.get(section, {}).pop(name, None)
    config.pop("jobs", None)
    return config


def _upgrade_prepare(prepare: dict[str, Any], _: dict[str, Any]) -> None:
    severities = ["off", "warn", "error"]
    drift = [str(prepare[name]) for name in ("drift", "labels", "range") if prepare.get(name) in severities]
    if drift:
        prepare["drift"] = max(drift, key=severities.index)


def _upgrade_train(train: dict[str, Any], _: dict[str, Any]) -> None:
    if train.get("backend") == "horovod":
        train.setdefault("strategy", "horovod")
    elif train.get("sync", "allreduce") != "allreduce":
        train.setdefault("strategy", train["sync"])
    elif "parallel" in train:
        train.setdefault("strategy", train["parallel"])
    for kind, setting in (("powersgd", "compress_rank"), ("topk", "compress_share")):
        if train.get("compress") == kind and setting in train:
            train["compress"] = f"{kind}:{train[setting]}"
    if train.get("elastic") == "close":
        train["elastic_shards"] = 0
    if train.get("snapshot") == "memory" and "snapshot_every" in train:
        train["snapshot"] = f"memory:{train['snapshot_every']}"


def _upgrade_evaluate(evaluate: dict[str, Any], _: dict[str, Any]) -> None:
    if calibration := evaluate.get("calibration"):
        evaluate["require"] = {**evaluate.get("require", {}), **calibration}


def _upgrade_package(package: dict[str, Any], _: dict[str, Any]) -> None:
    if package.get("build") == "never":
        package["builder"] = "none"
    if isinstance(package.get("modelcar"), bool):
        package["modelcar"] = (package.get("modelcar_base") or "scratch") if package["modelcar"] else ""


def _upgrade_serve(serve: dict[str, Any], config: dict[str, Any]) -> None:
    if canary := serve.get("canary"):
        text = str(canary).strip()
        percent = float(text.removesuffix("%")) * (1 if text.endswith("%") else 100)
        config.setdefault("rollout", {})["canary_percent"] = percent


def _upgrade_deploy(deploy: dict[str, Any], config: dict[str, Any]) -> None:
    if deploy.get("mode") == "inferenceservice" and deploy.get("target") == "kubernetes":
        deploy["target"] = "kserve-knative" if deploy.get("kserve_mode") == "Knative" else "kserve"
    if "expose" in deploy:
        by_ingress, by_gateway = deploy["expose"] == "ingress", deploy["expose"] == "gateway"
        deploy["ingress_class"] = (deploy.get("ingress_class") or "default") if by_ingress else ""
        deploy["gateway"] = deploy.get("gateway", "") if by_gateway else ""
    if deploy.get("metrics_adapter") == "prometheus":
        deploy["target_concurrency"] = deploy.get("in_flight", 8)
    if not deploy.get("service_monitor", True):
        deploy.pop("monitor_labels", None)
    if deploy.get("canary_percent"):
        config.setdefault("rollout", {})["canary_percent"] = deploy["canary_percent"]


def _upgrade_cluster(cluster: dict[str, Any], config: dict[str, Any]) -> None:
    deploy = config.setdefault("deploy", {})
    if cluster.get("pull_secret") and not deploy.get("pull_secret"):
        deploy["pull_secret"] = cluster["pull_secret"]


_CHANGED: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "prepare": _upgrade_prepare,
    "train": _upgrade_train,
    "evaluate": _upgrade_evaluate,
    "package": _upgrade_package,
    "serve": _upgrade_serve,
    "deploy": _upgrade_deploy,
    "cluster": _upgrade_cluster,
}
