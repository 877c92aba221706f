from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s import render, serving
from pipeline.spec.bundle import Bundle
from pipeline.spec.digest import digest_tree

from .conftest import Configure


def test_rendering_twice_gives_the_same_bytes(tmp_path: Path, configure: Configure, bundle: Bundle) -> None:
    objects = serving.objects(configure(), bundle, "twice:1")
    render.write(objects, tmp_path / "a")
    render.write(reversed(objects), tmp_path / "b")
    assert digest_tree(tmp_path / "a") == digest_tree(tmp_path / "b")


def test_each_object_is_one_file_and_the_kustomization_lists_them(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    objects = serving.objects(configure(), bundle, "twice:1")
    files = render.write(objects, tmp_path)
    assert files == sorted(tmp_path.iterdir())
    listed = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["resources"]
    found = [yaml.safe_load((tmp_path / name).read_text()) for name in listed]
    assert sorted(item["kind"] for item in found) == sorted(item["kind"] for item in objects)
    assert all(item in objects for item in found)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_what_was_rendered(tmp_path: Path, configure: Configure, bundle: Bundle) -> None:
    objects = serving.objects(configure(), bundle, "twice:1")
    render.write(objects, tmp_path)
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    names = [(item["kind"], item["metadata"]["namespace"]) for item in yaml.safe_load_all(built.stdout)]
    assert sorted(names) == sorted((item["kind"], "default") for item in objects)
