"""Write a model's file and verify that it computes what the model computes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from export.checks.fault_search import explain_difference
from export.checks.nondeterminism import find_nondeterminism
from export.conversion.optimize import Optimization, check_file, check_random, fit_runtime, read_versions, remove_plain
from export.conversion.to_onnx import ExportResult
from export.report import Report
from export.subject import ModelExporter
from pipeline.system.errors import StageError


def write_and_compare(exporter: ModelExporter) -> Report:
    """Write the file and compare it with the model; use the plain file if the optimized one differs."""
    path, verified = exporter.subject.path, None
    written = exporter.write()
    if written.is_optimized:
        verified, reason = _verify_optimized(exporter, written.result)
        written = written.restored(path, reason) if verified is None else written
    if (optimization := written.optimization) is not None and optimization.reason:
        print(f"export.optimize={optimization.requested} is not used: {optimization.reason}")
    lowered, report = (fit_runtime(path), verify_file(exporter, written.result)) if verified is None else verified
    remove_plain(path)
    if report.attempts.failures:
        print(report.attempts.text)
    return replace(report, file=_file_facts(path, optimization, lowered))


def _verify_optimized(exporter: ModelExporter, result: ExportResult) -> tuple[tuple[str, Report] | None, str]:
    """Return what was lowered for the runtime and the report, or None and why the file is not used."""
    try:
        lowered, report = fit_runtime(exporter.subject.path), verify_file(exporter, result)
    except StageError as error:  # fusions write operators that ONNX's own rules do not know, for one
        return None, str(error)
    if report.equal or report.nondeterminism:
        return (lowered, report), ""
    return None, f"the optimized file differs from the model: {report.worst()}"


def verify_file(exporter: ModelExporter, result: ExportResult) -> Report:
    """Compare the file with the model in every way that applies to this kind of model, until one differs."""
    subject = exporter.subject
    check_file(subject.path)
    report = Report()
    for phase in exporter.phases(result):
        report += phase
        if not report.equal:
            report = _explain(exporter, result, report)
            break
    else:
        report = replace(report, last_check=exporter.last_check())
    if not report.nondeterminism:  # that of torch itself is explained
        check_random(subject.path)
    return report


def _explain(exporter: ModelExporter, result: ExportResult, report: Report) -> Report:
    """Add why torch cannot be compared with any file, or else where the file begins to differ."""
    subject = exporter.subject
    if nondeterminism := find_nondeterminism(subject.task, subject.model, subject.test, subject.config):
        return replace(report, nondeterminism=nondeterminism)
    return replace(report, cause=explain_difference(result, subject.path, exporter.fault_feeds(), subject.config))


def _file_facts(path: Path, optimization: Optimization | None, lowered: str) -> dict[str, Any]:
    versions = read_versions(path)
    return {
        "opset": versions["opset"],
        "ir_version": versions["IR version"],
        **({"lowered": lowered} if lowered else {}),
        **({"optimize": asdict(optimization)} if optimization is not None else {}),
    }
