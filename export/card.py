"""The model card: what a person should know before calling the service."""

from __future__ import annotations

from typing import Any

from pipeline.spec.bundle import Ancestors
from pipeline.spec.signature import Signature


def card(name: str, signature: Signature, verdict: dict[str, Any], ancestors: Ancestors) -> str:
    """Deterministic text: the same model has the same card."""
    lines = [f"# {name}", "", _judgement(verdict), "", "## Inputs and outputs", ""]
    lines += ["| tensor | direction | datatype | shape |", "|---|---|---|---|"]
    for direction, specs in (("in", signature.inputs), ("out", signature.outputs)):
        for spec in specs:
            shape = " × ".join(map(str, spec.shape))
            lines.append(f"| `{spec.name}` | {direction} | {spec.datatype} | {shape} |")
    lines += ["", "## Limits", ""]
    lines.append(f"At most {signature.limits.max_batch_size} instances and {signature.limits.max_body_bytes} bytes a request.")  # fmt: skip  # noqa: E501
    lines += ["", "## Judged", ""]
    lines += [f"- {'passed' if rule['passed'] else 'FAILED'}: {rule['rule']} ({rule['detail']})" for rule in verdict["rules"]]  # fmt: skip  # noqa: E501
    lines += ["", "## Lineage", "", "| what | SHA-256 |", "|---|---|"]
    lines += [f"| {kind} | `{digest}` |" for kind, digest in ancestors.model_dump().items()]
    return "\n".join(lines) + "\n"


def _judgement(verdict: dict[str, Any]) -> str:
    text = f"Verdict: **{verdict['verdict']}**. {verdict['summary']}"
    if verdict["verdict"] == "forced":
        text += f" Forced: {verdict['forced_reason']}."
    return text
