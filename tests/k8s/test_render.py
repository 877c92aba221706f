from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s import render, serving
from k8s.kustomize import build
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


def test_what_is_made_no_more_is_taken_away_and_nothing_else(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    render.write(serving.objects(configure({"expose": "ingress"}), bundle, "twice:1"), tmp_path)
    (tmp_path / "own.yaml").write_text("kind: Own\n")
    assert (tmp_path / "ingress-twice.yaml").exists()
    files = render.write(serving.objects(configure(), bundle, "twice:1"), tmp_path)
    assert not (tmp_path / "ingress-twice.yaml").exists()
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "own.yaml"])


def test_a_rendered_folder_is_built_to_exactly_what_would_be_applied(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    objects = serving.objects(configure({"expose": "gateway", "gateway": "edge", "gpus": 1}), bundle, "twice:1")
    render.write(objects, tmp_path)
    by_kind = {item["kind"]: item for item in objects}
    assert {item["kind"]: item for item in build(tmp_path)} == by_kind


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_what_was_rendered(tmp_path: Path, configure: Configure, bundle: Bundle) -> None:
    objects = serving.objects(configure(), bundle, "twice:1")
    render.write(objects, tmp_path)
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    names = [(item["kind"], item["metadata"]["namespace"]) for item in yaml.safe_load_all(built.stdout)]
    assert sorted(names) == sorted((item["kind"], "default") for item in objects)
