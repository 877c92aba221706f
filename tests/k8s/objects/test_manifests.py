from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s.objects import manifests, serving
from k8s.objects.kustomize import build
from k8s.objects.manifests import MAX_JOB_NAME, MAX_JOBSET_NAME, MAX_LABEL, check_image, check_pinned, fit_name
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_tree

from ..conftest import Configure

DIGEST = f"@sha256:{'a' * 64}"


@pytest.mark.parametrize(
    "image", [f"a{DIGEST}", f"r.example:5000/team/a{DIGEST}", f"a:latest{DIGEST}", "127.0.0.1:5000/a:0123456789ab"]
)
def test_images_pinned_by_digest_are_accepted(image: str) -> None:
    check_image(image)
    check_pinned(image, "deploy.image")


@pytest.mark.parametrize("image", ["a:1", "r.example:5000/a:2026-01-01", "a:0123456789abc", "a:0123456789AB"])
def test_a_movable_tag_is_refused_naming_the_setting(image: str) -> None:
    check_image(image)
    with pytest.raises(ConfigError, match=r"^deploy\.image: .*pipe package --push"):
        check_pinned(image, "deploy.image")


@pytest.mark.parametrize("image", ["a", "a:latest", "r.example:5000/a", "r.example/a:latest"])
def test_the_tag_latest_is_refused(image: str) -> None:
    for check in (check_image, lambda name: check_pinned(name, "deploy.image")):
        with pytest.raises(ConfigError, match="another image every day"):
            check(image)


@pytest.mark.parametrize("image", ["", "A:1", "a b:1", "a:1\n", "a@sha256:12", f"a{DIGEST}0"])
def test_an_invalid_image_name_is_refused(image: str) -> None:
    with pytest.raises(ConfigError, match="not a container image name"):
        check_image(image)


LABEL_FORM = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


@pytest.mark.parametrize(
    ("text", "limit", "name"),
    [
        ("digits", MAX_LABEL, "digits"),
        ("a", MAX_LABEL, "a"),
        ("a" * 63, MAX_LABEL, "a" * 63),
        ("a" * 64, MAX_LABEL, f"{'a' * 54}-ffe054fe"),
        ("a" * 52, MAX_JOB_NAME, "a" * 52),
        ("a" * 53, MAX_JOB_NAME, f"{'a' * 43}-abe346a7"),
        ("a" * 45, MAX_JOBSET_NAME, "a" * 45),
        ("Digits", MAX_LABEL, "digits-"),
        ("my_model", MAX_LABEL, "my-model-"),
        ("my--model", MAX_LABEL, "my-model-"),
        ("7b", MAX_LABEL, "x-7b-"),
        ("-a-", MAX_LABEL, "a-"),
        ("größe", MAX_LABEL, "gr-e-"),
        ("…", MAX_LABEL, "x-"),
        ("", MAX_LABEL, "x-"),
    ],
)
def test_valid_name_is_kept_and_any_other_gets_a_hash(text: str, limit: int, name: str) -> None:
    made = fit_name(text, limit)
    assert made == name or (name.endswith("-") and re.fullmatch(re.escape(name) + "[0-9a-f]{8}", made))


@pytest.mark.parametrize("limit", [MAX_LABEL, MAX_JOB_NAME, MAX_JOBSET_NAME])
@pytest.mark.parametrize("text", ["", "-", "9", "a" * 200, "A" * 200, "a-" * 40, "x" * 40 + "." * 30, "ü" * 70, "a/b"])
def test_any_name_becomes_a_valid_label(text: str, limit: int) -> None:
    name = fit_name(text, limit)
    assert LABEL_FORM.match(name)
    assert len(name) <= limit
    assert fit_name(name, limit) == name


def test_different_texts_get_different_names() -> None:
    texts = ["a_b", "a-b", "a.b", "A-b", "a--b", "a" * 64, "a" * 65, "", "-"]
    assert len({fit_name(text) for text in texts}) == len(texts)


def test_rendering_twice_gives_the_same_bytes(tmp_path: Path, configure: Configure, bundle: Bundle) -> None:
    objects = serving.serving_objects(configure(), bundle, "twice:1")
    manifests.write_manifests(objects, tmp_path / "a")
    manifests.write_manifests(reversed(objects), tmp_path / "b")
    assert digest_tree(tmp_path / "a") == digest_tree(tmp_path / "b")


def test_each_object_is_one_file_and_the_kustomization_lists_them(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    objects = serving.serving_objects(configure(), bundle, "twice:1")
    files = manifests.write_manifests(objects, tmp_path)
    assert files == sorted(tmp_path.iterdir())
    listed = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())["resources"]
    found = [yaml.safe_load((tmp_path / name).read_text()) for name in listed]
    assert sorted(item["kind"] for item in found) == sorted(item["kind"] for item in objects)
    assert all(item in objects for item in found)


def test_rendering_removes_only_files_of_the_last_rendering(
    tmp_path: Path, configure: Configure, bundle: Bundle
) -> None:
    manifests.write_manifests(
        serving.serving_objects(configure({"ingress_class": "default"}), bundle, "twice:1"), tmp_path
    )
    (tmp_path / "own.yaml").write_text("kind: Own\n")
    assert (tmp_path / "ingress-twice.yaml").exists()
    files = manifests.write_manifests(serving.serving_objects(configure(), bundle, "twice:1"), tmp_path)
    assert not (tmp_path / "ingress-twice.yaml").exists()
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "own.yaml"])


def test_rendering_removes_no_file_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("kind: Own\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kustomization.yaml").write_text("resources: [../own.yaml]\n")
    manifests.write_manifests([], tmp_path / "out")
    assert (tmp_path / "own.yaml").exists()


def test_a_rendered_folder_builds_to_the_applied_objects(tmp_path: Path, configure: Configure, bundle: Bundle) -> None:
    objects = serving.serving_objects(configure({"gateway": "edge", "gpus": 1}), bundle, "twice:1")
    manifests.write_manifests(objects, tmp_path)
    by_kind = {item["kind"]: item for item in objects}
    assert {item["kind"]: item for item in build(tmp_path)} == by_kind


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_what_was_rendered(tmp_path: Path, configure: Configure, bundle: Bundle) -> None:
    objects = serving.serving_objects(configure(), bundle, "twice:1")
    manifests.write_manifests(objects, tmp_path)
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    names = [(item["kind"], item["metadata"]["namespace"]) for item in yaml.safe_load_all(built.stdout)]
    assert sorted(names) == sorted((item["kind"], "default") for item in objects)
