"""The export step: `python -m export RUN` turns an evaluated checkpoint into a verified bundle.

It also writes the provenance of the bundle: settings, package versions and the digest of the exporter's own source.
"""

from __future__ import annotations

import logging
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from export.bundle import Sources, columns_with_nan, fill_bundle
from export.model_card import describe_codec, render_card
from export.official_weights import write_official_weights
from export.other_formats import FOLDER as FORMATS
from export.other_formats import FORMATS_FILE, Original, require_formats, write_formats
from export.padding import PaddingEffect
from export.service_sizes import ServedSizes
from export.to_onnx import tensor_specs
from export.variants.choose import (
    FP32,
    VariantEvaluation,
    VariantResult,
    decide,
    explanations,
    rows,
    ship,
    table,
    to_candidates,
)
from export.variants.choose import VARIANTS_FILE as VARIANTS
from export.verify import Verification, verify_model
from pipeline.contract.bundle import (
    OVERRIDDEN,
    PROVENANCE,
    Ancestors,
    Manifest,
    Override,
    open_bundle,
    passed_gate,
    statement,
    write_manifest,
    write_override,
)
from pipeline.contract.bundle import OVERRIDE_FILE as OVERRIDE
from pipeline.contract.data import check_columns, open_split
from pipeline.contract.prompting import check_prompting
from pipeline.contract.results import read_facts
from pipeline.contract.run import Run, run_step
from pipeline.contract.signature import BUNDLED_SETTINGS, Signature
from pipeline.contract.task import FOLDER, build_model, check_export, load_weights, open_task
from pipeline.system.errors import GateError, StageError
from pipeline.system.files import digest_file, digest_mapping, write_json
from pipeline.system.sources import code_digest, package_sources

WEIGHTS = "weights"  # folder of the official ones


def export(run: Run, root: Path) -> None:
    config, weights = run.config, run.output("train") / "model.safetensors"
    verdict, override = _allowed_verdict(run, digest_file(weights))
    bundle = run.partial("export") / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    logging.getLogger().setLevel(logging.WARNING)  # a quantizer of ONNX Runtime sets INFO when it is imported
    for name in ("torch.onnx", "onnx_ir"):  # they log every missing optional package
        logging.getLogger(name).setLevel(logging.ERROR)
    task = open_task(run, root)
    check_prompting(task, run.output("prepare") / FOLDER)
    check_export(task, config.export)
    test = open_split(task, "test").collated()
    check_columns(task, test)
    model = load_weights(build_model(task, run), weights)
    files = run.output("prepare") / FOLDER
    if config.export.adapter == "merged" and (
        line := write_official_weights(model, files, run.partial("export") / WEIGHTS)
    ):
        print(line, flush=True)
    file = bundle / "model.onnx"
    served, limits = ServedSizes.from_settings(config.serve), config.evaluate.require
    verification = verify_model(task, model, test, config.export, file, served, limits)
    write_json(run.partial("export") / "parity.json", _parity(run, verification, len(test), file))
    verification.require()
    print("\n".join(_describe_verification(verification, len(test))), flush=True)
    _write_other_formats(
        run,
        Original(task, model, test, config.export, file, {spec.name: spec for spec in tensor_specs(file)[0]}, files),
    )
    variant = _ship_variant(run, VariantEvaluation(task, model, test, config, file, run.partial("export") / "variants"))
    write_json(run.partial("export") / "parity.json", _parity(run, verification, len(test), file, variant.name))
    missing = columns_with_nan(run.output("prepare") / "profile.json")
    properties = replace(verification.properties, variant=variant.name, error=variant.rounding, missing=missing)
    signature = fill_bundle(bundle, task, test, config, Sources(root, files), properties)
    if override is not None:
        write_override(bundle, override)
    ancestors = _ancestors(run, root, weights, bundle)
    (bundle / "card.md").write_text(
        render_card(read_facts(run), signature, ancestors, describe_codec(bundle, signature.codec))
    )
    digest = write_manifest(bundle, config.name, OVERRIDDEN if override else str(verdict["verdict"]), ancestors)
    write_provenance(bundle, run, signature)
    open_bundle(bundle)  # what a server will do
    print(f"bundle {digest[:12]}, variant {variant.name}")


def _describe_verification(verification: Verification, samples: int) -> Iterator[str]:
    worst = max(row["max_abs_error"] for row in verification.all_rows)
    sizes = sorted({row["batch_size"] for row in verification.comparisons})
    yield f"equal to torch on {samples} test samples at batch sizes {sizes}; largest difference {worst:.2g}"
    yield verification.weights.text
    if verification.padding.padding and not verification.padding.differing:
        yield f"equal with and without padding, {verification.padding.samples} padded test samples"
    if verification.padding.text:
        yield f"warning: {verification.padding.text}"
    if verification.greedy:
        greedy = verification.greedy
        yield f"greedy answers to {greedy['prompts']} prompts are torch's, {greedy['tokens']} tokens"


def _write_other_formats(run: Run, original: Original) -> None:
    """Write the other formats from the verified file, before a variant replaces it."""
    if original.config.formats == ("onnx",):
        return
    rows = write_formats(original, run.partial("export") / FORMATS)
    write_json(run.partial("export") / FORMATS_FILE, rows)
    for row in rows:
        if row["passed"]:
            print(f"{row['format']}: equal to torch, largest difference {row['max_abs_error']:.2g}", flush=True)
    require_formats(rows)


def _ship_variant(run: Run, contest: VariantEvaluation) -> VariantResult:
    """Put the chosen variant into the bundle, and record what became of all of them."""
    metric, record = run.config.evaluate.metric, run.partial("export") / VARIANTS
    shutil.rmtree(contest.folder, ignore_errors=True)
    entries = contest.entries()
    choice = decide(run.config.export, to_candidates(entries))
    write_json(record, rows(entries, choice.reasons, choice.name, metric))
    print("\n".join([*table(entries, choice.name, metric), *explanations(entries, choice.reasons)]), flush=True)
    if choice.refusal:
        raise StageError(choice.refusal)
    variant = next(entry for entry in entries if entry.name == choice.name)
    variant = replace(variant, rounding=contest.rounding(variant))
    ship(variant, contest.path)
    shutil.rmtree(contest.folder, ignore_errors=True)
    return variant


def _allowed_verdict(run: Run, checkpoint: str) -> tuple[dict[str, Any], Override | None]:
    """Return the verdict on this checkpoint and its override, if any; raise if neither lets it pass."""
    verdict = run.verdict()
    if verdict["checkpoint"] != checkpoint:
        raise StageError("the verdict is about another checkpoint than train/model.safetensors; evaluate again")
    if passed_gate(str(verdict["verdict"])):
        return verdict, None
    override = run.override(digest_file(run.output("evaluate") / "verdict.json"))
    if override is None:
        raise GateError(
            f"the verdict is `{verdict['verdict']}`: {verdict['summary']}; "
            f"`pipe gate override {run.id} --reason WHY` overrides it, on record"
        )
    return verdict, override


def _ancestors(run: Run, root: Path, weights: Path, bundle: Path) -> Ancestors:
    return Ancestors(
        code=code_digest(root, run.config.task, run.config.codec),
        data=digest_file(run.output("prepare") / "data.json"),
        checkpoint=digest_file(weights),
        verdict=digest_file(run.output("evaluate") / "verdict.json"),
        onnx=digest_file(bundle / "model.onnx"),
        override=digest_file(bundle / OVERRIDE) if (bundle / OVERRIDE).exists() else "",
        test_set=str(run.verdict().get("test_fingerprint") or ""),
    )


def _parity(run: Run, verification: Verification, samples: int, model: Path, variant: str = FP32) -> dict[str, Any]:
    """Return parity.json: `runs` compare fp32 with torch; `variant` and the rest describe the shipped file."""
    config = run.config.export
    return {
        "variant": variant,
        "rtol": config.rtol,
        "atol": config.atol,
        "samples": samples,
        "onnx_bytes": model.stat().st_size,
        "onnx_sha256": digest_file(model),
        "runs": verification.comparisons,
        **({"greedy": verification.greedy} if verification.greedy else {}),
        **verification.file,
        **({"padding": asdict(verification.padding)} if verification.padding != PaddingEffect() else {}),
        "coverage": verification.coverage.rows,
        "weights": {**asdict(verification.weights), "text": verification.weights.text},
        "left_out": verification.coverage.left_out,
        "versions": {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__},
    }


_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
_SECTIONS = ("name", "task", "codec", "prepare", "model", "train", "evaluate", "export")


def write_provenance(bundle: Path, run: Run, signature: Signature) -> None:
    """Write provenance.json; the manifest must exist, because it is one of the subjects."""
    raw = (bundle / "manifest.json").read_bytes()
    config = run.planned.model_dump(mode="json")  # as the run was started; its results are identified by it
    properties: dict[str, Any] = {name: config[name] for name in _SECTIONS}
    properties["serve"] = {name: config["serve"][name] for name in BUNDLED_SETTINGS}
    packages = _versions(_PACKAGES) | dict(_split_pin(pin) for pin in signature.requires)
    source = digest_mapping(package_sources("export", "pipeline.contract", "pipeline.statistics", "pipeline.system"))
    builder = {"python": platform.python_version(), "source": source}
    builder |= _versions(("pipe-road",))
    write_json(bundle / PROVENANCE, statement(Manifest.model_validate_json(raw), raw, properties, packages, builder))


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _split_pin(pin: str) -> tuple[str, str]:
    """Split `name==1.2` into name and version."""
    name, _, version = pin.partition("==")
    return name, version


if __name__ == "__main__":
    sys.exit(run_step("export", export, sys.argv[1:]))
