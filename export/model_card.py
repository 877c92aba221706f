"""The model card: what a person should know before calling the service, of the same facts as the report."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.bundle import Ancestors
from pipeline.contract.results import Body, Facts, mapping, mappings
from pipeline.contract.signature import Signature, codec_file
from pipeline.system.wording import join_names, number, signed

_CLASSES = 40  # named
_SLICES = 30  # in the table; those that failed are among them


def render_card(facts: Facts, signature: Signature, ancestors: Ancestors, about: str = "") -> str:
    """Return the card without measured times, so that the same model has the same card."""
    sections = {
        "Intended use": _use(facts, signature, about),
        "Inputs and outputs": _tensors(signature),
        "Limits": _limits(facts, signature),
        "Evaluation": _evaluation_section(facts),
        "Slices": _slices(facts),
        "Calibration": _calibration(facts),
        "Variants": _variants(facts),
        "Data": _data(facts),
        "Lineage": _lineage(facts, ancestors),
    }
    lines = [f"# {facts.name}", "", *_verdict(facts)]
    for title, body in sections.items():
        if text := list(body):
            lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def describe_codec(bundle: Path, codec: str) -> str:
    """Return what the codec's class states of instances and predictions, or else its file, which is not run."""
    path, name = bundle / codec_file(codec), codec.rpartition(":")[2]
    tree = ast.parse(path.read_text() if path.is_file() else "")
    codec_class = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    text = (codec_class and ast.get_docstring(codec_class)) or ast.get_docstring(tree) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _verdict(facts: Facts) -> Iterator[str]:
    yield f"Verdict: **{facts.verdict.get('verdict', 'not evaluated')}**. {facts.verdict.get('summary', '')}".rstrip()
    if facts.pass_reason:
        yield from ("", f"**The gate rejected this model.** It was {facts.pass_reason}.")


def _use(facts: Facts, signature: Signature, about: str) -> Iterator[str]:
    if about:
        yield about
    if kind := " ".join(_kind(facts, signature)):
        yield from (("",) if about else ())
        yield kind


def _kind(facts: Facts, signature: Signature) -> Iterator[str]:
    """Yield what the model does, as far as its outputs and metrics show it."""
    outputs, subject = [f"`{spec.name}`" for spec in signature.outputs], "It"
    if len(outputs) > 1 and signature.generation is None:
        yield f"It has {len(outputs)} outputs: {join_names(outputs, _CLASSES)}."
        labelled = [f"`{spec.name}`" for spec in signature.outputs if spec.labels]
        subject = labelled[0] if len(labelled) == 1 else "One"
    if names := facts.classes:
        yield f"{subject} distinguishes {len(names)} classes: {join_names([f'`{name}`' for name in names], _CLASSES)}."
    elif "ndcg" in facts.candidate:
        yield f"{subject} ranks the items of a query."
    elif {"mae", "rmse"} <= facts.candidate.keys():
        yield f"{subject} estimates numbers."


def _tensors(signature: Signature) -> Iterator[str]:
    rows = []
    for direction, specs in (("in", signature.inputs), ("out", signature.outputs)):
        for spec in specs:
            datatype = f"{spec.datatype}{' or null' * spec.allows_missing}"
            rows.append((f"`{spec.name}`", direction, datatype, " × ".join(map(str, spec.shape))))
    yield from _table(("tensor", "direction", "datatype", "shape"), rows)


def _limits(facts: Facts, signature: Signature) -> Iterator[str]:
    limits = signature.limits
    yield f"- At most {limits.max_batch_size} instances and {limits.max_body_bytes} bytes a request."
    bounds = ((axis, limits.shortest.get(axis, 1), size) for axis, size in sorted(limits.axes.items()))
    yield from (f"- Axis `{axis}`: {shortest} to {longest}." for axis, shortest, longest in bounds)
    if signature.padding:
        yield f"- {_sentence(signature.padding)}"
    if signature.generation is not None:
        yield "- A language model: it continues prompts of its tokenizer."
    if samples := facts.verdict.get("samples"):
        yield f"- Evaluated on {number(samples)} test samples; nothing is known about other kinds of data."
    notes = (variant.get("note") for variant in facts.variants if variant.get("chosen"))  # on the shipped one
    for text in (*(facts.verdict.get("warnings") or ()), *map(str, filter(None, notes))):
        yield f"- {_sentence(text)}"
    if other_slices := [slice_ for slice_ in facts.slices if not slice_.get("judged")]:
        names = ", ".join(_cell(slice_.get("slice")) for slice_ in other_slices[:_CLASSES])
        yield f"- Not compared with the baseline by themselves: {names}."


def _evaluation_section(facts: Facts) -> Iterator[str]:
    for rule in mappings(facts.verdict.get("rules")):
        yield f"- {'passed' if rule.get('passed') else 'FAILED'}: {rule.get('rule')} ({rule.get('detail')})"
    if facts.candidate:
        yield ""
        yield from _metrics(facts)


def _metrics(facts: Facts) -> Iterator[str]:
    owners = {"candidate": facts.candidate, **({"baseline": facts.baseline} if facts.baseline else {})}
    intervals, lower = mapping(facts.metrics.get("intervals")), facts.metrics.get("lower_is_better", ())
    rows = [
        (
            name,
            "lower" if name in lower else "higher",
            *(_estimate(values.get(name), mapping(intervals.get(owner)).get(name)) for owner, values in owners.items()),
        )
        for name in facts.candidate
    ]
    level = f" ({100 * intervals['confidence']:.4g}% interval)" if intervals else ""
    yield from _table(("metric", "better", *(f"{owner}{level}" for owner in owners)), rows)


def _slices(facts: Facts) -> Iterator[str]:
    judged_slices = [slice_ for slice_ in facts.slices if slice_.get("judged")]
    judged_slices.sort(key=lambda slice_: bool(slice_.get("passed")))
    rows = [
        (
            slice_.get("slice"),
            number(slice_.get("samples")),
            number(slice_.get("candidate")),
            number(slice_.get("baseline")),
            _interval(slice_.get("difference")),
            "passed" if slice_.get("passed") else "FAILED",
        )
        for slice_ in judged_slices[:_SLICES]
    ]
    if rows:
        yield from _table(("slice", "samples", "candidate", "baseline", "better by", "outcome"), rows)
    if len(judged_slices) > _SLICES:
        yield from ("", f"{len(judged_slices) - _SLICES} more slices passed.")


def _calibration(facts: Facts) -> Iterator[str]:
    calibrations = {name: facts.calibration[name] for name in ("candidate", "baseline") if facts.calibration.get(name)}
    if not calibrations:
        return
    names = {"ece": "expected calibration error", "brier": "Brier score"}
    measures = calibrations.values()
    rows = [(title, *[number(measure.get(key)) for measure in measures]) for key, title in names.items()]
    yield from _table(("lower is better", *calibrations), rows)


def _variants(facts: Facts) -> Iterator[str]:
    if not facts.variants:
        return
    rows = [
        (
            f"{variant.get('variant')}{' (this bundle)' if variant.get('chosen') else ''}",
            _metric(variant.get("metric")),
            _interval(variant.get("difference")),
            number(variant.get("max_abs_error")),
            number(variant.get("bytes")),
            "passed" if variant.get("passed") else "FAILED",
        )
        for variant in facts.variants
    ]
    yield from _table(("variant", "metric", "better by", "largest error", "bytes", "outcome"), rows)


def _data(facts: Facts) -> Iterator[str]:
    if facts.splits:
        rows = [(name, number(split.get("samples")), split.get("fingerprint")) for name, split in facts.splits.items()]
        yield from _table(("split", "samples", "fingerprint"), rows)
    if problems := [check for check in facts.checks if check.get("level") not in (None, "ok")]:
        yield ""
        for check in problems:
            yield f"- {check.get('level')}: {check.get('check')} of {check.get('where')}, {check.get('detail')}"


def _lineage(facts: Facts, ancestors: Ancestors) -> Iterator[str]:
    rows = [(kind, f"`{digest}`") for kind, digest in ancestors.model_dump().items() if digest]
    yield from _table(("what", "SHA-256"), rows)
    if changes := facts.accepted_changes:
        yield from ("", "Changed, and not run again:", "")
        yield from (f"- {_cell(change)}" for change in changes)


def _metric(metric: Any) -> str:
    return f"{metric.get('name')} {number(metric.get('value'))}" if isinstance(metric, dict) else "–"


def _estimate(value: float | None, bounds: Sequence[float] | None) -> str:
    return number(value) + (f" ({number(bounds[0])} to {number(bounds[1])})" if bounds else "")


def _interval(interval: Body | None) -> str:
    if not interval:
        return "–"
    return f"{signed(interval['estimate'])} ({signed(interval['low'])} to {signed(interval['high'])})"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _sentence(text: str) -> str:
    """Begin with a capital letter, except where the first word is a name of the code."""
    word = text.partition(" ")[0]
    return f"{text[:1].upper() if word.isalpha() else text[:1]}{_cell(text[1:])}."


def _cell(text: object) -> str:
    """Return the text of a table cell, on one line and without the bar that separates cells."""
    return " ".join(str(text).split()).replace("|", "¦")
