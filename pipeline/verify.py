"""Walking the chain backwards: every digest of a run or a bundle, the ledger of samples, and the golden answers.

A run's ledger against its data and settings: was every sample used exactly once in every epoch?
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pipeline.contract.bundle import PROVENANCE, Bundle, open_bundle
from pipeline.contract.codec import FILES
from pipeline.contract.errors import BundleError
from pipeline.contract.files import digest_file, digest_mapping
from pipeline.contract.override import OVERRIDDEN, OVERRIDE_FILE
from pipeline.contract.run import Run
from pipeline.contract.signing import Trust
from pipeline.contract.task import KEY, companions_of
from pipeline.history import changed_outputs
from serve.runtime.selfcheck import check
from serve.runtime.session import Session
from train.batch_order import Order
from train.ledger import LEDGER_FILE, Proof, prove, read_lines


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
        raise BundleError(f"{run.path / OVERRIDE_FILE}: gone, or about another verdict than evaluate/verdict.json")


def _verify_lineage(run: Run) -> Iterator[str]:
    ancestors = run.bundle().manifest.ancestors
    _link(ancestors.data, run.output("prepare") / "data.json", "the bundle")
    _link(ancestors.checkpoint, run.output("train") / "model.safetensors", "the bundle")
    _link(ancestors.verdict, run.output("evaluate") / "verdict.json", "the bundle")
    if ancestors.override:
        _link(ancestors.override, run.path / OVERRIDE_FILE, "the bundle")
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


def verify_ledger(run: Run) -> Iterator[str]:
    """One sentence where training has begun; the first line that is not what it has to be is raised."""
    directory = trained(run)
    if directory is None:
        return
    proof = prove_run(run)
    if proof.fault:
        count = f" ({proof.lost} samples lost, {proof.repeated} repeated)" if proof.lost or proof.repeated else ""
        raise BundleError(f"{directory / LEDGER_FILE}, {proof.fault}{count}")
    if (directory / "summary.json").exists():
        _check_end(directory, proof, order_of(run, directory))
        yield f"ledger: {whole(proof)}"
    elif proof.steps:
        yield f"ledger: training is unfinished, proven up to {whole(proof)}"


def prove_run(run: Run) -> Proof:
    """Up to the step that training ended with, or, where it has not ended, up to the ledger's last line."""
    directory = trained(run)
    if directory is None:
        raise BundleError(f"{run.path}: has no ledger; training has not begun")
    summary = directory / "summary.json"
    lines = read_lines(directory / LEDGER_FILE, growing=not summary.exists())
    steps = json.loads(summary.read_text())["steps"] if summary.exists() else max([0, *(line.step for line in lines)])
    return prove(lines, order_of(run, directory), steps)


def trained(run: Run) -> Path | None:
    """Where the train step left its files, or leaves them."""
    if run.output("train").is_dir():
        return run.output("train")
    return run.partial("train") if (run.partial("train") / LEDGER_FILE).exists() else None


def order_of(run: Run, directory: Path) -> Order:
    """As the run's data and settings have it, not as the ledger says."""
    data, train = json.loads((run.output("prepare") / "data.json").read_text()), run.config.train
    batch_size = train.batch_size
    if batch_size == "auto":
        batch_size = json.loads((directory / "batch_size.json").read_text())["batch_size"]
    samples = data["splits"]["train"]["samples"]
    return Order(min(train.samples or samples, samples), int(batch_size), train.seed)


def whole(proof: Proof) -> str:
    """What holds, in one line."""
    fewest, most = proof.processes
    crews = _counted(most, "process", "es") if fewest == most else f"{fewest} to {most} processes"
    return (
        f"{_counted(proof.steps, 'step')}, {_counted(proof.epochs, 'epoch')}, every one of "
        f"{_counted(proof.samples, 'sample')} exactly once in each; {_counted(proof.attempts, 'attempt')}, {crews}"
    )


def _check_end(directory: Path, proof: Proof, order: Order) -> None:
    """The ledger ends where the summary says, with whole epochs, and the model is of one of its steps."""
    summary = json.loads((directory / "summary.json").read_text())
    if proof.steps % order.steps_per_epoch:
        raise BundleError(
            f"{directory / LEDGER_FILE}: ends with step {proof.steps}, "
            f"in the midst of an epoch of {order.steps_per_epoch}"
        )
    made = step_of(directory / "model.safetensors")
    if made != summary["best_step"] or not 1 <= made <= proof.steps:
        raise BundleError(
            f"{directory / 'model.safetensors'}: holds the weights of step {made}, but the best of "
            f"{proof.steps} steps was {summary['best_step']}"
        )


def step_of(weights: Path) -> int:
    """The step a file of weights names in its header."""
    try:
        with safe_open(weights, "numpy") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"{weights}: does not name the step of its weights ({error})") from error


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count} {what}{'' if count == 1 else plural}"
