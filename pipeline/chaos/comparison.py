"""A disturbed training beside the undisturbed one: samples are counted, curves and weights compared."""

from __future__ import annotations

import json
from typing import Any

from pipeline.chaos.verdict import Made, Training
from pipeline.ledger import prove_run
from pipeline.spec.errors import PipelineError
from pipeline.spec.run import Run

_COMPARED = ("step", "loss", "grad_norm", "lr", "validation")  # of every line of the journal: not what depends on time


def judge(run: Run, reference: Run, found: tuple[Made, ...], by_hand: int, fault: str) -> Training:
    """Counted from the ledger, compared with what the undisturbed training left."""
    lost = repeated = 0
    ledger = weights = differs = ""
    if not fault:
        try:
            proof = prove_run(run)
            lost, repeated, ledger = proof.lost, proof.repeated, proof.fault
        except PipelineError as error:
            ledger = str(error)
        weights = weights_of(run)
        differs = difference(run, reference)
    return Training(str(run.path), found, by_hand, fault, lost, repeated, ledger, weights, differs)


def difference(run: Run, reference: Run) -> str:
    """The first line of the journal that is not the same, else the weights."""
    for left, right in zip(curve(reference), curve(run), strict=False):
        if left != right:
            return f"from step {right['step']} on, training went another way than undisturbed: {left} became {right}"
    if len(curve(run)) != len(curve(reference)):
        return f"the journal has {len(curve(run))} lines, and {len(curve(reference))} undisturbed"
    return "" if weights_of(run) == weights_of(reference) else "the final weights differ from the undisturbed ones"


def weights_of(run: Run) -> str:
    return run.read().steps["train"].outputs["model.safetensors"]


def journal(run: Run) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (run.output("train") / "metrics.jsonl").read_text().splitlines()]


def curve(run: Run) -> list[dict[str, Any]]:
    return [{name: row[name] for name in _COMPARED if name in row} for row in journal(run)]
