from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

from pipeline.contract.bundle import Ancestors, Override, open_bundle, write_manifest, write_override
from pipeline.contract.config import Config, parse_config
from pipeline.contract.golden import Golden
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.signing import SIGNATURE, Trust, new_key, private_key
from pipeline.history import changed_outputs, link_outputs, publish_step, write_record, write_run
from pipeline.override import sign_run
from pipeline.system.errors import BundleError, ConfigError
from pipeline.system.files import digest_file, write_json
from pipeline.verify import verify_bundle, verify_run
from train.batch_order import BatchOrder
from train.ledger import LedgerLine, batch_digest

from .cli.conftest import run_here
from .conftest import NewRun
from .packing import write_bundle


def complete(run: Run, step: str) -> None:
    outputs, digest = publish_step(run, step)
    write_record(run, StepRecord(step=step, status="done", key="k", parts={}, outputs=outputs, digest=digest))


def write_training(directory: Path) -> None:
    """Write a training of one step with all five samples."""
    ids = BatchOrder(samples=5, batch_size=64, seed=0).batch(0)
    line = LedgerLine(step=1, epoch=0, samples=5, digest=batch_digest(ids), processes=2, attempt=1)
    (directory / "ledger.jsonl").write_text(f"{line.model_dump_json()}\n")
    save_file({"w": np.ones(1, np.float32)}, directory / "model.safetensors", {"step": "1"})
    write_json(directory / "summary.json", {"steps": 1, "best_step": 1})


@pytest.fixture
def config() -> Config:
    return parse_config({"name": "a", "task": "task.py:T", "codec": "c.py:C", "train": {"batch_size": "auto"}}, "test")


@pytest.fixture
def run(new_run: NewRun) -> Run:
    """A run with the outputs of all steps, made by hand."""
    run = new_run()
    for step in ("prepare", "train", "evaluate", "package", "deploy"):
        run.partial(step).mkdir()
    write_json(run.partial("prepare") / "checks.json", {"checks": []})
    write_json(run.partial("train") / "batch_size.json", {"batch_size": 64})
    write_json(run.partial("evaluate") / "metrics.json", {"candidate": {"loss": 0.5}})
    write_json(run.partial("prepare") / "data.json", {"splits": {"train": {"samples": 5}}})
    complete(run, "prepare")
    write_training(run.partial("train"))
    complete(run, "train")
    checkpoint = digest_file(run.output("train") / "model.safetensors")
    verdict = {"verdict": "pass", "checkpoint": checkpoint, "summary": "", "rules": [], "samples": 5, "margin": 0.0}
    write_json(run.partial("evaluate") / "verdict.json", verdict)
    complete(run, "evaluate")
    ancestors = Ancestors(
        code="c",
        data=digest_file(run.output("prepare") / "data.json"),
        checkpoint=checkpoint,
        verdict=digest_file(run.output("evaluate") / "verdict.json"),
        onnx="",
    )
    write_bundle(run.partial("export") / "bundle", ancestors=ancestors)
    complete(run, "export")
    write_json(run.partial("package") / "image.json", {"bundle": run.bundle().digest})
    complete(run, "package")
    write_json(run.partial("deploy") / "deploy.json", {"bundle": run.bundle().digest})
    complete(run, "deploy")
    return run


def alter(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def reseal(run: Run, step: str) -> None:
    """Update the run's record, as an attacker would, to match the changed outputs."""
    record = run.read().steps[step]
    assert changed_outputs(run, record)
    run.output(step).rename(run.partial(step))
    complete(run, step)


def test_intact_chain_is_reported_step_by_step(run: Run) -> None:
    assert list(verify_run(run)) == [
        "run.json: settings, environment and records as pipe wrote them",
        "prepare: 2 files as recorded",
        "train: 4 files as recorded",
        "evaluate: 2 files as recorded",
        "export: 7 files as recorded",
        "package: 1 files as recorded",
        "deploy: 1 files as recorded",
        "the verdict is about this checkpoint",
        "ledger: 1 step, 1 epoch, every one of 5 samples exactly once in each; 1 attempt, 2 processes",
        "the bundle descends from this data, this checkpoint and this verdict",
        f"bundle {run.bundle().digest[:12]}: 6 files match the manifest",
        "golden requests are answered as at export",
        f"it is the bundle that run {run.id} exported",
        "the container image has this bundle",
        "the deployment is of this bundle",
    ]


@pytest.mark.parametrize(
    "damage",
    [lambda body: bytes(len(body)), lambda body: b"", lambda body: body[: len(body) // 2], lambda body: b"[]"],
    ids=["zeros", "empty", "cut", "list"],
)
def test_a_damaged_file_is_named_and_stops_only_what_needs_it(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    pipe, body = run_here(folder, monkeypatch), run.read()
    files = [path for step in body.steps for path in run.output(step).rglob("*.json")]
    assert len(files) == 11
    for path in files:
        intact = path.read_bytes()
        path.write_bytes(damage(intact))
        step = path.relative_to(run.path).parts[0]
        assert f"{path}: changed since" in pipe("verify", run.id, expect=2).stderr
        reseal(run, step)  # so that it is read
        for command in ("verify", "status", "report", "compare", "gate explain", "registry promote"):
            done = pipe(*command.split(), *([] if command == "status" else [run.id]), expect=None)
            assert done.returncode in (0, *[2] * (command not in ("status", "report"))), (command, path, done)
            assert done.returncode == 0 or path.name in done.stderr, (command, path, done)
        write_run(run, body)
        path.write_bytes(intact)


def test_bundle_with_a_changed_shared_file_is_refused(run: Run) -> None:
    files = run.bundle_path / "files"
    files.mkdir()
    (files / "words.txt").write_text("one two")
    seal_bundle(run.bundle_path)
    reseal(run, "export")
    with pytest.raises(BundleError, match=r"another files/words.txt than prepare/files/words.txt of this run"):
        list(verify_run(run))


def test_unfinished_step_is_reported_and_not_verified(run: Run) -> None:
    record = run.read().steps["package"]
    write_record(run, record.model_copy(update={"status": "failed"}))
    assert "package: failed, nothing to verify" in list(verify_run(run))


@pytest.mark.parametrize(
    "file", ["prepare/data.json", "train/model.safetensors", "evaluate/verdict.json", "export/bundle/card.md"]
)
def test_added_byte_in_any_output_is_detected(run: Run, file: str) -> None:
    alter(run.path / file)
    with pytest.raises(BundleError, match=f"{file}: changed since the step was done"):
        list(verify_run(run))


def seal_bundle(bundle: Path) -> str:
    """Write a manifest that agrees with the files; return its digest."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    ancestors = Ancestors(**{**manifest["ancestors"], "onnx": digest_file(bundle / "model.onnx")})
    return write_manifest(bundle, manifest["name"], manifest["verdict"], ancestors)


def perturb(bundle: Path) -> None:
    """Change one number of an initializer, and write a manifest that matches."""
    model = onnx.load(bundle / "model.onnx")
    initializer = model.graph.initializer[0]
    changed = numpy_helper.to_array(initializer).copy()
    changed[0, 0] += 0.5
    initializer.CopyFrom(numpy_helper.from_array(changed, initializer.name))
    onnx.save(model, bundle / "model.onnx")
    seal_bundle(bundle)


def exchange(run: Run) -> str:
    """Replace the bundle by another consistent one, including manifest and golden answers; return its digest."""
    perturb(run.bundle_path)
    ones, answer = np.ones((1, 2), np.float32), np.full((1, 2), 2.5, np.float32)
    Golden({"x": ones}, {"y": answer}, [[1, 1]], [[2.5, 2]], 1, 1).write(run.bundle_path)
    return seal_bundle(run.bundle_path)


def test_bundle_that_was_replaced_as_a_whole_is_not_opened(run: Run) -> None:
    exported = run.bundle().digest
    other = exchange(run)
    assert open_bundle(run.bundle_path).digest == other, "it is a valid bundle"
    names_both = f"its bundle is {other[:12]}, but the one that was exported is {exported[:12]}; .*--resume {run.id}"
    with pytest.raises(BundleError, match=names_both):
        run.bundle()
    with pytest.raises(BundleError, match=names_both):
        run.bundle_to_serve()
    new_key(run.path / "key")
    with pytest.raises(BundleError, match=names_both):
        sign_run(run, private_key(run.path / "key"))
    with pytest.raises(BundleError, match=names_both):
        list(verify_bundle(run.bundle_path))
    copy = run.path.parent.parent / "copy"
    shutil.copytree(run.bundle_path, copy)
    assert "golden requests are answered as at export" in list(verify_bundle(copy))
    with pytest.raises(BundleError, match="changed since the step was done"):
        list(verify_run(run))


def test_bundle_replaced_with_its_record_is_not_the_deployed_one(run: Run) -> None:
    deployed = run.bundle().digest
    other = exchange(run)
    reseal(run, "export")
    with pytest.raises(BundleError, match=f"is {other[:12]}, but the one that was deployed is {deployed[:12]}"):
        run.require_bundle(deployed)
    with pytest.raises(BundleError, match="made from another bundle"):
        list(verify_run(run))


def test_bundle_of_an_edited_record_is_not_opened(run: Run) -> None:
    digest = exchange(run)
    body = run.read()
    outputs = {**body.steps["export"].outputs, "bundle/manifest.json": digest}
    record = body.steps["export"].model_copy(update={"outputs": outputs})
    write_run(run, body.model_copy(update={"steps": {**body.steps, "export": record}}))
    with pytest.raises(BundleError, match="the record of export was altered"):
        run.bundle()


def test_only_a_run_with_a_bundle_and_a_record_of_its_export_is_signed(
    run: Run, new_run: NewRun, tmp_path: Path
) -> None:
    new_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="has no bundle"):
        sign_run(new_run(), private_key(tmp_path / "key"))
    with pytest.raises(BundleError, match="has no bundle, so nothing is signed"):
        list(verify_run(new_run(), Trust(tmp_path / "key.pub")))
    write_run(run, run.read().model_copy(update={"steps": {}}))
    with pytest.raises(BundleError, match="has a bundle, but no record of its export"):
        run.bundle()


def edit_run_file(run: Run, section: str, name: str, value: object) -> None:
    body = json.loads((run.path / "run.json").read_text())
    body[section][name] = value
    write_json(run.path / "run.json", body)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("config", "name", "other"), ("environment", "python", "2.7"), ("steps", "deploy", {})],
)
def test_edited_settings_and_environment_are_detected(run: Run, section: str, name: str, value: object) -> None:
    if name == "deploy":
        value = run.read().steps["package"].model_copy(update={"step": name}).model_dump()
    edit_run_file(run, section, name, value)
    with pytest.raises(BundleError, match="settings, environment or records were edited since pipe wrote it"):
        list(verify_run(run))
    with pytest.raises(BundleError, match="were edited since pipe wrote it"):
        run.bundle()


def test_a_later_write_does_not_hide_an_edit(run: Run) -> None:
    edit_run_file(run, "config", "name", "other")
    write_record(run, run.read().steps["package"].model_copy(update={"seconds": 2.0}))
    with pytest.raises(BundleError, match="were edited since pipe wrote it"):
        run.check_seal()


def test_removed_seal_is_detected(run: Run) -> None:
    body = json.loads((run.path / "run.json").read_text())
    write_json(run.path / "run.json", {**body, "seal": ""})
    with pytest.raises(BundleError, match="were edited since pipe wrote it"):
        run.check_seal()


def test_added_and_removed_empty_folders_are_detected(run: Run, new_run: NewRun) -> None:
    run.output("evaluate").rename(run.partial("evaluate"))
    (run.partial("evaluate") / "plots").mkdir()
    complete(run, "evaluate")
    record = run.read().steps["evaluate"].model_copy(update={"empty_folders": ("plots",)})
    write_record(run, record)
    assert list(verify_run(run))
    later = new_run()
    link_outputs(run, later, record)
    assert (later.output("evaluate") / "plots").is_dir()
    added = run.output("evaluate") / "more"
    added.mkdir()
    with pytest.raises(BundleError, match="evaluate/more: this empty folder was added or removed"):
        list(verify_run(run))
    added.rmdir()
    (run.output("evaluate") / "plots").rmdir()
    with pytest.raises(BundleError, match="evaluate/plots: this empty folder was added or removed"):
        list(verify_run(run))


def test_altered_record_is_detected(run: Run) -> None:
    body = run.read()
    record = body.steps["train"].model_copy(update={"digest": "0" * 64})
    write_run(run, body.model_copy(update={"steps": {**body.steps, "train": record}}))
    with pytest.raises(BundleError, match="the record of train was altered"):
        list(verify_run(run))


@pytest.mark.parametrize(
    ("step", "file", "sentence"),
    [
        ("prepare", "data.json", "the bundle names another prepare/data.json"),
        ("train", "model.safetensors", "the verdict names another train/model.safetensors"),
        ("evaluate", "verdict.json", "the bundle names another evaluate/verdict.json"),
    ],
)
def test_output_replaced_with_its_record_does_not_match_the_next_step(
    run: Run, step: str, file: str, sentence: str
) -> None:
    alter(run.output(step) / file)
    reseal(run, step)
    with pytest.raises(BundleError, match=sentence):
        list(verify_run(run))


def test_a_container_made_of_another_bundle_is_reported(run: Run) -> None:
    write_json(run.output("package") / "image.json", {"bundle": "0" * 64})
    reseal(run, "package")
    with pytest.raises(BundleError, match="made from another bundle"):
        list(verify_run(run))


def test_forged_ledger_with_its_record_is_detected(run: Run) -> None:
    path = run.output("train") / "ledger.jsonl"
    path.write_text(path.read_text().replace('"samples":5', '"samples":4'))
    reseal(run, "train")
    with pytest.raises(BundleError, match=r"ledger.jsonl, line 1: step 1 has 5 samples, not 4"):
        list(verify_run(run))


def test_changed_model_fails_golden_requests_despite_a_new_manifest(run: Run) -> None:
    perturb(run.bundle_path)
    open_bundle(run.bundle_path)  # every digest agrees
    with pytest.raises(BundleError, match="golden requests: y"):
        list(verify_bundle(run.bundle_path))


def test_removed_override_is_detected(run: Run) -> None:
    (run.output("evaluate")).rename(run.partial("evaluate"))
    complete(run, "evaluate")
    write_record(run, run.read().steps["evaluate"].model_copy(update={"status": "overridden"}))
    with pytest.raises(BundleError, match=r"override\.json: missing, or about another verdict"):
        list(verify_run(run))
    verdict = digest_file(run.output("evaluate") / "verdict.json")
    write_override(run.path, Override(at="noon", by="ann", reason="why not", verdict=verdict))
    assert "the verdict was overridden by ann, noon: why not" in list(verify_run(run))


def test_signature_is_recorded_and_reused_by_later_runs(run: Run, new_run: NewRun, tmp_path: Path) -> None:
    keyid = new_key(tmp_path / "key")
    trust = Trust(tmp_path / "key.pub")
    with pytest.raises(BundleError, match="is not signed"):
        list(verify_run(run, trust))
    bundle, signer = sign_run(run, private_key(tmp_path / "key"))
    assert (signer, bundle.digest) == (keyid, run.bundle().digest)
    assert f"signed by {keyid}" in list(verify_run(run, trust))
    later = new_run()
    link_outputs(run, later, run.read().steps["export"])
    write_record(later, run.read().steps["export"])
    assert later.bundle(trust).digest == bundle.digest
    alter(run.bundle_path / SIGNATURE)
    with pytest.raises(BundleError, match=r"manifest\.sig\.json: changed since the step was done"):
        list(verify_run(run, trust))
    sign_run(run, private_key(tmp_path / "key"))
    assert list(verify_run(run, trust))
