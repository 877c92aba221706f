"""Objects that run one step of one run on a cluster: a Job with one pod, or the objects of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from k8s.objects import training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import identity_labels, load_manifests, set_metadata
from k8s.objects.overlay import overlay_job
from pipeline.contract.config import Config
from pipeline.contract.settings.section import parse_interval
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_bytes

RUN_LABEL, STEP_LABEL, KEY_LABEL = "pipe-road/run", "pipe-road/step", "pipe-road/key"
SERVICE_ACCOUNT = "pipe"  # from k8s/manifests/access, for the deploy step
PROJECT_FOLDER = "/project"  # in the image that `pipe package --train` makes
_KEY_DIGITS = 16
_INDEXED_JOB_FIELDS = ("completionMode", "completions", "parallelism", "backoffLimitPerIndex", "maxFailedIndexes")


@dataclass(frozen=True)
class StepJob:
    """One step of one run: its objects, and how they are found again."""

    name: str  # the model's
    run: str
    step: str
    key: str
    claim: str  # of the volume that holds the runs
    objects: tuple[Object, ...]  # in the order they are applied
    pods: int
    container: str  # the one in each pod that does the work

    @property
    def job(self) -> Object:
        """The Job, JobSet or TrainJob, whose status is that of the step."""
        return self.objects[-1]

    @property
    def labels(self) -> dict[str, str]:
        return step_labels(self.run, self.step, self.key)

    @property
    def selector(self) -> str:
        """Select everything that was created for this step of this run, with any key."""
        return f"{RUN_LABEL}={self.run},{STEP_LABEL}={self.step}"


@dataclass(frozen=True)
class PodUser:
    """The user as which pods write to the volume, and their group, which is also that of a volume with an owner."""

    uid: int = 10001  # as in the images and manifests
    gid: int = 10001


def step_job(
    config: Config,
    step: str,
    run: str,
    key: str,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    user: PodUser = PodUser(),
    overlay: Path | None = None,
) -> StepJob:
    """Return the objects for a step; `argv` is its local command, whose last argument is the run directory."""
    training.check_training_image(config)
    run_dir = PurePosixPath(PROJECT_FOLDER, argv[-1])
    if step == "train":
        parts = training.training_parts(config, str(run_dir))
    else:
        parts = {"Job": _job(config, step, run, key, argv, env)}
    for item in parts.values():
        item["metadata"]["labels"] |= step_labels(run, step, key)
    _fill_step(parts["Job"], config, step_labels(run, step, key), user)
    parts["Job"] = overlay_job(parts["Job"], overlay)
    pods = parts["Job"]["spec"].get("completions", 1)
    objects = training.wrap_in_workload(parts, config) if step == "train" else [parts["Job"]]
    container = training.container_name(config) if step == "train" else training.TRAINER_CONTAINER
    return StepJob(config.name, run, step, key, training.claim_name(config), tuple(objects), pods, container)


def step_labels(run: str, step: str, key: str) -> dict[str, str]:
    return {RUN_LABEL: run, STEP_LABEL: step, KEY_LABEL: key[:_KEY_DIGITS]}


def _job(config: Config, step: str, run: str, key: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Object:
    """Make a Job with one pod from that of training; it has no retries, since a failed step would fail again."""
    job = load_manifests("train")["Job"]
    name = f"{config.name}-{step}-{digest_bytes(f'{run} {key}'.encode())[:8]}"
    labels = identity_labels(config.name, "step")
    set_metadata(job, name, config.deploy.namespace, {**labels, "app.kubernetes.io/instance": name}, {})
    spec = job["spec"]
    for field in _INDEXED_JOB_FIELDS:
        del spec[field]
    spec["backoffLimit"] = 0
    spec["podFailurePolicy"]["rules"] = [
        rule for rule in spec["podFailurePolicy"]["rules"] if "onPodConditions" in rule
    ]
    spec["activeDeadlineSeconds"] = config.cluster.active_deadline_seconds
    spec["ttlSecondsAfterFinished"] = training.TTL_SECONDS_AFTER_FINISHED
    spec["template"]["metadata"]["labels"] = dict(job["metadata"]["labels"])
    spec["template"]["spec"] = _pod(config, step, argv, env)
    return job


def _pod(config: Config, step: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Object:
    mount = str(PurePosixPath(PROJECT_FOLDER, argv[-1]).parent)
    gpus = training.gpus_per_pod(config.train) if step == "evaluate" else 0
    pod = training.training_pod(config, mount, gpus)
    for field in ("initContainers", "subdomain"):
        pod.pop(field, None)
    (container,) = pod["containers"]
    container.pop("ports", None)
    container["command"] = list(argv)
    container.pop("args", None)
    container["resources"]["requests"]["cpu"] = config.cluster.cpu or "1"
    variables = [item for item in container["env"] if "value" in item]  # without the index of a pod among several
    names = {item["name"] for item in variables}
    container["env"] = variables + [{"name": name, "value": env[name]} for name in sorted(env) if name not in names]
    training.set_node_placement(pod, container, gpus, config.cluster, config.deploy.image_pull_secret)
    if step == "deploy":
        pod["serviceAccountName"] = config.cluster.service_account or SERVICE_ACCOUNT
        pod["automountServiceAccountToken"] = True
    return pod


_MINUTES, _HOURS = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30), (1, 2, 3, 4, 6, 8, 12, 24)
_SCHEDULES = {60 * count: f"*/{count} * * * *" for count in _MINUTES}
_SCHEDULES |= {3600 * count: f"0 */{count} * * *" if count < 24 else "0 0 * * *" for count in _HOURS}


def monitor_job(config: Config, run: Path) -> Object:
    """Return the CronJob that monitors the live traffic of a run; that it is not as promised is a failed Job."""
    claim = config.cluster.volume_claim or config.cluster.executor == "kubernetes"  # whose steps have one
    needed: Mapping[str, object] = {
        "train.image": config.train.image,
        "cluster.volume_claim": claim,
        "serve.sample": config.serve.sample,
        "serve.sample_to": config.serve.sample_to,
    }
    if missing := [name for name, value in needed.items() if not value]:
        raise ConfigError(f"monitor.every: its CronJob needs {', '.join(missing)}; to fix it: set what is missing")
    seconds = parse_interval(config.monitor.every, "monitor.every")
    if seconds not in _SCHEDULES:
        counts = (", ".join(map(str, numbers)) for numbers in (_MINUTES, _HOURS))
        raise ConfigError(
            f"monitor.every {config.monitor.every}: cron has no such interval; to fix it: use "
            "{} min, or {} h".format(*counts)
        )
    argv = ("python", "-m", "pipeline", "monitor", "-o", "json", "--samples", config.serve.sample_to)
    job = step_job(config, "monitor", run.name, "", (*argv, f"runs/{run.name}"), {}, folder_user(run)).job
    template = {"metadata": {"labels": job["metadata"]["labels"]}, "spec": job["spec"]}
    template["spec"]["activeDeadlineSeconds"] = max(seconds, 3600)  # the next one waits for it
    spec = {"schedule": _SCHEDULES[seconds], "concurrencyPolicy": "Forbid", "jobTemplate": template}
    limits = {"successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 3}
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {}, "spec": {**spec, **limits}}


def folder_user(path: Path) -> PodUser:
    """Return the owner of a folder, as which pods may write to it; instead of root, the manifests' user."""
    owner = path.stat()
    return PodUser(owner.st_uid, owner.st_gid) if owner.st_uid else PodUser()


def _fill_step(job: Object, config: Config, labels: Mapping[str, str], user: PodUser) -> None:
    """Set queue, labels, user and working directory."""
    if config.cluster.queue:
        job["metadata"]["labels"][training.QUEUE_LABEL] = config.cluster.queue
    template = job["spec"]["template"]
    template["metadata"]["labels"] |= labels
    template["spec"]["securityContext"] |= {"runAsUser": user.uid, "runAsGroup": user.gid, "fsGroup": user.gid}
    for container in template["spec"]["containers"]:
        container["workingDir"] = PROJECT_FOLDER
