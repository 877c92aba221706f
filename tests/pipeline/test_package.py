from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pipeline import package
from pipeline.spec.bundle import Ancestors, open_bundle, write_manifest
from pipeline.spec.digest import digest_file, digest_mapping, digest_tree
from pipeline.spec.errors import BundleError, ConfigError, GateError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.golden import Golden
from pipeline.spec.run import Run, RunFile
from pipeline.spec.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.spec.sources import HOUSE

MakeRun = Callable[..., Run]
DIGEST = "5" * 64

# A builder that answers `info`, keeps its arguments, and leaves an image id as the real ones do.
WORKING = f"""#!/bin/sh
[ "$1" = info ] && exit 0
echo "$0 $*" > "$(dirname "$0")/called"
echo "building from $PIP_INDEX_URL"
while [ $# -gt 0 ]; do [ "$1" = --iidfile ] && printf %s sha256:{DIGEST} > "$2"; shift; done
"""
FAILING = """#!/bin/sh
[ "$1" = info ] && exit 0
echo "Step 4: RUN pip"
echo "no space left on device"
exit 3
"""
NO_DAEMON = """#!/bin/sh
echo "Cannot connect to the daemon" >&2
exit 1
"""


def write_bundle(directory: Path, verdict: str) -> None:
    """A model that doubles its input."""
    directory.mkdir(parents=True)
    row = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", row[:1], row[1:])
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), directory / "model.onnx")
    spec = {name: TensorSpec(name=name, datatype="FP32", shape=("batch", 2)) for name in ("x", "y")}
    limits, runtime = Limits(max_batch_size=8, max_body_bytes=1024), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(spec["x"],), outputs=(spec["y"],), codec="C", limits=limits, runtime=runtime)
    write_json(directory / "signature.json", signature.model_dump())
    x = np.ones((1, 2), np.float32)
    Golden({"x": x}, {"y": 2 * x}, [], [], rtol=1e-3, atol=1e-4).write(directory)
    (directory / "codec.py").write_text("class C: ...\n")
    (directory / "card.md").write_text("# twice\n")
    digest = digest_file(directory / "model.onnx")
    write_manifest(directory, "twice", verdict, Ancestors(code="a", data="b", checkpoint="c", verdict="d", onnx=digest))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "first", verdict: str = "pass", **sections: dict[str, Any]) -> Run:
        run = Run(tmp_path / "runs" / name)
        write_bundle(run.bundle_path, verdict)
        config = {"name": "twice", "task": "task.py:T", "codec": "codec.py:C", **sections}
        file = RunFile(id=name, created="2026-01-01", wanted=("package",), config=config, environment={})
        write_json(run.path / "run.json", file.model_dump())
        run.partial("package").mkdir()
        return run

    return make


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts these programs on a PATH where no other builder is."""

    def put(**scripts: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in ("sh", "dirname"):
            found = next(path for place in ("/bin", "/usr/bin") if (path := Path(place, tool)).exists())
            (folder / tool).symlink_to(found)
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return folder

    return put


def pack(run: Run) -> dict[str, Any]:
    package.package(run, run.path)
    record: dict[str, Any] = json.loads((run.partial("package") / "image.json").read_text())
    return record


def context_of(run: Run) -> Path:
    return run.partial("package") / "context"


NEVER = {"build": "never"}


def test_the_context_is_complete_and_its_digest_is_on_record(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    record = pack(run)
    context = context_of(run)
    assert sorted(path.name for path in context.iterdir()) == [
        ".dockerignore",
        "Dockerfile",
        "app",
        "bundle",
        "requirements.txt",
    ]
    assert record == {
        "image": f"twice:{run.bundle().digest[:12]}",
        "bundle": run.bundle().digest,
        "context": digest_mapping(digest_tree(context)),
        "base": "python:3.11-slim",
        "builder": None,
        "image_digest": None,
        "reason": "package.build is never",
    }
    assert open_bundle(context / "bundle").digest == run.bundle().digest


def test_the_same_bundle_gives_the_same_context_whatever_the_umask(make_run: MakeRun) -> None:
    first = pack(make_run("first", package=NEVER))
    old = os.umask(0o077)
    try:
        run = make_run("second", package=NEVER)
        second = pack(run)
    finally:
        os.umask(old)
    assert first == second
    modes = {path.stat().st_mode & 0o777 for path in context_of(run).rglob("*") if path.is_file()}
    assert modes == {0o644}
    assert {path.stat().st_mode & 0o777 for path in context_of(run).rglob("*") if path.is_dir()} == {0o755}


def test_requirements_are_pinned_and_without_torch(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    pack(run)
    lines = (context_of(run) / "requirements.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines]
    assert all(line.count("==") == 1 and line.partition("==")[2] for line in lines)
    assert names == sorted(set(names))
    assert {"kserve", "numpy", "onnxruntime-gpu", "pydantic", "psutil", "uvloop"} <= set(names)
    assert not {"torch", "onnx", "safetensors", "pipe-road"} & set(names)


def test_the_dockerfile_names_base_and_bundle_and_runs_as_nobody_in_particular(make_run: MakeRun) -> None:
    run = make_run(package={**NEVER, "base": "registry.example/python:3.12-slim"})
    pack(run)
    lines = (context_of(run) / "Dockerfile").read_text().splitlines()
    assert lines.count("ARG BASE=registry.example/python:3.12-slim") == 2
    assert f"ARG BUNDLE={run.bundle().digest}" in lines
    assert "USER 10001:10001" in lines
    assert not [line for line in lines if "unbuilt" in line]


def test_the_context_holds_no_compiled_files(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    pack(run)
    assert not [path for path in context_of(run).rglob("*") if path.suffix == ".pyc" or path.name == "__pycache__"]


def test_the_packed_source_alone_can_start_the_server(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    pack(run)
    app = context_of(run) / "app"
    env = {**os.environ, "PYTHONPATH": str(app), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "serve", "--help"], env=env, cwd=run.path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--grpc-port" in done.stdout


def test_a_base_that_could_smuggle_in_a_line_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"package\.base"):
        pack(make_run(package={**NEVER, "base": "python:3.11\nRUN true"}))


def test_an_image_name_with_a_tag_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match="has a tag"):
        pack(make_run(package={**NEVER, "image": "r.example:5000/twice:1"}))


def test_an_image_name_with_a_registry_gets_the_bundle_as_tag(make_run: MakeRun) -> None:
    run = make_run(package={**NEVER, "image": "r.example:5000/twice"})
    assert pack(run)["image"] == f"r.example:5000/twice:{run.bundle().digest[:12]}"


@pytest.mark.parametrize("verdict", ["pass", "no-baseline", "forced", "forced (demo on Friday)"])
def test_an_accepted_verdict_is_packaged(verdict: str, make_run: MakeRun) -> None:
    assert pack(make_run(verdict=verdict, package=NEVER))["image"]


@pytest.mark.parametrize("verdict", ["fail", "", "passed"])
def test_any_other_verdict_is_refused(verdict: str, make_run: MakeRun) -> None:
    with pytest.raises(GateError, match="its verdict is"):
        pack(make_run(verdict=verdict, package=NEVER))


def test_a_tampered_bundle_is_refused(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    with (run.bundle_path / "model.onnx").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(BundleError, match="content changed"):
        pack(run)


def test_without_a_builder_it_says_who_was_looked_for_and_how_to_build_by_hand(
    make_run: MakeRun, builders: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    builders(docker=NO_DAEMON)
    run = make_run()
    record = pack(run)
    assert record["builder"] is None
    assert record["reason"] == (
        "no container builder works: docker is installed but its daemon does not answer "
        "(Cannot connect to the daemon); podman is not installed; buildah is not installed"
    )
    out = capsys.readouterr().out
    assert f"docker build --tag {record['image']} {run.output('package') / 'context'}" in out


def test_a_required_build_without_a_builder_stops_the_road(make_run: MakeRun, builders: Callable[..., Path]) -> None:
    builders()
    with pytest.raises(StageError, match="podman is not installed"):
        pack(make_run(package={"build": "require", "builder": "podman"}))


def test_the_first_builder_that_answers_builds_the_image(make_run: MakeRun, builders: Callable[..., Path]) -> None:
    builders(docker=NO_DAEMON, podman=WORKING)
    record = pack(make_run())
    assert (record["builder"], record["image_digest"], record["reason"]) == ("podman", f"sha256:{DIGEST}", "")


def test_the_index_is_passed_by_name_and_written_nowhere(
    make_run: MakeRun,
    builders: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = builders(buildah=WORKING)
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@index.example/simple")
    run = make_run()
    pack(run)
    called = (folder / "called").read_text()
    assert "--build-arg PIP_INDEX_URL " in called
    assert "secret" not in called
    assert (
        "building from https://user:secret@index.example/simple" in capfd.readouterr().out
    )  # it did reach the builder
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"user:secret" in path.read_bytes()]


def test_a_failed_build_is_loud_and_the_local_road_goes_on(
    make_run: MakeRun, builders: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    builders(docker=FAILING)
    run = make_run()
    record = pack(run)
    assert (record["builder"], record["image_digest"]) == ("docker", None)
    assert "docker ended with status 3" in record["reason"]
    err = capsys.readouterr().err
    assert "WARNING" in err
    assert "no space left on device" in err
    assert str(run.log("package")) in err


@pytest.mark.parametrize("sections", [{"package": {"build": "require"}}, {"deploy": {"target": "kubernetes"}}])
def test_a_failed_build_stops_a_road_that_needs_the_image(
    sections: dict[str, Any], make_run: MakeRun, builders: Callable[..., Path]
) -> None:
    builders(docker=FAILING)
    with pytest.raises(StageError, match="docker could not build"):
        pack(make_run(**sections))


def test_as_a_process_it_leaves_its_error_for_the_runner(make_run: MakeRun) -> None:
    run = make_run(verdict="fail")
    argv = [sys.executable, "-m", "pipeline.package", str(run.path), "--root", str(run.path)]
    env = {**os.environ, "PYTHONPATH": str(HOUSE), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(argv, env=env, cwd=run.path, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert json.loads((run.partial("package") / "error.json").read_text())["kind"] == "GateError"
