from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.run import all_runs
from pipeline.system.files import digest_file
from tests.ports import free_port

from .project_folder import ProjectFolder, environment


@pytest.fixture
def bundle(copied: ProjectFolder) -> Path:
    """A bundle in which one initializer was edited."""
    path = copied.latest.bundle_path
    model = onnx.load(path / "model.onnx")
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 1, weight.name))
    onnx.save(model, path / "model.onnx")
    return path


def serve(bundle: Path) -> subprocess.CompletedProcess[str]:
    """Run the server until it ends; it must refuse the bundle, or it would exceed the timeout."""
    command = [sys.executable, "-m", "serve", str(bundle), "--port", str(free_port())]
    return subprocess.run(command, env=environment({}), capture_output=True, text=True, timeout=300, check=False)


def seal_anew(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    ancestors = Ancestors(**{**manifest["ancestors"], "onnx": digest_file(bundle / "model.onnx")})
    write_manifest(bundle, manifest["name"], manifest["verdict"], ancestors)


def test_an_edited_weight_is_refused_by_verify_and_by_the_server(copied: ProjectFolder, bundle: Path) -> None:
    assert "model.onnx: content changed since export" in copied.pipe("verify", str(bundle), expect=2).stderr
    assert "bundle/model.onnx: changed since the step was done" in copied.pipe("verify", expect=2).stderr
    refused = serve(bundle)
    assert (refused.returncode, refused.stderr.count("Traceback")) == (2, 0)
    assert "model.onnx: content changed since export" in refused.stderr


def test_resealed_bundle_is_refused_too(copied: ProjectFolder, bundle: Path) -> None:
    """The provenance has to be removed, and even then the golden answers differ."""
    seal_anew(bundle)
    assert "provenance.json: is about another bundle" in copied.pipe("verify", str(bundle), expect=2).stderr
    (bundle / "provenance.json").unlink()
    assert "the model does not answer as it did at export" in copied.pipe("verify", str(bundle), expect=2).stderr
    assert "changed since the step was done" in copied.pipe("verify", expect=2).stderr
    refused = serve(bundle)
    assert refused.returncode == 2
    assert "the model does not answer as it did at export" in refused.stderr


def test_a_tampered_bundle_is_not_deployed(copied: ProjectFolder, bundle: Path) -> None:
    known = len(all_runs(copied.runs))
    output = copied.pipe("deploy", expect=2).stderr
    assert "export/bundle/model.onnx changed on disk; it must not be deployed" in output
    assert len(all_runs(copied.runs)) == known
