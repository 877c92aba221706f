"""The words that only a Kubernetes cluster knows: of the pods that run the steps, and of those that serve."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pipeline.spec.section import Natural, Positive, Section

Quantity = Annotated[str, Field(pattern=r"^(\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?)?$")]
Label = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?$")]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
Toleration = Annotated[str, Field(pattern=r"^[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?$")]
# `443` anywhere, or only there: `10.0.0.0/8:443`
Egress = Annotated[str, Field(pattern=r"^(\d{1,3}(\.\d{1,3}){3}/\d{1,2}:)?\d{1,5}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]

_DEPRECATED = {"RawDeployment": "Standard", "Serverless": "Knative"}


class Placed(Section):
    """Which nodes take a pod."""

    node_selector: dict[str, Label] = Field({}, description="labels a node must bear, as in `{pool: gpus}`")
    tolerations: tuple[Toleration, ...] = Field((), description="taints that are borne, as in `pool=gpus:NoSchedule`")
    spot: bool = Field(False, description="nodes that may be taken away at short notice are preferred")


class Cluster(Placed):
    """The pods that run the steps on a Kubernetes cluster; no result depends on these words."""

    workload: Literal["job", "jobset", "trainjob"] = Field(
        "job", description="what training is on the cluster; the last two need JobSet and Kubeflow Trainer installed"
    )
    queue: Name = Field("", description="local queue of Kueue that admits training; empty: none is asked")
    cpu: Quantity = Field("", description="CPU request of a training pod; empty: one for each process")
    memory: Quantity = Field("2Gi", description="memory request of a pod of any step")
    shared_memory: Quantity = Field("2Gi", description="size of /dev/shm, which data loaders and NCCL use")
    claim: Name = Field("", description="volume claim that holds the runs; empty: one is made")
    claim_size: Quantity = Field("10Gi", description="size of the claim that is made")
    claim_class: Name = Field("", description="storage class of the claim that is made; empty: the cluster's default")
    claim_access: Literal["ReadWriteMany", "ReadWriteOnce"] = Field(
        "ReadWriteMany", description="`ReadWriteOnce` will do where all pods share one node"
    )
    secret: Name = Field("", description="Secret whose keys the steps get as variables, as for an object store")
    deadline_seconds: Positive = Field(604_800, description="longest time training may take in all; it is ended then")
    keep_seconds: Natural = Field(604_800, description="how long a finished training stays to be looked at")
    service_account: Name = Field("", description="account of the workflow's deploy step; it may change the service")


class ServingPods(Placed):
    """The pods that serve on a cluster, and who reaches them."""

    sidecar: bool = Field(True, description="whether a service mesh may put its proxy into the pods")
    environment: dict[Variable, str] = Field(
        {}, description="variables of the serving pods, as OTEL_EXPORTER_OTLP_ENDPOINT; they stand in a ConfigMap"
    )
    clients: tuple[Label, ...] = Field((), description="namespaces whose pods may ask; empty: whoever finds the way")
    egress: tuple[Egress, ...] = Field(
        (), description="what pods may reach beside the DNS: a port, or `CIDR:port`, as in `10.0.0.0/8:4318`"
    )
    expose: Literal["none", "ingress", "gateway"] = Field("none", description="how requests come in from outside")
    hostname: Name = Field("", description="host name of requests from outside; empty: any")
    ingress_class: Name = Field("", description="expose=ingress: its class; empty: the cluster's default")
    gateway: str = Field(
        "", pattern=r"^([a-z0-9][a-z0-9-]*/)?[a-z0-9.-]*$", description="expose=gateway: `NAME` or `NAMESPACE/NAME`"
    )
    metrics_adapter: Literal["none", "prometheus"] = Field(
        "none", description="what brings `pipe_requests_in_flight` to the autoscaler; none: it looks at CPU alone"
    )
    in_flight: Positive = Field(8, description="requests in flight in each pod that the autoscaler aims at")
    service_monitor: bool = Field(False, description="write a ServiceMonitor for the Prometheus operator")
    monitor_labels: dict[str, Label] = Field({}, description="labels by which Prometheus finds the ServiceMonitor")
    kserve_mode: Literal["Standard", "Knative"] = Field(
        "Standard", description="mode=inferenceservice: a plain Deployment, or a Knative service"
    )
    storage_uri: str = Field(
        "",
        pattern=r"^((pvc|s3|gs|oci|https)://\S+)?$",
        description="mode=inferenceservice: where KServe finds the bundle (`pvc://`, `s3://`, `oci://`); empty: image",
    )
    storage_secret: Name = Field("", description="Secret with the credentials for `storage_uri`")
    canary_percent: Annotated[int, Field(ge=0, lt=100)] = Field(
        0, description="mode=inferenceservice, rendered: share of the requests that this bundle gets; 0: all"
    )
    stable_uri: str = Field("", description="canary in Standard mode: where the version is stored that gets the rest")

    @field_validator("kserve_mode", mode="before")
    @classmethod
    def _a_name_of_today(cls, value: Any) -> Any:
        if value in _DEPRECATED:
            problem = f"{value} is the deprecated name of {_DEPRECATED[value]}; write that"
            raise PydanticCustomError("conflict", "{problem}", {"problem": problem})
        return value
