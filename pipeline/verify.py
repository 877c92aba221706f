"""Walking the chain backwards: every digest of a run or a bundle, the ledger of samples, and the golden answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.history import changed_outputs
from pipeline.ledger import verify_ledger
from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.codec import FILES
from pipeline.spec.companions import KEY, companions_of
from pipeline.spec.digest import digest_file, digest_mapping
from pipeline.spec.errors import BundleError
from pipeline.spec.override import FILE, OVERRIDDEN
from pipeline.spec.provenance import PROVENANCE
from pipeline.spec.run import Run
from pipeline.spec.signing import Trust
from serve.runtime.selfcheck import check
from serve.runtime.session import Session


def verify_bundle(path: Path, trust: Trust | None = None) -> Iterator[str]:
    """What was found to hold, sentence by sentence; the first thing that does not is raised."""
    bundle = open_bundle(path, trust)
    if trust is not None:
        yield f"signed by {trust.check(path, (path / 'manifest.json').read_bytes())}"
    if (path / PROVENANCE).is_file():
        yield "the provenance is about this bundle"
    yield f"bundle {bundle.digest[:12]}: {len(bundle.manifest.files)} files are as the manifest says"
    _check_golden(bundle)
    yield "golden requests are answered as at export"


def verify_run(run: Run, trust: Trust | None = None) -> Iterator[str]:
    body = run.read()
    for record in body.steps.values():
        if not record.complete:
            yield f"{record.step}: {record.status}, nothing to verify"
            continue
        if changed := changed_outputs(run, record):
            raise BundleError(f"{run.output(record.step) / changed[0]}: changed since the step was done")
        if digest_mapping(record.outputs) != record.digest:
            raise BundleError(f"{run.path / 'run.json'}: the record of {record.step} was altered")
        yield f"{record.step}: {len(record.outputs)} files as recorded"
    done = {record.step for record in body.steps.values() if record.complete}
    if "evaluate" in done:
        _link(run.verdict()["checkpoint"], run.output("train") / "model.safetensors", "the verdict")
        yield "the verdict is about this checkpoint"
        yield from _verify_override(run)
    yield from verify_ledger(run)
    if "export" in done:
        yield from _verify_lineage(run)
        yield from verify_bundle(run.bundle_path, trust)
    elif trust is not None:
        raise BundleError(f"run {run.id} has no bundle, so nothing is signed; `pipe run --resume {run.id}` goes on")
    if "package" in done:
        image = json.loads((run.output("package") / "image.json").read_text())
        if image["bundle"] != run.bundle().digest:
            raise BundleError("package/image.json: made of another bundle than export/bundle")
        yield "the container holds this bundle"


def _verify_override(run: Run) -> Iterator[str]:
    """A failed verdict stands beside the word that let it pass, and nothing else does."""
    given = run.override(digest_file(run.output("evaluate") / "verdict.json"))
    if given is not None:
        yield f"the verdict was {given}"
    elif run.read().steps["evaluate"].status == OVERRIDDEN:
        raise BundleError(f"{run.path / FILE}: gone, or about another verdict than evaluate/verdict.json")


def _verify_lineage(run: Run) -> Iterator[str]:
    ancestors = run.bundle().manifest.ancestors
    _link(ancestors.data, run.output("prepare") / "data.json", "the bundle")
    _link(ancestors.checkpoint, run.output("train") / "model.safetensors", "the bundle")
    _link(ancestors.verdict, run.output("evaluate") / "verdict.json", "the bundle")
    if ancestors.override:
        _link(ancestors.override, run.path / FILE, "the bundle")
    _same_files(run)
    yield "the bundle descends from this data, this checkpoint and this verdict"


def _same_files(run: Run) -> None:
    """What the codec shares with the model is what the model was trained with."""
    companions_of(run)  # as prepare left them
    recorded = json.loads((run.output("prepare") / "data.json").read_text()).get(KEY, {})
    for path, entry in run.bundle().manifest.files.items():
        folder, _, name = path.partition("/")
        if folder == FILES and recorded.get(name) != entry.sha256:
            raise BundleError(f"the bundle has another {path} than prepare/{path} of this run")


def _link(expected: object, path: Path, who: str) -> None:
    if digest_file(path) != expected:
        raise BundleError(f"{who} names another {path.parent.name}/{path.name} than the one in this run")


def _check_golden(bundle: Bundle) -> None:
    check(bundle, Session(bundle, "cpu", 0))
