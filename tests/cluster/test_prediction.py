"""Prediction of a file by an Indexed Job, of which one pod is replaced."""

from __future__ import annotations

import base64
import os
from typing import Any

import orjson
import pytest

from k8s.objects.kustomize import build
from tests.k8s.objects.test_kustomize import ROOT

from .place import Place, Reports, wait_until
from .test_training import TIMEOUT_SECONDS, claim

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("nodes")]

ROWS = 4000
SELECTOR = "app.kubernetes.io/component=prediction"
SEED = """
import importlib.util, pathlib, shutil
print("reads tables" if importlib.util.find_spec("pyarrow") else "")
for file in pathlib.Path("/given").glob("[!.]*"):
    target = pathlib.Path("/data", *file.name.split("__"))
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)
"""


def test_shards_of_a_job_are_joined(place: Place, reports: Reports) -> None:
    image = os.environ.get("PIPE_TEST_TRAIN_IMAGE")
    if not image:
        pytest.skip("needs PIPE_TEST_TRAIN_IMAGE, the image of the example `starter`")
    [job] = build(ROOT / "predict")
    job["metadata"]["namespace"] = place.namespace
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container |= {"image": image, "resources": {}}
    container["command"] = [word.replace(".parquet", ".jsonl") for word in container["command"]]
    pod["volumes"][0]["persistentVolumeClaim"]["claimName"] = "runs"

    def run(name: str, program: str) -> str:
        """Run a program in a pod of the Job's kind, and return what it prints."""
        place.create("pods", {
            "metadata": {"name": name},
            "spec": {
                **pod,
                "containers": [{**container, "command": ["python", "-c", program], "volumeMounts": [
                    *container["volumeMounts"], {"name": "given", "mountPath": "/given"},
                ]}],
                "volumes": [*pod["volumes"], {"name": "given", "configMap": {"name": "given"}}],
            },
        })  # fmt: skip
        path = f"/api/v1/namespaces/{place.namespace}/pods/{name}"
        wait_until(lambda: place.request("GET", path).json()["status"]["phase"] == "Succeeded", name, TIMEOUT_SECONDS)
        return place.request("GET", f"{path}/log").body.decode()

    rows = b"".join(b"[%d,0.5]\n" % number for number in range(ROWS))
    bundle = place.bundles["stable"]
    files = {f"bundle__{file.name}": file.read_bytes() for file in bundle.path.iterdir()} | {"rows.jsonl": rows}
    binary = {name: base64.b64encode(content).decode() for name, content in files.items()}
    place.create("configmaps", {"metadata": {"name": "given"}, "binaryData": binary})
    place.cluster.apply([claim(place.namespace)], reports)
    if "reads tables" not in run("seed", SEED):
        pytest.skip("the image in PIPE_TEST_TRAIN_IMAGE has no pyarrow; build it with pipe-road[data]")

    place.cluster.apply([job], reports)

    def status() -> dict[str, Any]:
        live = place.cluster.read(job)
        assert live is not None
        failed = any(condition["type"] == "Failed" for condition in live["status"].get("conditions", ()))
        names = [pod["metadata"]["name"] for pod in place.pods(SELECTOR)]
        assert not failed, [
            place.request("GET", f"/api/v1/namespaces/{place.namespace}/pods/{name}/log").body for name in names
        ]
        return dict(live["status"])

    wait_until(lambda: bool(place.pods(SELECTOR)), "a pod", TIMEOUT_SECONDS)
    place.delete_pod(place.pods(SELECTOR)[0]["metadata"]["name"], 0)
    wait_until(lambda: status().get("succeeded") == 4, "the shards", TIMEOUT_SECONDS)
    lines = run("read", "print(open('/data/answers.jsonl').read())").split("\n")
    assert [orjson.loads(line) for line in lines if line] == [[2 * number, 1.0] for number in range(ROWS)]
