from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from k8s.images.modelcar import ARCHITECTURES, ModelcarBase, write_modelcar
from k8s.images.oci_layout import INDEX, LAYER, Layout
from k8s.images.registry import Repository, parse_reference
from pipeline.contract.bundle import Bundle, open_bundle, write_manifest
from pipeline.system.errors import ConfigError, StageError
from pipeline.system.files import digest_tree

from ..registry_server import RegistryServer


@pytest.fixture
def made(bundle: Bundle, tmp_path: Path) -> tuple[Layout, dict[str, Any]]:
    index = write_modelcar(bundle, tmp_path / "car", "twice:1")
    layout = Layout(tmp_path / "car")
    return layout, layout.read(index.digest)


def layer_of(layout: Layout, index: dict[str, Any]) -> Path:
    manifest = layout.read(index["manifests"][0]["digest"])
    return layout.file(manifest["layers"][-1]["digest"])


def test_a_modelcar_has_no_times_and_owners(made: tuple[Layout, dict[str, Any]]) -> None:
    with tarfile.open(layer_of(*made)) as tar:
        entries = tar.getmembers()
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname) for entry in entries} == {(0, 0, 0, "", "")}
    assert {entry.mode for entry in entries if entry.isfile()} == {0o644}
    assert {entry.mode for entry in entries if entry.isdir()} == {0o755}
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)


def test_the_same_bundle_gives_the_same_modelcar(
    made: tuple[Layout, dict[str, Any]], bundle: Bundle, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir(mode=0o700)
    for file in sorted(bundle.path.iterdir(), reverse=True):
        shutil.copyfile(file, copy / file.name)
        (copy / file.name).chmod(0o600)
        os.utime(copy / file.name, (1, 1))
    write_modelcar(open_bundle(copy), tmp_path / "again", "twice:1")
    assert digest_tree(tmp_path / "again") == digest_tree(made[0].path)


def test_every_blob_has_its_digest_and_size(made: tuple[Layout, dict[str, Any]]) -> None:
    layout, index = made
    waiting, seen = list(index["manifests"]), set()
    while waiting:
        entry = waiting.pop()
        content = layout.file(entry["digest"]).read_bytes()
        seen.add(entry["digest"])
        assert (f"sha256:{hashlib.sha256(content).hexdigest()}", len(content)) == (entry["digest"], entry["size"])
        if "manifest" in entry["mediaType"]:
            body = json.loads(content)
            waiting += [body["config"], *body["layers"]]
            config = layout.read(body["config"]["digest"])
            assert config["rootfs"]["diff_ids"] == [body["layers"][0]["digest"]], "nothing is compressed"
    assert len(list((layout.path / "blobs" / "sha256").iterdir())) == len(seen) + 1  # and the index itself


def test_a_modelcar_has_an_image_for_each_architecture(made: tuple[Layout, dict[str, Any]], bundle: Bundle) -> None:
    layout, index = made
    assert tuple(entry["platform"]["architecture"] for entry in index["manifests"]) == ARCHITECTURES
    named = [index, *(layout.read(entry["digest"]) for entry in index["manifests"])]
    assert {body["annotations"]["pipe-road.bundle"] for body in named} == {bundle.digest}
    entry = json.loads((layout.path / "index.json").read_text())["manifests"][0]
    assert (entry["mediaType"], layout.read(entry["digest"])) == (INDEX, index)


DOCKER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def put_base(registry: RegistryServer, architecture: str) -> str:
    """Push an image with a mocked shell, in docker's format; return its digest."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("bin/sh")
        tar.addfile(entry)
    layer = gzip.compress(buffer.getvalue(), mtime=0)
    diff_id = f"sha256:{hashlib.sha256(buffer.getvalue()).hexdigest()}"
    config = json.dumps({"architecture": architecture, "rootfs": {"diff_ids": [diff_id]}}).encode()
    parts = [{"mediaType": DOCKER, "digest": put(registry, layer), "size": len(layer)}]
    manifest = json.dumps({"config": {"digest": put(registry, config)}, "layers": parts}).encode()
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    registry.manifests[digest] = ("application/vnd.docker.distribution.manifest.v2+json", manifest)
    return digest


def put(registry: RegistryServer, content: bytes) -> str:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    registry.blobs[digest] = content
    return digest


def base_of(registry: RegistryServer, digest: str) -> ModelcarBase:
    reference = parse_reference(f"{registry.host}/shell@{digest}")
    return ModelcarBase(reference, Repository(reference, None))


def test_a_base_gives_a_modelcar_its_shell(registry: RegistryServer, bundle: Bundle, tmp_path: Path) -> None:
    digest = put_base(registry, "amd64")
    index = write_modelcar(bundle, tmp_path / "car", "twice:1", base_of(registry, digest))
    layout = Layout(tmp_path / "car")
    (entry,) = layout.read(index.digest)["manifests"]
    assert entry["platform"]["architecture"] == "amd64", "there is no shell for others"
    below, data = layout.read(entry["digest"])["layers"]
    assert below["mediaType"] == f"{LAYER}+gzip"
    with tarfile.open(layout.file(below["digest"])) as tar:
        assert tar.getnames() == ["bin/sh"]
    assert data["mediaType"] == LAYER


def test_a_base_with_several_architectures_is_used_for_each(
    registry: RegistryServer, bundle: Bundle, tmp_path: Path
) -> None:
    entries = [
        {"digest": put_base(registry, name), "platform": {"os": "linux", "architecture": name}}
        for name in ("arm64", "s390x", "amd64")
    ]
    body = json.dumps({"manifests": entries}).encode()
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    registry.manifests[digest] = (INDEX, body)
    index = write_modelcar(bundle, tmp_path / "car", "twice:1", base_of(registry, digest))
    assert len(Layout(tmp_path / "car").read(index.digest)["manifests"]) == 2


def test_a_base_for_other_processors_is_refused(registry: RegistryServer, bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="has no image for amd64 or arm64"):
        write_modelcar(bundle, tmp_path / "car", "twice:1", base_of(registry, put_base(registry, "s390x")))


def test_a_base_by_tag_is_refused() -> None:
    reference = parse_reference("r.example/shell:1")
    with pytest.raises(ConfigError, match="name it by digest"):
        ModelcarBase(reference, Repository(reference, None))


def test_subfolders_of_the_bundle_are_included(bundle: Bundle, tmp_path: Path) -> None:
    fed = tmp_path / "fed"
    shutil.copytree(bundle.path, fed)
    (fed / "files" / "words").mkdir(parents=True)
    (fed / "files" / "words" / "list.txt").write_text("one two")
    write_manifest(fed, bundle.name, "pass", bundle.manifest.ancestors)
    layout = Layout(tmp_path / "car")
    index = write_modelcar(open_bundle(fed), tmp_path / "car", "fed:1")
    with tarfile.open(layer_of(layout, layout.read(index.digest))) as tar:
        tar.extractall(tmp_path / "root", filter="data")
    assert open_bundle(tmp_path / "root" / "models").digest == open_bundle(fed).digest
