"""The words that only a Kubernetes cluster knows: of the pods that run the steps, and of those that serve.

The `rollout` section of `pipe.yaml`: how a bundle takes over from another one on a cluster.

The `jobs` section of `pipe.yaml`: which steps run as Jobs, and where in the image.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pipeline.contract.settings.section import (
    Bytes,
    Cpu,
    Egress,
    Gateway,
    Host,
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

_DEPRECATED = {"RawDeployment": "Standard", "Serverless": "Knative"}


class Placed(Section):
    """Which nodes take a pod, and how they get its image."""

    node_selector: dict[LabelKey, Label] = Field({}, description="labels a node must bear, as in `{pool: gpus}`")
    tolerations: tuple[Toleration, ...] = Field((), description="taints that are borne, as in `pool=gpus:NoSchedule`")
    pull_secret: Name = Field("", description="Secret that opens the registry of the image; empty: it is open")
    spot: bool = Field(False, description="nodes that may be taken away at short notice are preferred")


class Cluster(Placed):
    """The pods that run the steps on a Kubernetes cluster; no result depends on these words."""

    workload: Literal["job", "jobset", "trainjob"] = Field(
        "job", description="what training is on the cluster; the last two need JobSet and Kubeflow Trainer installed"
    )
    queue: Name = Field("", description="local queue of Kueue that admits the steps; empty: none is asked")
    cpu: Cpu = Field("", description="CPU request of a training pod; empty: one for each process")
    memory: Bytes = Field("2Gi", description="memory request of a pod of any step")
    shared_memory: Bytes = Field("2Gi", description="size of /dev/shm, which data loaders and NCCL use")
    claim: Name = Field("", description="volume claim that holds the runs; empty: one is made")
    claim_size: Bytes = Field("10Gi", description="size of the claim that is made")
    claim_class: Name = Field("", description="storage class of the claim that is made; empty: the cluster's default")
    claim_access: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany", description="`ReadWriteOnce` will do where all pods share one node"
    )
    secret: Name = Field("", description="Secret whose keys the steps get as variables, as for an object store")
    deadline_seconds: Positive = Field(604_800, description="longest time training may take in all; it is ended then")
    keep_seconds: Natural = Field(604_800, description="how long a finished training stays to be looked at")
    service_account: Name = Field(
        "", description="account of the workflow's steps that change the cluster: deploy, and training as a JobSet"
    )


class ServingPods(Placed):
    """The pods that serve on a cluster, and who reaches them."""

    sidecar: bool = Field(True, description="whether a service mesh may put its proxy into the pods")
    environment: dict[Variable, Text] = Field(
        {},
        description="variables of the serving pods, in a ConfigMap: OTEL_EXPORTER_OTLP_ENDPOINT; MAX_WAITING, "
        "DEADLINE_SECONDS and others that a bundle says",
    )
    clients: tuple[Namespace, ...] = Field(
        (), description="namespaces whose pods may ask; empty: whoever finds the way"
    )
    egress: tuple[Egress, ...] = Field(
        (), description="what pods may reach beside the DNS: a port, or `CIDR:port`, as in `10.0.0.0/8:4318`"
    )
    expose: Literal["none", "ingress", "gateway"] = Field("none", description="how requests come in from outside")
    hostname: Host = Field("", description="host name of requests from outside; empty: any")
    ingress_class: Name = Field("", description="expose=ingress: its class; empty: the cluster's default")
    ingress_secret: Name = Field("", description="expose=ingress: Secret with the certificate of the host name")
    ingress_annotations: dict[LabelKey, Text] = Field({}, description="expose=ingress: what its controller is told")
    answer_seconds: int = Field(
        60, ge=1, le=86_400, description="expose: longest that an answer may take, from outside"
    )
    gateway: Gateway = Field("", description="expose=gateway: `NAME` or `NAMESPACE/NAME`")
    metrics_adapter: Literal["none", "prometheus"] = Field(
        "none", description="what brings `pipe_requests_in_flight` to the autoscaler; none: it looks at CPU alone"
    )
    in_flight: Positive = Field(8, description="requests in flight in each pod that the autoscaler aims at")
    service_monitor: bool = Field(False, description="write a ServiceMonitor for the Prometheus operator")
    monitor_labels: dict[LabelKey, Label] = Field({}, description="labels by which Prometheus finds the ServiceMonitor")
    monitor_secret: Name = Field("", description="Secret with an API key, under `key`, for the ServiceMonitor")
    kserve_mode: Literal["Standard", "Knative"] = Field(
        "Standard", description="mode=inferenceservice: a plain Deployment, or a Knative service"
    )
    storage_uri: Storage = Field(
        "",
        description="mode=inferenceservice: where KServe finds the bundle (`pvc://`, `s3://`, `oci://`; `{run}` is "
        "the run's name); empty: in the image",
    )
    storage_secret: Name = Field("", description="Secret with the credentials for `storage_uri`")
    canary_percent: Annotated[int, Field(ge=0, lt=100)] = Field(
        0, description="mode=inferenceservice, rendered: share of the requests that this bundle gets; 0: all"
    )
    stable_uri: Storage = Field(
        "", description="canary in Standard mode: where the version is stored that gets the rest"
    )

    @field_validator("kserve_mode", mode="before")
    @classmethod
    def _a_name_of_today(cls, value: Any) -> Any:
        if value in _DEPRECATED:
            problem = f"{value} is the deprecated name of {_DEPRECATED[value]}; write that"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return value


class Rollout(Section):
    """How a new bundle takes over on a cluster."""

    canary: float = Field(
        0, ge=0, lt=100, description="percent of the requests that it gets at first; 0: all at once; `--canary` sets it"
    )
    auto: bool = Field(False, description="go on to 50 and 100 percent, or back, by what is measured; `--auto` sets it")
    observe_seconds: Positive = Field(60, description="how long each share is watched before it is judged")
    patience: Positive = Field(5, description="times a share is watched again where too few requests came to judge by")
    requests: Natural = Field(100, description="requests a share is judged by at least; 0: golden requests will do")
    margin: float = Field(0.01, ge=0, le=1, description="how much larger its share of failed requests may be")
    slow_margin: float = Field(
        0.05, ge=0, le=1, description="how much larger its share may be of requests slower than 95 % of the stable ones"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="with which both must be shown to stay below the margin")
    take_over: bool = Field(False, description="set fields anew that others have set, as by `kubectl edit`")
    wait_seconds: Natural = Field(120, description="longest wait for another deployment of this model to end")
    force_reason: str = Field("", description="deploy a bundle that failed its gate, with this reason on record")


StepName = Literal["prepare", "train", "evaluate", "export", "package", "deploy"]


class Jobs(Section):
    """Steps as Jobs: in `deploy.namespace`, from the image `train.image`; `cluster` says what their pods ask for."""

    executor: Literal["local", "kubernetes"] = Field(
        "local", description="processes on this machine, or Jobs on a cluster; `--executor` sets it"
    )
    steps: tuple[StepName, ...] = Field(
        ("prepare", "train", "evaluate", "export"), description="steps that run as Jobs; the others run here"
    )
    project: str = Field(
        "/project", pattern="^/.+", description="project folder in the image; the volume of runs is mounted below it"
    )
    timeout_seconds: Positive = Field(
        300, description="longest wait for a pod whose image or settings the cluster cannot get"
    )
