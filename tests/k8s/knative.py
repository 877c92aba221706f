"""KServe and Knative in the test API server: each change of the pod template creates a revision with its pods."""

from __future__ import annotations

import copy
import json

from .object_store import Object, Store

_READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
_PODS = 2


class Knative:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.pods: dict[str, str] = {}  # Service of a revision → one of its pods
        self._templates: dict[str, list[str]] = {}  # InferenceService → pod templates of its revisions

    def on_apply(self, path: str) -> None:
        """Handle an applied InferenceService."""
        live = self.store.objects[path]
        if live["metadata"].get("annotations", {}).get("serving.kserve.io/deploymentMode") != "Knative":
            return
        predictor = copy.deepcopy(live["spec"]["predictor"])
        percent = predictor.pop("canaryTrafficPercent", 100)
        templates, template = self._templates.setdefault(path, []), json.dumps(predictor)
        if templates[-1:] != [template]:
            templates.append(template)
            self._add_revision(path, len(templates), predictor)
        self._set_status(path, percent)

    def has_service(self, service: str) -> bool:
        return service in self.pods

    def _add_revision(self, path: str, number: int, predictor: Object) -> None:
        root, name = path.split("/apis/")[0], f"{path.rsplit('/', 1)[1]}-predictor-{number:05d}"
        namespace = path.split("/namespaces/")[1].split("/")[0]
        metadata = {"name": name, "annotations": predictor["annotations"]}
        revision = {"apiVersion": "serving.knative.dev/v1", "kind": "Revision", "metadata": metadata}
        self.store.create(f"{root}/apis/serving.knative.dev/v1/namespaces/{namespace}/revisions/{name}", revision)
        labels = {**predictor["labels"], "serving.knative.dev/revision": name}
        for index in range(_PODS):
            pod = {"name": f"{name}-deployment-{index}", "labels": labels}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": {}, "status": _READY}
            self.store.create(f"{root}/api/v1/namespaces/{namespace}/pods/{pod['name']}", body)
        self.pods[f"{name}-private"] = f"{name}-deployment-0"

    def _set_status(self, path: str, percent: int) -> None:
        name = f"{path.rsplit('/', 1)[1]}-predictor-{len(self._templates[path]):05d}"
        live = self.store.objects[path]
        before = live.get("status", {}).get("components", {}).get("predictor", {})
        revisions = {"latestCreatedRevision": name, "latestReadyRevision": name}
        rolled = name if percent == 100 else before.get("latestRolledoutRevision", "")
        status = {
            "observedGeneration": live["metadata"]["generation"],
            "conditions": [{"type": "Ready", "status": "True"}],
            "components": {"predictor": {**revisions, "latestRolledoutRevision": rolled}},
        }
        self.store.set_status(path, status)
