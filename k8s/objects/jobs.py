"""The objects that run one step of one run on a cluster: a Job of one pod, or what training is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from k8s.objects import training
from k8s.objects.kustomize import Object
from k8s.objects.manifests import check_pinned, describe, identity, load
from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_bytes

RUN, STEP, KEY = "pipe-road/run", "pipe-road/step", "pipe-road/key"
ACCOUNT = "pipe"  # of k8s/access, for the step that talks to the cluster
_KEY_DIGITS = 16
_OF_SEVERAL = ("completionMode", "completions", "parallelism", "backoffLimitPerIndex", "maxFailedIndexes")


@dataclass(frozen=True)
class Work:
    """One step of one run, as the cluster is to know it."""

    name: str  # the model's
    run: str
    step: str
    key: str
    claim: str  # of the volume that holds the runs
    objects: tuple[Object, ...]  # in the order they are applied
    pods: int
    container: str  # of each pod, the one that does the work

    @property
    def job(self) -> Object:
        """Or the JobSet or TrainJob, which says how the work stands."""
        return self.objects[-1]

    @property
    def labels(self) -> dict[str, str]:
        """They find it again, whoever looks."""
        return labels_of(self.run, self.step, self.key)

    @property
    def selector(self) -> str:
        """Of whatever was made for this step of this run, under any key."""
        return f"{RUN}={self.run},{STEP}={self.step}"


def work(config: Config, step: str, run: str, key: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Work:
    """`argv` is what would run here; its last word is the run directory, relative to the project where it can be."""
    image = config.train.image
    if not image:
        raise ConfigError(
            "train.image is empty; name the image the steps' pods run: `pipe package --train --push` makes it"
        )
    check_pinned(image, "train.image")
    run_dir = PurePosixPath(config.jobs.project, argv[-1])
    if step == "train":
        parts = training.parts(config, image, str(run_dir))
    else:
        parts = {"Job": _job(config, step, run, key, argv, env)}
    for item in parts.values():
        item["metadata"]["labels"] |= labels_of(run, step, key)
    _settle(parts["Job"], config, labels_of(run, step, key))
    pods = parts["Job"]["spec"].get("completions", 1)
    objects = training.as_asked(parts, config) if step == "train" else [parts["Job"]]
    container = training.container_name(config) if step == "train" else training.TRAINER
    return Work(config.name, run, step, key, training.claim_name(config), tuple(objects), pods, container)


def labels_of(run: str, step: str, key: str) -> dict[str, str]:
    return {RUN: run, STEP: step, KEY: key[:_KEY_DIGITS]}


def _job(config: Config, step: str, run: str, key: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Object:
    """The pod of training, without what only several pods need; a step that fails would fail again."""
    job = load("train")["Job"]
    name = f"{config.name}-{step}-{digest_bytes(f'{run} {key}'.encode())[:8]}"
    labels = identity(config.name, "step")
    describe(job, name, config.deploy.namespace, {**labels, "app.kubernetes.io/instance": name}, {})
    spec = job["spec"]
    for word in _OF_SEVERAL:
        del spec[word]
    spec["backoffLimit"] = 0
    spec["podFailurePolicy"]["rules"] = [
        rule for rule in spec["podFailurePolicy"]["rules"] if "onPodConditions" in rule
    ]
    spec["activeDeadlineSeconds"] = config.cluster.deadline_seconds
    spec["ttlSecondsAfterFinished"] = config.cluster.keep_seconds
    spec["template"]["metadata"]["labels"] = dict(job["metadata"]["labels"])
    spec["template"]["spec"] = _pod(config, step, argv, env)
    return job


def _pod(config: Config, step: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Object:
    mount = str(PurePosixPath(config.jobs.project, argv[-1]).parent)
    gpus = training.gpus_of(config.train) if step == "evaluate" else 0
    pod = training.pod(config, config.train.image, mount, gpus)
    for word in ("initContainers", "subdomain"):
        pod.pop(word, None)
    (container,) = pod["containers"]
    container.pop("ports", None)
    container["command"] = list(argv)
    container.pop("args", None)
    container["resources"]["requests"]["cpu"] = config.cluster.cpu or "1"
    own = [item for item in container["env"] if "value" in item]  # without the number of a pod among several
    known = {item["name"] for item in own}
    container["env"] = own + [{"name": name, "value": env[name]} for name in sorted(env) if name not in known]
    training.place(pod, container, gpus, config.cluster)
    if step == "deploy":
        pod["serviceAccountName"], pod["automountServiceAccountToken"] = config.cluster.service_account or ACCOUNT, True
    return pod


def _settle(job: Object, config: Config, labels: Mapping[str, str]) -> None:
    """Where the pods work, how they are found, and who lets them in."""
    if config.cluster.queue:
        job["metadata"]["labels"][training.QUEUE_LABEL] = config.cluster.queue
    template = job["spec"]["template"]
    template["metadata"]["labels"] |= labels
    for container in template["spec"]["containers"]:
        container["workingDir"] = config.jobs.project
