"""Define the sections of `pipe.yaml` that are about Kubernetes: pods of the steps, pods that serve, roll-outs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.contract.settings.section import (
    Bytes,
    Cpu,
    Egress,
    Gateway,
    Host,
    InKeyOrder,
    Label,
    LabelKey,
    Name,
    Namespace,
    Natural,
    Positive,
    Section,
    Storage,
    Text,
    Toleration,
    Variable,
)


class NodePlacement(Section):
    """Which nodes a pod may run on."""

    node_selector: Annotated[dict[LabelKey, Label], InKeyOrder] = Field(
        {}, description="node labels that the pods require, as in `{pool: gpus}`"
    )
    tolerations: tuple[Toleration, ...] = Field((), description="taints to tolerate, as in `pool=gpus:NoSchedule`")


class Cluster(NodePlacement):
    """The steps as pods on a Kubernetes cluster. Nothing here changes a result."""

    executor: Literal["local", "kubernetes"] = Field(
        "local", description="where the steps run: `local` processes, or `kubernetes` Jobs; `--executor` sets it"
    )
    workload: Literal["job", "jobset", "trainjob"] = Field(
        "job",
        description="Kubernetes resource for training: `job`, `jobset` (needs JobSet) or `trainjob` (needs Kubeflow "
        "Trainer)",
    )
    queue: Name = Field("", description="Kueue LocalQueue that admits the steps; empty: no queue")
    cpu: Cpu = Field("", description="CPU request of a training pod; empty: one per process")
    memory: Bytes = Field("2Gi", description="memory request of each pod, and size limit of its /dev/shm")
    volume_claim: Name = Field(
        "",
        description="PersistentVolumeClaim that stores the runs; empty: one is created, `ReadWriteMany`, 10Gi, in the "
        "cluster's default StorageClass",
    )
    env_secret: Name = Field(
        "", description="Secret whose keys become environment variables of the steps, such as object store credentials"
    )
    overlay: Text = Field(
        "",
        description="folder of the project with a kustomize Component that is applied to the Jobs of the steps, for "
        "what no setting names, such as RDMA devices or further volumes",
    )
    active_deadline_seconds: Positive = Field(
        604_800, description="maximum duration of training; it is terminated afterwards"
    )
    service_account: Name = Field(
        "",
        description="ServiceAccount of the workflow's steps that change the cluster: deploy, and training as a JobSet",
    )


class ServingPods(NodePlacement):
    """The pods of the service on a cluster, and how clients reach them."""

    image_pull_secret: Name = Field(
        "", description="Secret with the credentials of the image registry, for all pods; empty: none"
    )
    environment: Annotated[dict[Variable, Text], InKeyOrder] = Field(
        {}, description="environment variables of the serving pods, such as OTEL_EXPORTER_OTLP_ENDPOINT or MAX_WAITING"
    )
    clients: tuple[Namespace, ...] = Field((), description="namespaces allowed to call the service; empty: all")
    egress: tuple[Egress, ...] = Field(
        (),
        description="destinations that serving pods may connect to besides DNS: a port, or `CIDR:port` as in "
        "`10.0.0.0/8:4318`",
    )
    ingress_class: Name = Field(
        "",
        description="expose the service by an Ingress of this class; `default`: the cluster's default class; empty: no "
        "Ingress",
    )
    gateway: Gateway = Field(
        "",
        description="expose the service by an HTTPRoute at this Gateway, `NAME` or `NAMESPACE/NAME`; empty: no "
        "HTTPRoute",
    )
    hostname: Host = Field("", description="external host name; empty: any")
    pre_stop_seconds: Positive = Field(
        60,
        description="time a pod keeps serving once it is deleted: until proxies that lost the API server send it "
        "nothing more, at most a minute; spot nodes may allow less",
    )
    target_concurrency: Natural = Field(
        0,
        description="requests in flight per pod that the autoscaler aims at; needs prometheus-adapter; 0: scale by CPU",
    )
    storage_uri: Storage = Field(
        "",
        description="KServe: storage URI of the bundle (`pvc://`, `s3://`, `oci://`; `{run}` is replaced by the run's "
        "name); empty: the bundle is in the image",
    )
    overlay: Text = Field(
        "",
        description="folder of the project with a kustomize Component that is applied to the objects of the service, "
        "for what no setting names",
    )


class Rollout(Section):
    """How a new bundle replaces the one that serves."""

    controller: Literal["pipe", "argo-rollouts"] = Field(
        "pipe",
        description="what runs a canary on a cluster: `pipe deploy`, or the controller of Argo Rollouts, which was not "
        "run with the objects that `pipe deploy --render` writes for it: only their structure is tested",
    )
    canary_percent: float = Field(
        0,
        ge=0,
        lt=100,
        description="percentage of requests that a new bundle gets first; 0: all at once; `--canary` sets it",
    )
    auto: bool = Field(
        False,
        description="raise the canary to 50 and 100 percent, or roll it back, by measured errors, latency and, where "
        "labels arrive, metric; `--auto` sets it",
    )
    observe_seconds: Positive = Field(60, description="observation time at each percentage before it is judged")
    min_requests: Natural = Field(
        100, description="minimum requests to judge a percentage by; 0: golden requests are enough"
    )
    min_labels: Natural = Field(
        0,
        description="minimum labels of each version before a percentage is raised; 0: labels only end a canary whose "
        "metric is worse by more than `evaluate.champion_margin`",
    )
    margin: float = Field(0.01, ge=0, le=1, description="how much higher the canary's error rate may be")
