"""Looks at live traffic: every sample and every label counts once, and what changed is found."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.contract.bundle import PROBE_ID
from pipeline.contract.samples import Label, sample_table
from pipeline.monitor.look import Finding, Report
from pipeline.system.errors import ConfigError, DataError, ResourceError

from .conftest import Live


def finding(report: Report, rule: str) -> Finding:
    (found,) = [each for each in report.findings if each.rule.rule == rule]
    return found


def nonzero(report: Report) -> dict[str, int]:
    return {name: count for name, count in report.counts.items() if count}


def test_traffic_as_in_training_passes(live: Live) -> None:
    samples = live.samples(live.normal(600))
    live.write(samples, live.labels(samples[:400]))
    report = live.look()
    assert report.verdict == "pass", report.failures
    assert nonzero(report) == {"samples": 600, "samples_waiting": 200, "labels_counted": 400}
    rules = [each.rule.rule for each in report.findings]
    assert sorted(rules) == ["answers.confidence", "answers.predicted", "inputs.pair", "metric.accuracy"]
    assert report.metric is not None
    assert report.metric["low"] < 0.95 < report.metric["high"]
    assert 0.935 < report.metric["promised"] < 0.95


def test_shift_of_an_input_fails_with_its_time(live: Live) -> None:
    live.write(live.samples(live.normal(500)))
    assert live.look().verdict == "pass"
    change = live.clock
    live.write(live.samples(live.normal(500, shift=1.0)))
    report = live.look()
    first = report.failures[0]
    assert first.rule.rule == "inputs.pair"
    found = re.match(r"pair\[0\] is at most \S+ in [\d.]+% of (\d+) samples since it changed, ", first.rule.detail)
    assert found, first.rule.detail
    assert abs(int(found[1]) - 500) < 60
    assert first.since is not None
    assert first.alarm is not None
    assert abs(first.since - change) < 40
    assert change < first.alarm < change + 200
    assert live.look().verdict == "fail"  # with nothing new


def test_worse_labels_fail_though_the_inputs_are_as_before(live: Live) -> None:
    good, bad = live.samples(live.normal(500)), live.samples(live.normal(500))
    live.write([*good, *bad], [*live.labels(good), *live.labels(bad, wrong=0.25)])
    (failure,) = live.look().failures
    assert failure.rule.rule == "metric.accuracy"
    assert failure.alarm is not None
    assert failure.alarm > bad[0].time
    found = re.match(
        r"accuracy 0\.7\d+ on (\d+) labels since it changed; in all, accuracy 0\.8\d+ on 1000 ", failure.rule.detail
    )
    assert found, failure.rule.detail
    assert abs(int(found[1]) - 500) < 150


def test_many_looks_give_what_one_look_gives(live: Live) -> None:
    samples = live.samples(live.normal(300, shift=0.3))
    labels = live.labels(samples)
    for start in range(0, 300, 50):
        live.write(samples[start : start + 50], labels[start : start + 50])
    once = live.look()
    live.monitor().ledger.path.unlink()
    for name in live.folder.sizes("samples"):
        live.folder.remove(name)
    for name in live.folder.sizes("labels"):
        live.folder.remove(name)
    for start in range(0, 300, 50):
        live.write(samples[start : start + 50], labels[start : start + 50])
        last = live.look()
    assert last.findings == once.findings
    assert last.counts == once.counts
    assert last.metric == once.metric


def test_labels_in_another_order_give_the_same_result(live: Live) -> None:
    samples = live.samples(live.normal(200))
    labels = live.labels(samples, wrong=0.2)
    live.write(samples, labels)
    first = live.look()
    live.monitor().ledger.path.unlink()
    for name in live.folder.sizes("labels"):
        live.folder.remove(name)
    live.write([], labels[::-1])
    second = live.look()
    assert second.findings == first.findings
    assert second.metric == first.metric


def test_first_label_of_a_request_counts_and_others_are_repeated(live: Live) -> None:
    samples = live.samples(live.normal(1))
    right = live.labels(samples, wrong=0)
    live.write(samples, [*right, *right, *live.labels(samples, wrong=1)])
    live.write([], right)
    report = live.look()
    assert nonzero(report) == {"samples": 1, "labels_counted": 1, "labels_repeated": 3}
    assert report.metric is not None
    assert report.metric["value"] == 1.0


def test_late_label_counts_when_it_comes(live: Live) -> None:
    samples = live.samples(live.normal(3))
    live.write(samples)
    assert nonzero(live.look()) == {"samples": 3, "samples_waiting": 3}
    live.write(live.samples(live.normal(2)))
    live.look()
    live.write([], live.labels(samples))
    assert nonzero(live.look()) == {"samples": 5, "samples_waiting": 2, "labels_counted": 3}


def test_label_that_comes_before_its_sample_is_kept(live: Live) -> None:
    samples = live.samples(live.normal(2))
    live.write([], [*live.labels(samples), Label("never", 0.0, "0")])
    assert nonzero(live.look()) == {"labels_without_sample": 3}
    live.write(samples)
    assert nonzero(live.look()) == {"samples": 2, "labels_counted": 2, "labels_without_sample": 1}


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ('"third"', 'must be one of the classes, by name or index, found "third"'),
        ("2", "2 is not one of 2 classes"),
        ("-1", "-1 is not one of 2 classes"),
        ("0.5", "must be one of the classes"),
        ("true", "must be one of the classes"),
        ("null", "must be one of the classes"),
        ("[0, 1]", "must be one of the classes"),
        ('{"other": 1}', "must be one of the classes"),
        ("[[1], 2]", "must be one of the classes"),
        ("{", "is not JSON"),
    ],
)
def test_label_of_another_type_is_rejected_and_may_be_corrected(live: Live, label: str, reason: str) -> None:
    samples = live.samples(live.normal(5))
    labels = live.labels(samples)
    live.write(samples, [*labels[:2], Label(samples[2].id, 0.0, label), *labels[3:]])
    report = live.look()
    assert nonzero(report) == {"samples": 5, "samples_waiting": 1, "labels_counted": 4, "labels_rejected": 1}
    assert report.rejected[0].startswith(f"{samples[2].id}: {reason}")
    live.write([], [labels[2]])
    assert live.look().counts["labels_counted"] == 5


@pytest.mark.parametrize("label", ['"second"', "1", "[1]", '{"label": 1}', '["second"]'])
def test_class_may_be_a_name_or_an_index(live: Live, label: str) -> None:
    samples = live.samples(np.array([[0.0, 1.0]]))
    live.write(samples, [Label(samples[0].id, 0.0, label)])
    report = live.look()
    assert report.metric is not None
    assert report.metric["value"] == 1.0


def test_request_with_several_instances_needs_a_label_for_each(live: Live) -> None:
    samples = live.samples(np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]] * 3), rows=3)
    texts = ['[1, "first", 1]', "[1, 0]", "1"]
    live.write(samples, [Label(each.id, 0.0, text) for each, text in zip(samples, texts, strict=True)])
    report = live.look()
    assert nonzero(report) == {"samples": 9, "samples_waiting": 6, "labels_counted": 1, "labels_rejected": 2}
    assert "a list with one label for each of 3 instances" in report.rejected[0]
    assert report.metric is not None
    assert report.metric["labels"] == 3
    assert report.metric["value"] == pytest.approx(2 / 3)


def test_repeated_samples_count_once(live: Live) -> None:
    samples = live.samples(live.normal(4), rows=2)
    live.write([*samples, samples[0]])
    live.write(samples)
    report = live.look()
    assert nonzero(report) == {"samples": 4, "samples_waiting": 4, "samples_repeated": 6}


def test_samples_of_another_bundle_and_probes_do_not_count(live: Live) -> None:
    other = live.samples(live.normal(50, shift=9.0), bundle="f" * 64)
    own = live.samples(live.normal(3))
    live.write([*other, *own, own[0]._replace(id=PROBE_ID)], live.labels([*other[:2], own[0]]))
    report = live.look()
    counts = {"samples": 3, "samples_waiting": 2, "labels_counted": 1}
    assert nonzero(report) == {**counts, "samples_other_bundle": 50, "labels_other_bundle": 2}
    assert report.verdict == "pass"


def test_damaged_files_are_named_and_change_nothing_else(live: Live) -> None:
    good = live.samples(live.normal(3))
    live.write(good)
    for i, data in enumerate((b"", b"PAR1 not really PAR1", b"x" * 100)):
        (live.root / "live" / f"samples-2026-{i}.parquet").write_bytes(data)
    (live.root / "live" / "labels-2026.parquet").write_bytes(b"no")
    whole = (live.root / "live" / next(iter(live.folder.sizes("samples")))).read_bytes()
    (live.root / "live" / "samples-2027.parquet").write_bytes(whole[: len(whole) // 2])
    report = live.look()
    assert len(report.damaged) == 5
    assert report.counts["samples"] == 3
    assert live.look().damaged == report.damaged


def test_file_that_is_damaged_halfway_leaves_no_trace(live: Live) -> None:
    table = sample_table(live.samples(live.normal(4)))
    rows = pa.array([0, 0, 0, None], pa.int32())
    live.folder.write("samples", table.set_column(table.column_names.index("row"), "row", rows))
    report = live.look()
    assert len(report.damaged) == 1
    assert nonzero(report) == {}
    assert finding(report, "inputs.pair").rule.detail == "no sample yet"


def test_killed_look_leaves_the_ledger_as_before(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = live.samples(live.normal(5))
    live.write(samples, live.labels(samples))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.monitor.look.Monitor._store", killed)
        with pytest.raises(KeyboardInterrupt):
            live.look()
    assert nonzero(live.look()) == {"samples": 5, "labels_counted": 5}


def test_second_monitor_at_the_same_time_is_refused(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.monitor.ledger._WAIT_SECONDS", 0.0)
    with live.monitor().ledger.look(), pytest.raises(ResourceError, match="another `pipe monitor` is looking"):
        live.look()


def test_other_alpha_after_the_first_look_is_refused(live: Live) -> None:
    live.write(live.samples(live.normal(2)))
    live.look()
    with pytest.raises(ConfigError, match=r"alpha changed from 0.01 to 0.05 since the first look"):
        live.look(alpha=0.05)


def test_metric_without_bounds_is_shown_and_not_tested(live: Live) -> None:
    samples = live.samples(live.normal(300))
    live.write(samples, live.labels(samples, wrong=0.9))
    report = live.look(metric="margin")
    assert report.verdict == "pass"
    rule = finding(report, "metric.margin").rule
    assert rule.detail.endswith("on 300 labels; shown and not tested, as its values have no bounds")
    assert rule.value is None


def test_unknown_metric_is_a_mistake(live: Live) -> None:
    with pytest.raises(
        ConfigError, match=r"monitor.metric: the verdict of run .* has no f2; it has accuracy, auc, margin"
    ):
        live.look(metric="f2")


def test_inputs_of_another_shape_are_not_compared(live: Live) -> None:
    samples = [
        each._replace(inputs={"pair": np.ones((1, 3 + i % 2), np.float32)})
        for i, each in enumerate(live.samples(live.normal(6)))
    ]
    live.write(samples, live.labels(samples, wrong=0))
    report = live.look()
    assert report.counts["samples"] == 6
    assert finding(report, "inputs.pair").rule.detail == "no sample has it in the form of the training data, [2]"


def test_outputs_that_are_not_numbers_are_counted(live: Live) -> None:
    samples = live.samples(live.normal(2))
    live.write([samples[0]._replace(outputs={"scores": np.full((1, 2), np.nan, np.float32)}), samples[1]])
    assert live.look().counts["answers_unread"] >= 1


def test_labels_of_a_file_count_once(live: Live) -> None:
    samples = live.samples(np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]))
    live.write(samples)
    path = live.root / "labels.csv"
    path.write_text(f"id,label\n{samples[0].id},second\n{samples[1].id},0\n{samples[2].id},what\n")
    for _ in range(2):
        report = live.look(path)
        assert nonzero(report) == {"samples": 3, "samples_waiting": 1, "labels_counted": 2, "labels_rejected": 1}
    path.write_text(f"id,label\n{samples[0].id},second\n{samples[2].id},first\n")
    assert live.look(path).counts["labels_counted"] == 3
    assert live.look(path).counts["labels_repeated"] == 1


def test_file_of_labels_without_its_columns_is_a_mistake(live: Live) -> None:
    path = live.root / "labels.csv"
    path.write_text("id,answer\n1,2\n")
    with pytest.raises(DataError, match=r"labels.csv: has no column label; it needs the columns id and label"):
        live.look(path)
