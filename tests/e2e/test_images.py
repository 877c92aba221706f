from __future__ import annotations

import json

from k8s.images.oci_layout import Layout
from pipeline.contract.run import Run

from .project_folder import ProjectFolder


def test_modelcar_is_made_from_an_existing_bundle_only(copied: ProjectFolder) -> None:
    before = copied.latest
    record = json.loads(copied.pipe("package", "--modelcar", "-o", "json").stdout)
    run = Run(copied.runs / record["run"])
    assert {name: step.reused_from for name, step in run.read().steps.items()} == {
        "check": before.id,
        "prepare": before.id,
        "train": before.id,
        "evaluate": before.id,
        "export": before.id,
        "package": "",
    }
    assert record["bundle"] == before.bundle().digest
    layout = Layout(run.output("package") / "modelcar")
    assert len(layout.read(record["modelcar"]["digest"])["manifests"]) == 2
    copied.pipe("verify", run.id)


def test_conflicting_options_of_package_are_refused(copied: ProjectFolder) -> None:
    assert "made from a bundle" in copied.pipe("package", "--train", "--modelcar", expect=2).stderr
    assert "takes only overrides" in copied.pipe("package", "train", expect=2).stderr
    assert "names no registry" in copied.pipe("package", "--push", "--train", expect=2).stderr


def test_training_image_without_a_builder_writes_its_context(copied: ProjectFolder) -> None:
    record = json.loads(copied.pipe("package", "--train", "-o", "json").stdout)
    folder = copied.runs / "images" / f"train-{record['context'][:12]}"
    assert sorted(path.name for path in (folder / "context" / "project").iterdir()) == [
        "codec.py", "pipe.yaml", "points.py", "task.py",
    ]  # fmt: skip
    assert record["reason"] == "package.builder is none"
