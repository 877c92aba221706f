from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from pipeline.spec.bundle import open_bundle, write_manifest
from pipeline.spec.digest import digest_mapping, digest_tree
from pipeline.spec.errors import BundleError, ConfigError, GateError
from pipeline.spec.files import write_json
from pipeline.spec.sources import HOUSE

from .packing import BASE, MakeRun, context_of, pack

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
        "requirements-cpu.txt",
        "requirements-gpu.txt",
        "slim.py",
        "wheels",
    ]
    assert record == {
        "image": f"twice:{run.bundle().digest[:12]}",
        "bundle": run.bundle().digest,
        "context": digest_mapping(digest_tree(context)),
        "base": BASE,
        "base_digest": None,
        "accelerator": "cpu",
        "builder": None,
        "image_digest": None,
        "reason": "package.build is never",
        "reference": None,
        "sbom": "sbom.cdx.json",
        "modelcar": None,
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


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_requirements_are_pinned_and_without_torch(accelerator: str, make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    pack(run)
    lines = (context_of(run) / f"requirements-{accelerator}.txt").read_text().splitlines()
    names = [line.partition("==")[0].partition("[")[0] for line in lines]
    assert all(line.count("==") == 1 and line.partition("==")[2] for line in lines)
    assert names == sorted(set(names))
    runtime = {"cpu": "onnxruntime", "gpu": "onnxruntime-gpu"}[accelerator]
    assert {"kserve", "numpy", runtime, "pydantic", "psutil", "uvloop"} <= set(names)
    assert not {"torch", "onnx", "safetensors", "pipe-road"} & set(names)


def test_what_the_codec_needs_goes_along_pinned_with_all_it_needs_itself(make_run: MakeRun) -> None:
    run = make_run(package=NEVER)
    needed = f"tokenizers=={version('tokenizers')}"
    signature = run.bundle().signature.model_copy(update={"requires": (needed,)})
    ancestors = run.bundle().manifest.ancestors
    write_json(run.bundle_path / "signature.json", signature.model_dump())
    (run.bundle_path / "files").mkdir()
    (run.bundle_path / "files" / "tokenizer.json").write_text("{}")
    write_manifest(run.bundle_path, "twice", "pass", ancestors)
    pack(run)
    for accelerator in ("cpu", "gpu"):
        lines = (context_of(run) / f"requirements-{accelerator}.txt").read_text().splitlines()
        assert {needed, f"huggingface-hub=={version('huggingface-hub')}"} <= set(lines)
        assert not [line for line in lines if line.startswith(("torch", "transformers"))]
    assert (context_of(run) / "bundle" / "files" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("sections", "accelerator"),
    [
        ({}, "cpu"),
        ({"deploy": {"gpus": 1}}, "gpu"),
        ({"package": {**NEVER, "accelerator": "gpu"}}, "gpu"),
        ({"package": {**NEVER, "accelerator": "cpu"}, "deploy": {"gpus": 1}}, "cpu"),
    ],
)
def test_an_image_brings_cuda_where_it_will_be_used(
    sections: dict[str, Any], accelerator: str, make_run: MakeRun
) -> None:
    run = make_run(**{"package": NEVER, **sections})
    assert pack(run)["accelerator"] == accelerator
    assert f"ARG ACCELERATOR={accelerator}" in (context_of(run) / "Dockerfile").read_text().splitlines()


def test_wheels_of_the_project_go_along(make_run: MakeRun) -> None:
    run = make_run(package={**NEVER, "wheels": "wheels"})
    (run.path / "wheels").mkdir()
    with pytest.raises(ConfigError, match=r"package\.wheels: no wheel in"):
        pack(run)
    name = f"numpy-{version('numpy')}-py3-none-any.whl"
    (run.path / "wheels" / name).write_bytes(b"")
    pack(run)
    assert (context_of(run) / "wheels" / name).is_file()


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


@pytest.mark.parametrize("verdict", ["pass", "no-baseline", "forced (demo on Friday)"])
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


def test_as_a_process_it_leaves_its_error_for_the_runner(make_run: MakeRun) -> None:
    run = make_run(verdict="fail")
    argv = [sys.executable, "-m", "pipeline.package", str(run.path), "--root", str(run.path)]
    env = {**os.environ, "PYTHONPATH": str(HOUSE), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(argv, env=env, cwd=run.path, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert json.loads((run.partial("package") / "error.json").read_text())["kind"] == "GateError"
