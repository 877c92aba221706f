"""Verify a run or a bundle: every digest of its chain, the ledger of training samples, and the golden requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pipeline.contract.bundle import OVERRIDDEN, OVERRIDE_FILE, PROVENANCE, open_bundle
from pipeline.contract.codec import FILES
from pipeline.contract.run import Run, RunFile, run_of_bundle
from pipeline.contract.signing import Trust
from pipeline.contract.task import KEY, shared_files_folder
from pipeline.history import changed_folders, changed_outputs
from pipeline.system.errors import BundleError
from pipeline.system.files import digest_file, read_object
from serve.runtime.selfcheck import check_golden_requests
from serve.runtime.session import Session
from train.batch_order import BatchOrder, read_order
from train.ledger import LEDGER_FILE, LedgerVerification, read_lines
from train.ledger import verify_ledger as verify_lines
from train.sample_checksums import read_checksums


def verify_bundle(path: Path, trust: Trust | None = None) -> Iterator[str]:
    """Yield one sentence for each check that passes; raise for the first that fails."""
    bundle = open_bundle(path, trust)
    if trust is not None:
        yield f"signed by {trust.check(path, (path / 'manifest.json').read_bytes())}"
    if (path / PROVENANCE).is_file():
        yield "the provenance is of this bundle"
    yield f"bundle {bundle.digest[:12]}: {len(bundle.manifest.files)} files match the manifest"
    check_golden_requests(bundle, Session(bundle, "cpu", 0))
    yield "golden requests are answered as at export"
    if (run := run_of_bundle(path)) is not None:
        run.bundle_to_serve()  # raises where it is not the one that was exported
        yield f"it is the bundle that run {run.id} exported"


def verify_run(run: Run, trust: Trust | None = None) -> Iterator[str]:
    body = run.read()
    run.check_seal()
    yield "run.json: settings, environment and records as pipe wrote them"
    yield from _verify_records(run, body)
    complete_steps = {record.step for record in body.steps.values() if record.complete}
    if "evaluate" in complete_steps:
        _check_digest(run.verdict()["checkpoint"], run.output("train") / "model.safetensors", "the verdict")
        yield "the verdict is about this checkpoint"
        yield from _verify_override(run)
    yield from verify_run_ledger(run)
    if "export" in complete_steps:
        yield from _verify_lineage(run)
        yield from verify_bundle(run.bundle_path, trust)
    elif trust is not None:
        raise BundleError(f"run {run.id} has no bundle, so nothing is signed; `pipe run --resume {run.id}` makes one")
    if "package" in complete_steps:
        _check_bundle_named_in(run, "package/image.json", "made from")
        yield "the container image has this bundle"
    if "deploy" in complete_steps:
        _check_bundle_named_in(run, "deploy/deploy.json", "about")
        yield "the deployment is of this bundle"


def _check_bundle_named_in(run: Run, name: str, relation: str) -> None:
    if read_object(run.path / name, "bundle") != run.bundle().digest:
        raise BundleError(f"{name}: {relation} another bundle than export/bundle")


def _verify_records(run: Run, body: RunFile) -> Iterator[str]:
    for record in body.steps.values():
        if not record.complete:
            yield f"{record.step}: {record.status}, nothing to verify"
            continue
        if changed := changed_outputs(run, record):
            raise BundleError(f"{run.output(record.step) / changed[0]}: changed since the step was done")
        if changed := changed_folders(run, record):
            path = run.output(record.step) / changed[0]
            raise BundleError(f"{path}: this empty folder was added or removed since the step was done")
        run.check_record(record)
        yield f"{record.step}: {len(record.outputs)} files as recorded"


def _verify_override(run: Run) -> Iterator[str]:
    """Check that an overridden verdict has its override, and that this is about the same verdict."""
    override = run.override(digest_file(run.output("evaluate") / "verdict.json"))
    if override is not None:
        yield f"the verdict was {override}"
    elif run.read().steps["evaluate"].status == OVERRIDDEN:
        raise BundleError(f"{run.path / OVERRIDE_FILE}: missing, or about another verdict than evaluate/verdict.json")


def _verify_lineage(run: Run) -> Iterator[str]:
    ancestors = run.bundle().manifest.ancestors
    _check_digest(ancestors.data, run.output("prepare") / "data.json", "the bundle")
    _check_digest(ancestors.checkpoint, run.output("train") / "model.safetensors", "the bundle")
    _check_digest(ancestors.verdict, run.output("evaluate") / "verdict.json", "the bundle")
    if ancestors.override:
        _check_digest(ancestors.override, run.path / OVERRIDE_FILE, "the bundle")
    _check_shared_files(run)
    yield "the bundle descends from this data, this checkpoint and this verdict"


def _check_shared_files(run: Run) -> None:
    """Check that the files the codec shares with the model are those of training."""
    shared_files_folder(run)  # raises where they changed since prepare
    recorded = read_object(run.output("prepare") / "data.json").get(KEY, {})
    for path, entry in run.bundle().manifest.files.items():
        folder, _, name = path.partition("/")
        if folder == FILES and recorded.get(name) != entry.sha256:
            raise BundleError(f"the bundle has another {path} than prepare/{path} of this run")


def _check_digest(expected: object, path: Path, owner: str) -> None:
    if digest_file(path) != expected:
        raise BundleError(f"{owner} names another {path.parent.name}/{path.name} than the one in this run")


def verify_run_ledger(run: Run) -> Iterator[str]:
    """Yield a sentence where training has begun; raise for the first line of the ledger that is wrong."""
    directory = train_folder(run)
    if directory is None:
        return
    if not run.config.trains:
        yield "the weights are those that prepare recorded, as given"
        return
    verification = ledger_verification(run)
    if verification.fault:
        lost, repeated = verification.lost, verification.repeated
        count = f" ({lost} samples lost, {repeated} repeated)" if lost or repeated else ""
        raise BundleError(f"{directory / LEDGER_FILE}, {verification.fault}{count}")
    if (directory / "summary.json").exists():
        _check_end(directory, verification, batch_order(run, directory), run.config.train.validate_every)
        yield f"ledger: {describe_ledger(verification)}"
    elif verification.steps:
        yield f"ledger: training is unfinished, verified up to {describe_ledger(verification)}"


def ledger_verification(run: Run) -> LedgerVerification:
    """Verify the ledger up to the last step of training, or up to its last line where training has not ended."""
    directory = train_folder(run)
    if directory is None:
        raise BundleError(f"{run.path}: has no ledger; training has not begun")
    summary = directory / "summary.json"
    lines = read_lines(directory / LEDGER_FILE, growing=not summary.exists())
    steps = read_object(summary, "steps") if summary.exists() else max([0, *(line.step for line in lines)])
    return verify_lines(lines, batch_order(run, directory), steps, read_checksums(run.output("prepare")))


def train_folder(run: Run) -> Path | None:
    """Return the folder of the train step, finished or not; None before training has begun."""
    if run.output("train").is_dir():
        return run.output("train")
    return run.partial("train") if (run.partial("train") / LEDGER_FILE).exists() else None


def batch_order(run: Run, directory: Path) -> BatchOrder:
    """Return the order of samples from the run's data and settings, independent of the ledger."""
    train = run.config.train
    batch_size = train.batch_size
    if batch_size == "auto":
        batch_size = read_object(directory / "batch_size.json", "batch_size")
    return read_order(run.output("prepare"), int(batch_size), train.seed, train.max_samples)


def describe_ledger(verification: LedgerVerification) -> str:
    """Summarize a ledger without faults in one line."""
    minimum, maximum = verification.processes
    processes = _count(maximum, "process", "es") if minimum == maximum else f"{minimum} to {maximum} processes"
    steps, epochs = _count(verification.steps, "step"), _count(verification.epochs, "epoch")
    samples, attempts = _count(verification.samples, "sample"), _count(verification.attempts, "attempt")
    uses = f"{samples} drawn by weight" if verification.drawn else f"every one of {samples} exactly once"
    each = "each" if verification.epochs % 1 == 0 else "each complete epoch"
    if verification.skipped_steps:
        skipped = _count(verification.skipped_steps, "step")
        uses += f" (but {verification.skipped_samples} in {skipped} that fp16 skipped after an overflow)"
    compared = f"; contents compared in {_count(verification.compared, 'step')}" if verification.compared else ""
    return f"{steps}, {epochs}, {uses} in {each}; {attempts}, {processes}{compared}"


def _check_end(directory: Path, verification: LedgerVerification, order: BatchOrder, validate_every: int) -> None:
    """Check that the ledger ends with a validation and that the model's step is the best of the summary."""
    summary = read_object(directory / "summary.json")
    intervals = [order.steps_per_epoch, *filter(None, [validate_every])]
    is_end = verification.steps == summary.get("total_steps")
    if not is_end and all(verification.steps % interval for interval in intervals):
        raise BundleError(
            f"{directory / LEDGER_FILE}: ends with step {verification.steps}, "
            f"in the middle of an epoch of {order.steps_per_epoch}"
        )
    step = read_step(directory / "model.safetensors")
    if step != summary["best_step"] or not 1 <= step <= verification.steps:
        raise BundleError(
            f"{directory / 'model.safetensors'}: has the weights of step {step}, but the best of "
            f"{verification.steps} steps was {summary['best_step']}"
        )


def read_step(weights: Path) -> int:
    """Read the training step from the header of a file of weights."""
    try:
        with safe_open(weights, "numpy") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"{weights}: has no training step in its header ({error})") from error


def _count(count: float, noun: str, plural: str = "s") -> str:
    return f"{count:.12g} {noun}{'' if count == 1 else plural}"
