"""The versions of a service, recorded on its cluster in one ConfigMap each, from which every machine reads them.

An annotation of the workload holds the number of the version that serves; `kubectl rollout undo` restores it too. A
version is what the pods are made of: bundle, image, options and keys. Its record has all objects that were applied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from k8s.cluster.canary import canary_name
from k8s.cluster.cluster import Cluster, Report, apply_object
from k8s.objects.kustomize import Object
from k8s.objects.manifests import (
    ACCESS_ANNOTATION,
    VERSION_ANNOTATION,
    WORKLOAD_KINDS,
    find_workload,
    format_selector,
    identity_labels,
    kubectl_name,
)
from pipeline.contract.registry import current_user
from pipeline.contract.settings.section import Frozen
from pipeline.system.errors import ConfigError, PipelineError

VERSIONS_KEPT = 10

_CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap"}
_KEY = "version.json"
_POD_KINDS = ("ConfigMap", "CronJob", "ServingRuntime", *WORKLOAD_KINDS)  # a CronJob monitors one run


# restoring: a rollback to it has begun; undone: a rollback followed its deployment, which had failed
State: TypeAlias = Literal["begun", "restoring", "served", "undone"]


class Version(Frozen):
    number: int
    state: State
    run: str
    bundle: str
    image: str
    by: str
    since: str  # when it was deployed or restored
    after: int = 0  # number of the version that it replaced; 0: none
    objects: tuple[dict[str, Any], ...]

    @property
    def workload(self) -> Object:
        return find_workload(self.objects)

    @property
    def pod_objects(self) -> list[Object]:
        """Return the objects that a rollback restores; routes, policies and autoscalers stay as they are."""
        return [item for item in self.objects if item["kind"] in _POD_KINDS]

    def has_pods_of(self, objects: Sequence[Object]) -> bool:
        return _pods(self.objects) == _pods(objects)

    @property
    def title(self) -> str:
        return f"version {self.number}, bundle {self.bundle[:12]} of run {self.run}"

    def facts(self) -> dict[str, Any]:
        return self.model_dump(exclude={"objects"})


@dataclass(frozen=True)
class History:
    name: str
    versions: Mapping[int, Version]
    live: Object | None  # the workload
    live_canary: Object | None

    @property
    def current(self) -> Version | None:
        """Return the version that serves, or is being rolled out; None if `pipe` did not deploy it."""
        return self.versions.get(_version_number(self.live))

    @property
    def canary(self) -> Version | None:
        return self.versions.get(_version_number(self.live_canary))

    @property
    def newest(self) -> int:
        return max(self.versions, default=0)

    @property
    def unfinished(self) -> Version | None:
        """Return the version whose deployment did not end, or failed."""
        newest, current, canary = self.versions.get(self.newest), self.current, self.canary
        if current is not None and current.state != "served":
            return current
        return newest if newest is not None and newest.state == "begun" and newest != canary else None

    def to_restore(self, number: int | None = None) -> Version:
        """Return the version with this number, or the one that a rollback restores.

        An interrupted rollback is repeated, and a deployment that was interrupted before its pods changed is undone.
        """
        current, unfinished = self.current, self.unfinished
        if number is None and current is not None:
            is_repeated = current.state == "restoring" or unfinished not in (None, current)
            number = current.number if is_repeated else current.after
        if number is None:  # what is there was applied by hand, or nothing is there: restore what pipe deployed last
            number = max((item.number for item in self.versions.values() if item.state == "served"), default=0)
        if number not in self.versions:
            known = ", ".join(str(other) for other in sorted(self.versions)) or "none"
            what = f"no version {number}" if number else "no previous version; there is nothing to roll back to"
            raise ConfigError(f"{self.name} has {what} (recorded on the cluster: {known})")
        return self.versions[number]

    def restorable(self) -> tuple[Version, ...]:
        """Return the versions that rollbacks restore, one after the other."""
        versions: list[Version] = []
        try:
            versions.append(self.to_restore())
            while versions[-1].after:
                versions.append(self.to_restore(versions[-1].after))
        except ConfigError:  # there is none, or it is not kept any more
            pass
        return tuple(versions)

    def begin(self, objects: Sequence[Object], **facts: str) -> Version:
        """Return the version of these objects: the one that serves, if all are equal, or a new one.

        A rollback passes over versions with the same pods.
        """
        current, after = self.current, 0
        if current is not None:
            if current.objects == _numbered(objects, current.number):
                return current
            is_passed = current.state != "served" or _pods(current.objects) == _pods(objects)
            after = current.after if is_passed else current.number
        number = self.newest + 1
        return Version(
            number=number, state="begun", by=current_user(), since="", after=after, objects=_numbered(objects, number),
            **facts,
        )  # fmt: skip

    def unwanted_objects(self, cluster: Cluster, objects: Sequence[Object]) -> list[Object]:
        """Return the objects on the cluster that an earlier version had and these do not contain."""
        wanted = {kubectl_name(item) for item in objects}
        past = {kubectl_name(item): item for version in self.versions.values() for item in version.objects}
        labels = identity_labels(self.name, "serving").items()
        return [
            item
            for name, item in past.items()
            if name not in wanted and not item.get("immutable")
            if (live := cluster.read(item)) is not None and labels <= live["metadata"].get("labels", {}).items()
        ]

    def expected_objects(self) -> list[Object]:
        """Return what should be on the cluster: the pods of the current version, the rest as of the newest one."""
        current, canary = self.current, self.canary
        assert current is not None
        newest = max(
            (item for item in self.versions.values() if item != canary and item.state == "served"),
            key=lambda item: item.number,
            default=current,
        )
        rest = [item for item in newest.objects if item["kind"] not in _POD_KINDS]
        return [*rest, *current.pod_objects]


def read_history(cluster: Cluster, name: str, kind: str = "Deployment") -> History:
    """Read the records, and the numbers of the versions that serve; `kind` is that of the workload."""
    versions = {}
    for item in cluster.select(format_selector(identity_labels(name, "version")), _CONFIG_MAP):
        where = f"configmap/{item['metadata']['name']} in namespace {cluster.namespace}"
        version = Version.parse(item["data"][_KEY].encode(), where, "delete it; that version cannot be restored then")
        versions[version.number] = version
    workload = {"apiVersion": _API_VERSIONS[kind], "kind": kind}
    live = cluster.read({**workload, "metadata": {"name": name}})
    canary = cluster.read({**workload, "metadata": {"name": canary_name(name)}}) if kind == "Deployment" else None
    return History(name, versions, live, canary)


_API_VERSIONS = {"Deployment": "apps/v1", "InferenceService": "serving.kserve.io/v1beta1"}


def write_version(cluster: Cluster, name: str, version: Version, state: State) -> None:
    """Write the record; a version that is deployed again without a change serves since its first deployment."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    since = now if state == "restoring" else version.since or now
    version = version.model_copy(update={"state": state, "since": since})
    labels = identity_labels(name, "version")
    metadata = {"name": f"{name}-version-{version.number}", "namespace": cluster.namespace, "labels": labels}
    item = {**_CONFIG_MAP, "metadata": metadata, "data": {_KEY: version.model_dump_json()}}
    apply_object(cluster.connection, item, cluster.namespace, lambda _: None)


def delete_unused(
    cluster: Cluster, read: Callable[[], History], report: Report, check_lease: Callable[[], None]
) -> None:
    """Delete the oldest records, and the options and Secrets that no recorded version has.

    The Secrets are those that the ConfigMaps name, so that no Secret has to be read. An error is only a warning: what
    is left is deleted after the next deployment.
    """
    try:
        history = read()
        options = cluster.select(format_selector(identity_labels(history.name, "serving")), _CONFIG_MAP)
        check_lease()  # another deployment may have applied what no record names yet
        numbers = {*sorted(history.versions)[-VERSIONS_KEPT:]}
        numbers |= {version.number for version in (history.current, history.canary) if version is not None}
        used = {kubectl_name(item) for number in numbers for item in history.versions[number].objects}
        used_secrets = {_secret_name(item) for item in options if kubectl_name(item) in used}
        for item in options:
            if kubectl_name(item) in used or not item.get("immutable"):  # made by hand
                continue
            if (secret_name := _secret_name(item)) and secret_name not in used_secrets:
                delete({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret_name}}, cluster, report)
            delete(item, cluster, report)
        for number in history.versions.keys() - numbers:
            delete_version(cluster, history.name, number)
    except PipelineError as error:
        report(f"warning: unused ConfigMaps and Secrets are left: {error}")


def delete_version(cluster: Cluster, name: str, number: int) -> None:
    cluster.delete({**_CONFIG_MAP, "metadata": {"name": f"{name}-version-{number}"}})


def delete(item: Object, cluster: Cluster, report: Report) -> None:
    cluster.delete(item)
    report(f"deleted {kubectl_name(item)}, which no version uses")


def _secret_name(config_map: Object) -> str:
    return str(config_map["metadata"].get("annotations", {}).get(ACCESS_ANNOTATION, ""))


def _version_number(live: Object | None) -> int:
    annotations = live["metadata"].get("annotations", {}) if live else {}
    return int(annotations.get(VERSION_ANNOTATION, 0))


def _pods(objects: Sequence[Object]) -> list[Object]:
    """Return what describes the pods; their annotations name options and keys by their content."""
    kinds = ("ServingRuntime", *WORKLOAD_KINDS)
    return [item["spec"].get("template", item["spec"]) for item in objects if item["kind"] in kinds]


def _numbered(objects: Sequence[Object], number: int) -> tuple[Object, ...]:
    """Return the objects, the workload with the number of its version."""
    items = tuple(copy.deepcopy(item) for item in objects)
    find_workload(items)["metadata"].setdefault("annotations", {})[VERSION_ANNOTATION] = str(number)
    return items
