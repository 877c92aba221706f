"""KServe and Knative on the API server of the tests: each change of a template is a revision with pods of its own."""

from __future__ import annotations

import copy
import json

from .object_store import Object, Store

_READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
_PODS = 2


class Knative:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.pods: dict[str, str] = {}  # by the Service of its revision, one that answers
        self._templates: dict[str, list[str]] = {}  # of each service, its revisions

    def on_apply(self, path: str) -> None:
        """An InferenceService was applied."""
        live = self.store.objects[path]
        if live["metadata"].get("annotations", {}).get("serving.kserve.io/deploymentMode") != "Knative":
            return
        predictor = copy.deepcopy(live["spec"]["predictor"])
        share = predictor.pop("canaryTrafficPercent", 100)
        known, template = self._templates.setdefault(path, []), json.dumps(predictor)
        if known[-1:] != [template]:
            known.append(template)
            self._add_revision(path, len(known), predictor)
        self._set_status(path, share)

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

    def _set_status(self, path: str, share: int) -> None:
        name = f"{path.rsplit('/', 1)[1]}-predictor-{len(self._templates[path]):05d}"
        live = self.store.objects[path]
        before = live.get("status", {}).get("components", {}).get("predictor", {})
        revisions = {"latestCreatedRevision": name, "latestReadyRevision": name}
        rolled = name if share == 100 else before.get("latestRolledoutRevision", "")
        status = {
            "observedGeneration": live["metadata"]["generation"],
            "conditions": [{"type": "Ready", "status": "True"}],
            "components": {"predictor": {**revisions, "latestRolledoutRevision": rolled}},
        }
        self.store.set_status(path, status)
