from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import k8s
from k8s.objects.kustomize import apply_json_patch, apply_merge_patch, build

ROOT = Path(k8s.__file__).parent / "manifests"
FOLDERS = sorted(
    path.parent.relative_to(ROOT) for path in ROOT.rglob("kustomization.yaml") if "components" not in path.parts
)
POD = {
    "kind": "Pod",
    "metadata": {"name": "one"},
    "spec": {"containers": [{"image": "model:1"}], "initContainers": [{"image": "r:5000/model@sha256:0"}]},
}


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
    return folder


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed: nothing to compare with")
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_our_folders_build_as_with_kubectl(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(ROOT / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)}
    assert {(item["kind"], item["metadata"]["name"]): item for item in build(ROOT / folder)} == theirs


def test_a_merge_adds_changes_and_removes() -> None:
    assert apply_merge_patch({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4, "c": None, "e": 5}}) == {
        "a": {"b": 4, "e": 5},
        "d": 3,
    }


def test_merging_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="tolerations: a list in a merge patch"):
        apply_merge_patch({}, {"spec": {"tolerations": []}})


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ({"op": "add", "path": "/a/-", "value": 3}, {"a": [1, 2, 3], "b/c": {}}),
        ({"op": "add", "path": "/a/0", "value": 0}, {"a": [0, 1, 2], "b/c": {}}),
        ({"op": "replace", "path": "/a/1", "value": 5}, {"a": [1, 5], "b/c": {}}),
        ({"op": "remove", "path": "/a/0"}, {"a": [2], "b/c": {}}),
        ({"op": "add", "path": "/b~1c/x~0y", "value": 1}, {"a": [1, 2], "b/c": {"x~y": 1}}),
        ({"op": "remove", "path": "/b~1c"}, {"a": [1, 2]}),
    ],
)
def test_json_patches_follow_rfc_6902(operation: dict[str, Any], result: dict[str, Any]) -> None:
    given: dict[str, Any] = {"a": [1, 2], "b/c": {}}
    assert apply_json_patch(given, [operation]) == result
    assert given == {"a": [1, 2], "b/c": {}}


@pytest.mark.parametrize("kind", ["replace", "remove"])
def test_a_json_patch_of_a_missing_path_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} /spec/x: the path does not exist"):
        apply_json_patch({"spec": {}}, [{"op": kind, "path": "/spec/x", "value": 1}])


def test_images_are_replaced_in_all_containers(tmp_path: Path) -> None:
    images = [
        {"name": "model", "newTag": "2"},
        {"name": "r:5000/model", "newName": "elsewhere/model", "digest": "sha256:1"},
    ]
    write(tmp_path, pod=POD, kustomization={"resources": ["pod.yaml"], "images": images})
    (item,) = build(tmp_path)
    assert item["spec"]["containers"][0]["image"] == "model:2"
    assert item["spec"]["initContainers"][0]["image"] == "elsewhere/model@sha256:1"


def test_components_apply_before_the_folders_own_patches(tmp_path: Path) -> None:
    def patch(value: str) -> list[dict[str, str]]:
        operation = [{"op": "add", "path": "/metadata/labels", "value": {"from": value}}]
        return [{"target": {"kind": "Pod"}, "patch": yaml.safe_dump(operation)}]  # type: ignore[dict-item]

    write(tmp_path / "base", pod=POD, kustomization={"resources": ["pod.yaml"]})
    write(tmp_path / "part", kustomization={"kind": "Component", "patches": patch("part")})
    own = {"resources": ["../base"], "components": ["../part"], "patches": patch("own")}
    write(tmp_path / "top", kustomization=own)
    assert build(tmp_path / "top")[0]["metadata"]["labels"] == {"from": "own"}
    assert build(tmp_path / "base", [tmp_path / "part"])[0]["metadata"]["labels"] == {"from": "part"}


def test_an_unsupported_field_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, kustomization={"resources": [], "namePrefix": "x-"})
    with pytest.raises(ValueError, match="namePrefix: not supported here"):
        build(tmp_path)


def test_a_patch_without_a_target_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, kustomization={"patches": [{"target": {"kind": "Job"}, "patch": "[]"}]})
    with pytest.raises(ValueError, match="no object for a patch"):
        build(tmp_path)
