"""Rendered files have the same bytes wherever, whenever and by whichever process they are written, as GitOps needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.contract.bundle import Bundle
from pipeline.history import example_folder
from pipeline.system.files import digest_tree
from pipeline.system.sources import SOURCE_ROOT

IMAGE = "registry.example/digits@sha256:" + "1" * 64
STORAGE = "oci://registry.example/digits-modelcar@sha256:" + "2" * 64
DEPLOY = {
    "namespace": "models", "gpus": 1, "hostname": "digits.example", "ingress_class": "nginx",
    "clients": ["shop", "office"], "egress": ["10.0.0.0/8:4318", "10.0.0.1/32:53"],
    "environment": {"OTEL_SERVICE_NAME": "digits", "DEADLINE_SECONDS": 2, "BATCH_ROWS": 4},
    "node_selector": {"pool": "gpus", "disk": "ssd"}, "tolerations": ["pool=gpus:NoSchedule", "spot:NoExecute"],
}  # fmt: skip
KSERVE: dict[str, Any] = {name: DEPLOY[name] for name in ("namespace", "environment", "node_selector", "tolerations")}
SECTIONS: list[dict[str, Any]] = [
    {"deploy": {**DEPLOY, "target": "kubernetes"}, "cluster": {"workload": "job"}},
    {"deploy": {**KSERVE, "target": "kserve", "storage_uri": STORAGE}, "cluster": {"workload": "jobset"}},
    {"deploy": {**KSERVE, "target": "kubernetes"}, "cluster": {"workload": "trainjob"}},
]
RENDER = """
import sys
from pathlib import Path
from k8s.objects.manifests import write_manifests
from k8s.objects.serving import serving_objects
from pipeline.executors.cluster import render_training, render_workflow
from pipeline.contract.bundle import open_bundle
from pipeline.history import find_project

bundle, image, target = open_bundle(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
project = find_project(Path("."))
config = project.config([f"train.image={image}", "package.builder=none"])
write_manifests(serving_objects(config, bundle, image), target / "service")
render_training(project, config, str(target / "training"))
if config.deploy.target == "kserve":
    render_workflow(project, config, "argo", str(target / "argo"))
    render_workflow(project, config, "kfp", str(target / "kfp"))
"""


def in_order(value: Any, order: Callable[[list[Any]], Any]) -> Any:
    """Return the mappings in a value with their keys in another order."""
    if isinstance(value, list):
        return [in_order(item, order) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: in_order(value[name], order) for name in order(list(value))}


def render(folder: Path, values: dict[str, Any], bundle: Path, **environment: str) -> dict[str, str]:
    """Render everything in a new process, from a project in its own folder; return the digests of the files."""
    shutil.copytree(example_folder("starter"), folder / "project", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "project" / "pipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    shutil.copytree(bundle, folder / "bundle")
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(folder / "bundle"), IMAGE, str(folder / "rendered")],
        cwd=folder / "project",
        env={**os.environ, "PYTHONPATH": str(SOURCE_ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return digest_tree(folder / "rendered")


@pytest.mark.parametrize("sections", SECTIONS, ids=lambda sections: sections["deploy"]["target"])
def test_a_rendering_depends_on_nothing_but_its_content(
    sections: dict[str, Any], bundle: Bundle, tmp_path: Path
) -> None:
    values = {**yaml.safe_load((example_folder("starter") / "pipe.yaml").read_text()), **sections}
    first = render(tmp_path / "a", in_order(values, sorted), bundle.path, PYTHONHASHSEED="0", TZ="UTC", LANG="C")
    reverse = in_order(values, lambda names: sorted(names, reverse=True))
    other = tmp_path / "another" / "place"
    second = render(other, reverse, bundle.path, PYTHONHASHSEED="4242", TZ="Asia/Tokyo", LANG="de_DE.UTF-8")
    assert second == first
    assert len(first) > 8
