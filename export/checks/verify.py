"""Write a model's file and verify that it computes what the model computes, or find why nothing can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from export.checks.cases import evaluated_outputs, to_feed
from export.checks.fault_search import explain_difference
from export.compare import Array, Arrays, rows_with
from export.conversion.optimize import Optimization, check_file, check_random, fit_runtime, read_versions, remove_plain
from export.conversion.to_onnx import ExportResult
from export.conversion.trace import find_operator
from export.report import Report
from export.subject import ModelExporter
from export.tolerance import allowed_error, is_within
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Task
from pipeline.system.errors import StageError

_REPEATED_SAMPLES = 4  # samples that are run twice, and one by one
_BATCH = 64
_RANDOM, _ITEM = torch.Tag.nondeterministic_seeded, torch.ops.aten._local_scalar_dense.default


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


def find_nondeterminism(task: Task, model: nn.Module, test: Samples, config: Export) -> str:
    """Return why torch's outputs are not reproducible, or nothing if the same samples give the same numbers."""
    first, second = (_outputs(task, model, test, range(min(_REPEATED_SAMPLES, len(test)))) for _ in range(2))
    if changed := _quote_names(name for name in first if not np.array_equal(first[name], second[name], equal_nan=True)):
        return (
            f"torch returns different values of {changed} for the same input{_find(task, model, test, _RANDOM)}; "
            "look for functional dropout without training=self.training, noise in a router, or Python's `random`"
        )
    return _nan_outputs(task, model, test) or _depends_on_batch(task, model, test, config, first)


def _nan_outputs(task: Task, model: nn.Module, test: Samples) -> str:
    """Return where torch returns NaN for a sample without missing numbers; empty if nowhere."""
    for start in range(0, len(test), _BATCH):
        batch = test.batch(range(start, min(start + _BATCH, len(test))))
        missing = rows_with(np.isnan, list(to_feed(task, batch).values()))
        for name, answer in evaluated_outputs(task, model, batch).items():
            if (broken := np.isnan(answer).reshape(len(answer), -1).any(axis=1) & ~missing).any():
                sample = start + int(broken.argmax())
                return (
                    f"torch itself returns NaN in `{name}` for test sample {sample}, so no file can equal it; look "
                    "for a division by zero, or a root or logarithm of a number that is not positive"
                )
    return ""


def _depends_on_batch(task: Task, model: nn.Module, test: Samples, config: Export, batched: Arrays) -> str:
    single = [_outputs(task, model, test, range(row, row + 1)) for row in range(min(_REPEATED_SAMPLES, len(test)))]
    parts = {name: [outputs[name] for outputs in single] for name in batched}
    changed = [name for name, answer in batched.items() if not _is_close(parts[name], answer, config)]
    if not changed:
        return ""
    return (
        f"torch's {_quote_names(changed)} for a sample depends on the other samples in the batch"
        f"{_find(task, model, test, _ITEM)}, and a service batches requests of different clients; compute nothing "
        "along the first axis, and no Python number (as by .item()) from the whole batch"
    )


def _find(task: Task, model: nn.Module, test: Samples, wanted: Any) -> str:
    batch = test.batch(range(min(_REPEATED_SAMPLES, len(test))))
    return find_operator(model, [batch[name] for name in task.inputs], wanted).rstrip()


def _is_close(single: Sequence[Array], batched: Array, config: Export) -> bool:
    if any(outputs.shape != (1, *batched.shape[1:]) for outputs in single):
        return False
    joined = np.concatenate(single)
    is_near = is_within(joined, batched, allowed_error(batched, config))
    return bool((is_near | (np.isnan(joined) & np.isnan(batched))).all())


def _outputs(task: Task, model: nn.Module, test: Samples, rows: range) -> Arrays:
    return evaluated_outputs(task, model, test.batch(rows))


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
