"""Walking the chain backwards: every digest of a run or a bundle, the ledger of samples, and the golden answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.history import changed_outputs
from pipeline.ledger import verify_ledger
from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.digest import digest_file, digest_mapping
from pipeline.spec.errors import BundleError
from pipeline.spec.run import Run
from serve.selfcheck import check
from serve.session import Session


def verify_bundle(path: Path) -> Iterator[str]:
    """What was found to hold, sentence by sentence; the first thing that does not is raised."""
    bundle = open_bundle(path)
    yield f"bundle {bundle.digest[:12]}: {len(bundle.manifest.files)} files are as the manifest says"
    _check_golden(bundle)
    yield "golden requests are answered as at export"


def verify_run(run: Run) -> Iterator[str]:
    body = run.read()
    for record in body.steps.values():
        if record.status != "done":
            yield f"{record.step}: {record.status}, nothing to verify"
            continue
        if changed := changed_outputs(run, record):
            raise BundleError(f"{run.output(record.step) / changed[0]}: changed since the step was done")
        if digest_mapping(record.outputs) != record.digest:
            raise BundleError(f"{run.path / 'run.json'}: the record of {record.step} was altered")
        yield f"{record.step}: {len(record.outputs)} files as recorded"
    done = {record.step for record in body.steps.values() if record.status == "done"}
    if "evaluate" in done:
        _link(run.verdict()["checkpoint"], run.output("train") / "model.safetensors", "the verdict")
        yield "the verdict is about this checkpoint"
    yield from verify_ledger(run)
    if "export" in done:
        yield from _verify_lineage(run)
        yield from verify_bundle(run.bundle_path)
    if "package" in done:
        image = json.loads((run.output("package") / "image.json").read_text())
        if image["bundle"] != run.bundle().digest:
            raise BundleError("package/image.json: made of another bundle than export/bundle")
        yield "the container holds this bundle"


def _verify_lineage(run: Run) -> Iterator[str]:
    ancestors = run.bundle().manifest.ancestors
    _link(ancestors.data, run.output("prepare") / "data.json", "the bundle")
    _link(ancestors.checkpoint, run.output("train") / "model.safetensors", "the bundle")
    _link(ancestors.verdict, run.output("evaluate") / "verdict.json", "the bundle")
    yield "the bundle descends from this data, this checkpoint and this verdict"


def _link(expected: object, path: Path, who: str) -> None:
    if digest_file(path) != expected:
        raise BundleError(f"{who} names another {path.parent.name}/{path.name} than the one in this run")


def _check_golden(bundle: Bundle) -> None:
    check(bundle, Session(bundle, "cpu", 0))
