"""One look at the live traffic: read what is new, update the tests, and judge."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from pipeline.contract.bundle import PROBE_ID, Bundle
from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.contract.samples import INPUT, Kind, SampleFolder
from pipeline.contract.task import open_task, serving_form
from pipeline.evaluate.rules import GateRule, digits
from pipeline.monitor.ledger import Ledger, Waiting
from pipeline.monitor.reference import (
    DRIFT_SHARE,
    METRIC_SHARE,
    REFERENCE_SHARE,
    Promise,
    Reference,
    answer_columns,
    read_reference,
)
from pipeline.monitor.scoring import Batch, Scorer, WrongLabel
from pipeline.statistics.aggregates import Floats
from pipeline.statistics.metrics import lower_is_better
from pipeline.statistics.sequences import Betting, mean_interval
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import digest_bytes

_ROWS, _REQUESTS = 1024, 256  # at once: samples that are read, and requests that are scored
_MAX_REASONS = 20  # of rejected labels, that are kept
_REQUIRED = {"samples": {"id", "row", "rows", "time", "bundle"}, "labels": {"id", "label"}}


@dataclass(frozen=True)
class Finding:
    """A rule with the times of its alarm, in seconds since the epoch."""

    rule: GateRule
    since: float | None = None  # about when the change began
    alarm: float | None = None  # when it was certain

    def body(self) -> dict[str, Any]:
        return asdict(self.rule) | {"since": self.since, "alarm": self.alarm}


@dataclass(frozen=True)
class Report:
    run: str
    model: str
    bundle: str
    source: str  # where the samples are
    looked: float
    alpha: float
    findings: tuple[Finding, ...]  # what changed first comes first
    metric: Mapping[str, Any] | None
    counts: Mapping[str, int]
    rejected: Sequence[str]
    damaged: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.rule.passed]

    @property
    def verdict(self) -> str:
        return "fail" if self.failures else "pass" if self.counts["samples"] else "not evaluated"


class Monitor:
    """The tests of a run's bundle on samples since a time, with the ledger that keeps them between looks."""

    def __init__(
        self, run: Run, bundle: Bundle, root: Path, config: Config, ledger: Path | None = None, since: float = 0.0
    ) -> None:
        self._run, self._bundle, self._config, self._since = run, bundle, config, since
        task = serving_form(open_task(run, root))
        names, self._lower = bundle.signature.input_specs, lower_is_better(task)
        self._reference = read_reference(run, config, list(names), self._lower)
        self._scorer = Scorer(task, bundle.signature, self._reference.labels)
        self.ledger = Ledger(ledger or run.runs / "monitor" / f"{bundle.digest[:16]}.sqlite")
        self._begin_tests(self._reference, config.monitor.alpha)

    @property
    def promise(self) -> Promise | None:
        return self._reference.promise

    def _begin_tests(self, reference: Reference, alpha: float) -> None:
        columns, promise = reference.columns, reference.promise
        sizes = [2 * len(column.shares) for column in columns]
        limits = [column.limits(REFERENCE_SHARE * alpha / sum(sizes)) for column in columns]
        self._drift = Betting(np.concatenate([*limits, np.empty(0)]), sizes, len(columns) / (DRIFT_SHARE * alpha))
        worst = 0.0 if promise is None else promise.limit if promise.lower else 1 - promise.limit
        self._metric = Betting(np.array([worst]), [1], 1 / (METRIC_SHARE * alpha))

    def look(self, folder: SampleFolder | None, label_files: Sequence[Path] = ()) -> Report:
        with self.ledger.look():
            self._restore()
            kinds: tuple[Kind, ...] = ("samples", "labels")
            for kind in kinds if folder is not None else ():
                assert folder is not None
                for name in filter(self.ledger.is_new, folder.sizes(kind, self._since)):
                    self._read(folder, kind, name)
            for path in label_files:
                self._read_label_file(path)
            self._score()
            self._store()
            return self._report(folder.where if folder else "files of labels")

    def _setup(self) -> dict[str, Any]:
        monitor, promise = self._config.monitor, self._reference.promise
        limits = digest_bytes(self._drift.limits.round(9).tobytes())
        return {"alpha": monitor.alpha, "metric": promise and promise.metric, "reference": limits}

    def _restore(self) -> None:
        setup, before = self._setup(), self.ledger.read("setup")
        if before is None:
            self.ledger.write("setup", setup)
            return
        if changed := [name for name in setup if setup[name] != before[name]]:
            name = changed[0]
            values = "" if name == "reference" else f" from {before[name]} to {setup[name]}"
            raise ConfigError(
                f"monitor: {name} changed{values} since the first look at this bundle, and the guarantee on false "
                f"alarms is for one; to fix it: set it back, or begin anew without {self.ledger.path}"
            )
        state = self.ledger.read("tests")
        self._drift.restore(state["drift"])
        self._metric.restore(state["metric"])

    def _store(self) -> None:
        self.ledger.write("tests", {"drift": self._drift.state(), "metric": self._metric.state()})

    def _read(self, folder: SampleFolder, kind: Kind, name: str) -> None:
        """Read a file; one that is damaged is named, and leaves no trace in the tests."""
        before = copy.deepcopy(self._drift) if kind == "samples" else self._drift
        try:
            table = folder.read(name)
            if table is None:  # deleted meanwhile
                return
            if missing := _REQUIRED[kind] - set(table.column_names):
                raise pa.ArrowInvalid(f"it has no column {min(missing)}")
            if self._since and kind == "samples":
                table = table.filter(pc.greater_equal(table["time"], self._since))
            rows = table.select(sorted(_REQUIRED[kind])).to_pylist()
            with self.ledger.part():
                if kind == "samples":
                    self._add_samples(table, rows)
                else:
                    self._add_labels((row["id"], row["label"]) for row in rows)
                self.ledger.add_file(name)
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            if getattr(error, "errno", None) is not None:  # of the disk or the network: the next look tries again
                raise
            self._drift = before
            self.ledger.add_file(name, " ".join(str(error).split())[:200])

    def _read_label_file(self, path: Path) -> None:
        """Read a file of the user, Parquet or CSV, with the columns id and label."""
        try:
            raw = path.read_bytes()
            if path.suffix.lower() == ".parquet":
                table = parquet.read_table(pa.BufferReader(raw))
            else:
                types = csv.ConvertOptions(column_types={"id": pa.string(), "label": pa.string()})
                table = csv.read_csv(pa.BufferReader(raw), convert_options=types)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"--labels {path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
        if missing := sorted(_REQUIRED["labels"] - set(table.column_names)):
            raise DataError(f"--labels {path}: has no column {missing[0]}; it needs the columns id and label")
        name = f"file:{digest_bytes(raw)}"
        if self.ledger.is_new(name):
            self.ledger.add_file(name)
            rows = table.select(["id", "label"]).to_pylist()
            self._add_labels((str(row["id"]), json.dumps(row["label"], default=str)) for row in rows)

    def _add_labels(self, labels: Iterable[tuple[Any, Any]]) -> None:
        for id_, label in labels:
            if not isinstance(id_, str) or not isinstance(label, str):
                self._reject(str(id_), "has no id or no label")
            elif not self.ledger.add_label(id_, label):
                self.ledger.count("labels_repeated")

    def _reject(self, id_: str, reason: str) -> None:
        self.ledger.count("labels_rejected")
        reasons = self.ledger.read("rejected") or []
        self.ledger.write("rejected", [*reasons, f"{id_}: {reason}"][-_MAX_REASONS:])

    def _add_samples(self, table: pa.Table, rows: list[dict[str, Any]]) -> None:
        """Add the rows of a file that are new; those that this bundle answered go through the tests."""
        known, repeated = self.ledger.known(sorted({str(row["id"]) for row in rows})), 0
        own: list[int] = []
        others: list[int] = []
        for i, row in enumerate(rows):
            key = (str(row["id"]), int(row["row"]))
            if key[0] == PROBE_ID:
                continue
            if key in known:
                repeated += 1
                continue
            known.add(key)
            (own if row["bundle"] == self._bundle.digest else others).append(i)
        self.ledger.count("samples_repeated", repeated)
        self.ledger.add_samples((*_key(rows[i]), None, True) for i in others)
        for start in range(0, len(own), _ROWS):
            part = own[start : start + _ROWS]
            for places, batch in self._scorer.batches(table.take(part)):
                self._add_batch(table, [part[i] for i in places], rows, batch)

    def _add_batch(self, table: pa.Table, places: list[int], rows: list[dict[str, Any]], batch: Batch) -> None:
        self._drift.update(self._shares(batch, len(places)), [rows[i]["time"] for i in places])
        blobs: list[bytes | None] = [None] * len(places)
        if self._scorer.is_evaluated and batch:  # redact() may have left nothing
            part = table.select(self._scorer.waiting_columns(batch)).take(places)
            blobs = [_pack(part.slice(i, 1)) for i in range(len(places))]
        self.ledger.add_samples((*_key(rows[i]), blob, False) for i, blob in zip(places, blobs, strict=True))

    def _shares(self, batch: Batch, count: int) -> Floats:
        """Return a row for each sample; NaN where a column is missing, or of another form than in training."""
        columns = {name.removeprefix(INPUT): column for name, column in batch.items() if name.startswith(INPUT)}
        answers = self._scorer.answers(batch)
        if answers is None:
            self.ledger.count("answers_unread", count)
        of_answers = answer_columns(answers or {}, self._scorer.classes is not None)
        parts = []
        for column in self._reference.columns:
            tensor = (columns if column.kind == "inputs" else of_answers).get(column.name)
            values = None if tensor is None else column.values(tensor)
            parts.append(np.full((count, 2 * len(column.shares)), np.nan) if values is None else values)
        return np.concatenate([*parts, np.empty((count, 0))], axis=1)

    def _score(self) -> None:
        """Score the requests whose label has come, in the order of their time."""
        requests: dict[str, list[Waiting]] = {}
        for row in self.ledger.labelled():
            requests.setdefault(row.id, []).append(row)
        complete = [rows for rows in requests.values() if len(rows) == rows[0].rows]
        parts = [complete[start : start + _REQUESTS] for start in range(0, len(complete), _REQUESTS)]
        scored = np.array([pair for part in parts for pair in self._score_requests(part)]).reshape(-1, 2)
        promise = self._reference.promise
        if promise is None:
            return
        worse = scored[:, 1:] if promise.lower else 1 - scored[:, 1:]
        if promise.untested:
            self._metric.counts += len(worse)
            self._metric.sums += worse.sum()
        else:
            self._metric.update(worse, scored[:, 0])

    def _score_requests(self, requests: list[list[Waiting]]) -> list[tuple[float, float]]:
        """Return the time and the metric of each row; of requests whose labels do not fit, halves are tried."""
        rows = [row for request in requests for row in request]
        try:
            table = pa.concat_tables([_unpack(row.data) for row in rows], promote_options="permissive")
            values = self._values(table, [label for request in requests for label in _labels(request)])
        except WrongLabel as error:
            if len(requests) > 1:
                middle = len(requests) // 2
                return [*self._score_requests(requests[:middle]), *self._score_requests(requests[middle:])]
            self._reject(rows[0].id, str(error))
            self.ledger.reject_label(rows[0].id)
            return []
        for request in requests:
            self.ledger.use_label(request[0].id)
        return [(row.time, value) for row, value in zip(rows, values, strict=True)]

    def _values(self, table: pa.Table, labels: list[Any]) -> list[float]:
        promise = self._reference.promise
        values: list[float] = []
        for places, batch in self._scorer.batches(table):
            columns = self._scorer.score(batch, [labels[i] for i in places])
            column = columns.get(promise.metric) if promise is not None else None
            values += [math.nan] * len(places) if column is None else column.tolist()
            if column is not None and not np.isfinite(column).all():
                raise WrongLabel("the metric is not finite for it")
        if promise is not None and not promise.untested and not all(0 <= value <= 1 for value in values):
            raise WrongLabel(f"{promise.metric} is {max(values, key=abs)}, and was 0 or 1 on the test set")
        return values

    def _report(self, source: str) -> Report:
        findings = [*self._drift_findings(), *self._metric_finding()]
        findings.sort(key=lambda finding: (finding.rule.passed, finding.since or 0.0))
        ledger, config = self.ledger, self._config
        return Report(
            run=self._run.id,
            model=config.name,
            bundle=self._bundle.digest,
            source=source,
            looked=time.time(),
            alpha=config.monitor.alpha,
            findings=tuple(findings),
            metric=self._metric_facts(),
            counts=ledger.counts(),
            rejected=ledger.read("rejected") or [],
            damaged=ledger.damaged_files(),
            notes=self._reference.notes,
        )

    def _metric_facts(self) -> dict[str, Any] | None:
        promise = self._reference.promise
        if promise is None:
            return None
        count, worse = float(self._metric.counts[0]), float(self._metric.sums[0])
        total = worse if promise.lower else count - worse
        interval = None if promise.untested else mean_interval(total, count, METRIC_SHARE * self._config.monitor.alpha)
        return {
            "metric": promise.metric,
            "labels": int(count),
            "value": total / count if count and math.isfinite(total) else None,
            "low": interval and interval.low,
            "high": interval and interval.high,
            "promised": promise.limit,
        }

    def _metric_finding(self) -> Iterator[Finding]:
        promise, facts = self._reference.promise, self._metric_facts()
        if promise is None or facts is None:
            return
        name, count, value = f"metric.{promise.metric}", facts["labels"], facts["value"]
        measured = f"{promise.metric} {digits(value)} on {count} labels" if value is not None else f"{count} labels"
        if promise.untested:
            text = f"{measured}; shown and not tested, as {promise.untested}"
            yield Finding(GateRule(name, True, text))
            return
        if facts["low"] is not None:
            measured += f" (between {digits(facts['low'])} and {digits(facts['high'])} at every look)"
        latest, worse = self._metric.latest(0, 0)
        if latest < count:
            since = digits((worse if promise.lower else latest - worse) / latest)
            measured = f"{promise.metric} {since} on {latest:.0f} labels since it changed; in all, {measured}"
        side = "at most" if promise.lower else "at least"
        text = f"{measured}, promised is {side} {digits(promise.limit)}"
        yield _finding(name, self._metric, 0, text, "bets that the metric is worse than its limit in the verdict")

    def _drift_findings(self) -> Iterator[Finding]:
        start, drift = 0, self._drift
        for i, column in enumerate(self._reference.columns):
            size = len(column.shares)
            place = int(drift.gains[start : start + 2 * size].argmax()) % size
            share, (count, total) = column.shares[place], drift.latest(i, start + place)
            text = f"no sample has it in the form of the training data, {column.summary and list(column.summary.shape)}"
            if count:
                when = " since it changed" if np.isfinite(drift.alarms[i]) else ""
                text = f"{share.text} in {total / count:.1%} of {count:.0f} samples{when}"
                text += f", in {share.mean:.1%} of the reference"
            elif not drift.count:
                text = "no sample yet"
            how = f"bets on each of {size} shares of the reference, which has {share.samples} samples"
            yield _finding(f"{column.kind}.{column.name}", drift, i, text, how)
            start += 2 * size


def _finding(name: str, tests: Betting, place: int, text: str, how: str) -> Finding:
    e_value, is_alarm = float(tests.e_values[place]), bool(np.isfinite(tests.alarms[place]))
    since, alarm = (float(times[place]) if is_alarm else None for times in (tests.since, tests.alarms))
    rule = GateRule(
        name, not is_alarm, text, e_value, tests.threshold, f"{how}; an e-value of {tests.threshold:.0f} is certain"
    )
    return Finding(rule, since, alarm)


def _labels(request: list[Waiting]) -> list[Any]:
    """Return a label for each row; that of a single one may be in a list."""
    try:
        label = json.loads(request[0].label)
    except ValueError as error:
        raise WrongLabel("is not JSON") from error
    if len(request) == 1:
        return label if isinstance(label, list) and len(label) == 1 else [label]
    if not isinstance(label, list) or len(label) != len(request):
        raise WrongLabel(f"must be a list with one label for each of {len(request)} instances")
    return label


def _key(row: Mapping[str, Any]) -> tuple[str, int, int, float]:
    return str(row["id"]), int(row["row"]), int(row["rows"]), float(row["time"])


def _pack(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _unpack(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
