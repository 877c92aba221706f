"""The metric of a canary and of the stable version, by the labels of requests since its observation began."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.canary import LabelMetric, VersionMetric
from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.system.errors import ConfigError

if TYPE_CHECKING:
    from k8s.cluster.history import Version
    from k8s.deploy import CompareLabels


def label_reader(root: Path, runs: Path, config: Config, report: Callable[[str], None]) -> CompareLabels:
    """Return a function that compares two versions; why it cannot is reported once."""
    report_once = functools.cache(report)

    def read(stable: Version | None, canary: Version, since: float) -> LabelMetric | str:
        try:
            if missing := [name for name in ("sample", "sample_to") if not getattr(config.serve, name)]:
                raise ConfigError(f"serve.{missing[0]} is not set")
            if stable is None:
                raise ConfigError("what serves was not deployed by pipe")
            return _compare(root, config, [(Run(runs / each.run), each.bundle) for each in (stable, canary)], since)
        except Exception as error:  # of the store's package or of user code, too: requests are compared in any case
            problem = " ".join(str(error).split())[:200]
            report_once(f"canary: labels are not compared: {problem}")
            return problem

    return read


def _compare(root: Path, config: Config, versions: list[tuple[Run, str]], since: float) -> LabelMetric:
    """Compare two runs with their bundles, the canary's last."""
    from pipeline.contract.samples import SampleFolder  # numpy and torch are slow to load
    from pipeline.monitor.look import Monitor

    if absent := [run.id for run, _ in versions if not (run.bundle_path / "manifest.json").is_file()]:
        raise ConfigError(f"run {absent[0]} is not on this machine")
    where, metrics, is_lower = config.serve.sample_to, [], False
    name = config.monitor.metric or str(versions[-1][0].verdict()["metric"])
    config = config.model_copy(update={"monitor": config.monitor.model_copy(update={"metric": name})})
    samples, folder = 0, SampleFolder(where if "://" in where else str(root / where))
    with tempfile.TemporaryDirectory() as ledgers:
        for run, digest in versions:
            monitor = Monitor(run, run.require_bundle(digest), root, config, Path(ledgers, digest), since)
            if monitor.promise is None or monitor.promise.untested:
                reason = monitor.promise.untested if monitor.promise else "its evaluation has no predictions"
                raise ConfigError(f"{name} of run {run.id} has no confidence sequence, as {reason}")
            report = monitor.look(folder)
            samples, facts = samples + report.counts["samples"], report.metric or {}
            interval = (facts["value"], facts["low"], facts["high"]) if facts["labels"] else (0.0, 0.0, 1.0)
            metrics.append(VersionMetric(facts["labels"], *interval))
            is_lower = monitor.promise.lower
    if not samples:
        raise ConfigError(f"{where} has no samples of this observation")
    return LabelMetric(name, is_lower, config.evaluate.accepted_loss, *metrics)
