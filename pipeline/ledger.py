"""A run's ledger against its data and settings: was every sample used exactly once in every epoch?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pipeline.spec.errors import BundleError
from pipeline.spec.run import Run
from train.order import Order
from train.proof import FILE, Proof, prove, read_lines


def verify_ledger(run: Run) -> Iterator[str]:
    """One sentence where training has begun; the first line that is not what it has to be is raised."""
    directory = trained(run)
    if directory is None:
        return
    proof = prove_run(run)
    if proof.fault:
        count = f" ({proof.lost} samples lost, {proof.repeated} repeated)" if proof.lost or proof.repeated else ""
        raise BundleError(f"{directory / FILE}, {proof.fault}{count}")
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
    lines = read_lines(directory / FILE, growing=not summary.exists())
    steps = json.loads(summary.read_text())["steps"] if summary.exists() else max([0, *(line.step for line in lines)])
    return prove(lines, order_of(run, directory), steps)


def trained(run: Run) -> Path | None:
    """Where the train step left its files, or leaves them."""
    if run.output("train").is_dir():
        return run.output("train")
    return run.partial("train") if (run.partial("train") / FILE).exists() else None


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
            f"{directory / FILE}: ends with step {proof.steps}, in the midst of an epoch of {order.steps_per_epoch}"
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
