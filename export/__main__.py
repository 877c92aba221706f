"""The export step: `python -m export RUN` turns an evaluated checkpoint into a verified bundle."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import torch

from export.bundle import Sources, columns_with_nan, fill_bundle, write_provenance
from export.checks.service_sizes import ServedSizes
from export.checks.verify import write_and_compare
from export.kinds import open_exporter
from export.model_card import describe_codec, render_card
from export.other_formats import FORMATS_FILE, FORMATS_FOLDER, require_formats, write_formats, write_official_weights
from export.report import Report
from export.subject import ModelExporter, Subject
from export.variants import choose
from export.variants.choose import VariantResult
from pipeline.contract.bundle import (
    NOT_EVALUATED,
    OVERRIDDEN,
    OVERRIDE_FILE,
    Ancestors,
    Override,
    open_bundle,
    passed_gate,
    write_manifest,
    write_override,
)
from pipeline.contract.data import check_columns, open_split
from pipeline.contract.prompting import check_prompting
from pipeline.contract.results import read_facts
from pipeline.contract.run import Run, step_main
from pipeline.contract.task import (
    SHARED_FOLDER,
    build_model,
    check_export,
    load_weights,
    open_task,
    served_model,
    serving_form,
)
from pipeline.system.errors import GateError, StageError
from pipeline.system.files import digest_file, write_json
from pipeline.system.sources import code_digest

TRANSFORMERS_FOLDER = "weights"  # the weights in the format of transformers


def export(run: Run, root: Path) -> None:
    weights = run.output("train") / "model.safetensors"
    override = _required_override(run, digest_file(weights))
    exporter = _open_exporter(run, root, weights)
    _write_official_weights(run, exporter)
    report = write_and_compare(exporter)
    _write_parity(run, exporter, report)  # also of a file that differs, before that ends the step
    report.require(exporter.subject.config)
    print("\n".join(_describe(report, len(exporter.subject.test), exporter.original)), flush=True)
    _write_other_formats(run, exporter)
    variant = _ship_variant(run, exporter)
    _write_parity(run, exporter, report, variant.name)
    digest = _seal(run, root, exporter, report, variant, override)
    print(f"bundle {digest[:12]}, variant {variant.name}")


def _required_override(run: Run, checkpoint: str) -> Override | None:
    """Return the override of the verdict on this checkpoint, if any; raise where it failed and has none."""
    verdict = run.verdict()
    if verdict["checkpoint"] != checkpoint:
        raise StageError("the verdict is about another checkpoint than train/model.safetensors; evaluate again")
    if passed_gate(str(verdict["verdict"])):
        return None
    override = run.override(digest_file(run.output("evaluate") / "verdict.json"))
    if override is None and verdict["verdict"] != NOT_EVALUATED:
        raise GateError(
            f"the verdict is `{verdict['verdict']}`: {verdict['summary']}; "
            f"`pipe gate override {run.id} --reason WHY` overrides it, on record"
        )
    return override


def _open_exporter(run: Run, root: Path, weights: Path) -> ModelExporter:
    """Load the checkpoint and its test set, and empty the folder of the bundle."""
    config, files, bundle = run.config, run.output("prepare") / SHARED_FOLDER, run.partial("export") / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    logging.getLogger().setLevel(logging.WARNING)  # a quantizer of ONNX Runtime sets INFO when it is imported
    task = serving_form(open_task(run, root))
    check_prompting(task, files)
    check_export(task, config.export)
    test = open_split(task, "test").collated()
    check_columns(task, test)
    model = served_model(task, load_weights(build_model(task, run), weights))
    served, path = ServedSizes.from_settings(config.serve), bundle / "model.onnx"
    return open_exporter(Subject(task, model, test, config.export, path, served, config.evaluate.require, files))


def _write_official_weights(run: Run, exporter: ModelExporter) -> None:
    if run.config.export.adapter == "merged":
        files, folder = run.output("prepare") / SHARED_FOLDER, run.partial("export") / TRANSFORMERS_FOLDER
        if line := write_official_weights(exporter.subject.model, files, folder):
            print(line, flush=True)


def _write_parity(run: Run, exporter: ModelExporter, report: Report, variant: str = choose.FP32) -> None:
    """Write parity.json: comparisons of fp32 with torch, and the name, size and digest of the shipped variant."""
    config, path = run.config.export, exporter.subject.path
    body = {
        "variant": variant,
        "original": exporter.original,
        "rtol": config.rtol,
        "atol": config.atol,
        "samples": len(exporter.subject.test),
        "onnx_bytes": path.stat().st_size,
        "onnx_sha256": digest_file(path),
        "versions": {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__},
    }
    write_json(run.partial("export") / "parity.json", body | report.record())


def _describe(report: Report, samples: int, original: str) -> Iterator[str]:
    worst = max(row["max_abs_error"] for row in report.rows)
    sizes = sorted({row["batch_size"] for row in report.test_set})
    yield f"equal to {original} on {samples} test samples at batch sizes {sizes}; largest difference {worst:.2g}"
    yield report.weights.text
    yield from report.last_check.lines


def _write_other_formats(run: Run, exporter: ModelExporter) -> None:
    """Write the other formats from the verified file, before a variant replaces it."""
    if exporter.subject.config.formats == ("onnx",):
        return
    rows = write_formats(exporter, run.partial("export") / FORMATS_FOLDER)
    write_json(run.partial("export") / FORMATS_FILE, rows)
    for row in rows:
        if row["passed"]:
            print(f"{row['format']}: equal to torch, largest difference {row['max_abs_error']:.2g}", flush=True)
    require_formats(rows)


def _ship_variant(run: Run, exporter: ModelExporter) -> VariantResult:
    """Put the chosen variant into the bundle, and record what became of all of them."""
    metric, record = run.config.evaluate.metric, run.partial("export") / choose.VARIANTS_FILE
    contest = choose.VariantEvaluation(exporter, run.config, run.partial("export") / "variants", exporter.converters)
    shutil.rmtree(contest.folder, ignore_errors=True)
    entries = contest.entries()
    choice = choose.decide(run.config.export, entries)
    write_json(record, choose.rows(entries, choice.reasons, choice.name, metric))
    if any(entry.outcome or entry.faults for entry in entries):
        lines = [*choose.table(entries, choice.name, metric), *choose.explanations(entries, choice.reasons)]
        print("\n".join(lines), flush=True)
    if choice.refusal:
        raise StageError(choice.refusal)
    variant = next(entry for entry in entries if entry.name == choice.name)
    variant = replace(variant, rounding=contest.rounding(variant))
    choose.ship(variant, contest.path)
    shutil.rmtree(contest.folder, ignore_errors=True)
    return variant


def _seal(
    run: Run, root: Path, exporter: ModelExporter, report: Report, variant: VariantResult, override: Override | None
) -> str:
    """Write everything beside model.onnx, open the bundle as a server does, and return its digest."""
    bundle, files = exporter.subject.path.parent, run.output("prepare") / SHARED_FOLDER
    properties = replace(
        exporter.properties,
        variant=variant.name,
        rounding=variant.rounding,
        padding=report.last_check.padding,
        missing=columns_with_nan(run.output("prepare") / "profile.json"),
    )
    signature = fill_bundle(bundle, exporter, run.config, Sources(root, files), properties)
    if override is not None:
        write_override(bundle, override)
    ancestors = _ancestors(run, root, run.output("train") / "model.safetensors", bundle)
    card = render_card(read_facts(run), signature, ancestors, describe_codec(bundle, signature.codec))
    (bundle / "card.md").write_text(card)
    verdict = OVERRIDDEN if override else str(run.verdict()["verdict"])
    digest = write_manifest(bundle, run.config.name, verdict, ancestors)
    write_provenance(bundle, run, signature)
    open_bundle(bundle)
    return digest


def _ancestors(run: Run, root: Path, weights: Path, bundle: Path) -> Ancestors:
    return Ancestors(
        code=code_digest(root, run.config.task, run.config.codec),
        data=digest_file(run.output("prepare") / "data.json"),
        checkpoint=digest_file(weights),
        verdict=digest_file(run.output("evaluate") / "verdict.json"),
        onnx=digest_file(bundle / "model.onnx"),
        override=digest_file(bundle / OVERRIDE_FILE) if (bundle / OVERRIDE_FILE).exists() else "",
        test_set=str(run.verdict().get("test_fingerprint") or ""),
    )


def main(argv: Sequence[str]) -> int:
    return step_main("export", export, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
