"""All variants of one file: which pass, which are stopped at which node, and which is shipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from export.conversion.to_onnx import save_stripped
from export.kinds import open_exporter
from export.llm.kind import LanguageExporter
from export.ordinary import OrdinaryExporter
from export.subject import Subject
from export.variants.choose import VariantEvaluation, VariantResult, decide, explanations, rows, ship, table
from export.variants.quantize import CONVERTERS, Converter, VariantInputs
from pipeline.contract.data import open_split
from pipeline.contract.task import check_export
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_file

from .net import CLASSES, Hills, config, write

ALL = ["fp32", "fp16", "int8-dynamic", "int8-static"]
Damage = Callable[[onnx.ModelProto], None]


@pytest.fixture(autouse=True)
def short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.variants.choose.TIMING_SECONDS", 0.05)


def contest(
    folder: Path,
    converters: Mapping[str, Converter] = CONVERTERS,
    task: Any = None,
    external: bool = False,
    **export: Any,
) -> VariantEvaluation:
    task = task or Hills()
    path = write(folder / "bundle" / "model.onnx", external=external)
    settings = config(**{"variants": ALL, **export})
    kind = open_exporter(Subject(task, task.model(), open_split(task, "test"), settings.export, path))
    return VariantEvaluation(kind, settings, folder / "variants", converters)


def by_name(entries: list[VariantResult]) -> dict[str, VariantResult]:
    return {one.name: one for one in entries}


def damaging(name: str, damage: Damage) -> dict[str, Converter]:
    """Return the converters, one of which writes a damaged file."""

    def maker(material: VariantInputs, path: Path) -> str:
        message = CONVERTERS[name](material, path)
        model = onnx.load(path)
        damage(model)
        save_stripped(model, path, external=False)
        return message

    return {**CONVERTERS, name: maker}


def half_of_the_classes(model: onnx.ModelProto) -> None:
    """Set the weights of half the classes to zero, like a quantizer with wrong scales."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).copy()
        if array.ndim == 2 and CLASSES in array.shape:
            array[(slice(None), slice(0, 4)) if array.shape[1] == CLASSES else slice(0, 4)] = 0
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def not_a_number(model: onnx.ModelProto) -> None:
    bias = next(one for one in model.graph.initializer if numpy_helper.to_array(one).dtype == np.float16)
    array = numpy_helper.to_array(bias)
    bias.CopyFrom(numpy_helper.from_array(np.full_like(array, np.nan), bias.name))


def another_output(model: onnx.ModelProto) -> None:
    old = model.graph.output[0].name
    model.graph.output[0].name = "other"
    for node in model.graph.node:
        node.output[:] = ["other" if name == old else name for name in node.output]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[VariantEvaluation, list[VariantResult]]:
    one = contest(tmp_path_factory.mktemp("contest"))
    return one, one.entries()


def test_undamaged_variants_pass_with_their_own_measurements(
    whole: tuple[VariantEvaluation, list[VariantResult]],
) -> None:
    entries = whole[1]
    assert [one.name for one in entries] == ALL
    assert [one.faults for one in entries] == [()] * 4
    errors = [one.deviation.largest for one in entries if one.deviation]
    assert errors[0] < 1e-5 < errors[1] < errors[3]
    for one in entries:
        assert one.outcome is not None
        assert (one.outcome.samples, one.outcome.reference) == (256, 1.0)
        assert one.outcome.value > 0.97
        assert one.timing is not None
        assert one.timing.p50_ms.keys() == {1, 32}
        assert one.first_wrong is None
    assert [one.bytes for one in entries] == [one.path.stat().st_size for one in entries]


def test_record_has_what_the_report_reads_and_is_plain_json(
    whole: tuple[VariantEvaluation, list[VariantResult]],
) -> None:
    entries = whole[1]
    found = decide(whole[0].config.export, entries)
    body = json.loads(json.dumps(rows(entries, found.reasons, found.name, "accuracy"), allow_nan=False))
    assert [(row["variant"], row["chosen"], row["passed"]) for row in body] == [
        ("fp32", True, True),
        ("fp16", False, True),
        ("int8-dynamic", False, True),
        ("int8-static", False, True),
    ]
    static = body[3]
    assert static["metric"] == {"name": "accuracy", "value": static["metric"]["value"], "reference": 1.0}
    assert static["difference"].keys() == {"estimate", "low", "high"}
    assert static["p50_ms"].keys() == static["p99_ms"].keys() == {"1", "32"}
    assert static["note"] == "ranges from 256 rows of training samples"
    assert static["first_wrong"] is None
    lines = table(entries, found.name, "accuracy")
    assert [line.split()[:2] for line in lines[:2]] == [["variant", "accuracy"], ["*", "fp32"]]
    assert len(lines) == 5
    assert len(explanations(entries, found.reasons)) == 4


def test_rounding_tolerance_is_bounded_by_the_rounding(whole: tuple[VariantEvaluation, list[VariantResult]]) -> None:
    slack = {one.name: whole[0].rounding(one) for one in whole[1]}
    largest = {one.name: one.deviation.largest for one in whole[1] if one.deviation}
    assert slack["fp32"] == 0
    assert slack["fp16"] == largest["fp16"]
    assert slack["int8-dynamic"] == largest["int8-dynamic"] / 4
    assert 0 <= slack["int8-static"] < 2 * largest["int8-static"]


def test_zeroed_classes_are_stopped_and_named(tmp_path: Path) -> None:
    one = contest(tmp_path, damaging("int8-static", half_of_the_classes), choose="int8-static")
    before = digest_file(one.path)
    entries = one.entries()
    broken = by_name(entries)["int8-static"]
    assert any("accuracy is" in fault and "misses the margin of -0.05" in fault for fault in broken.faults)
    assert any("0.5 are allowed" in fault for fault in broken.faults)
    assert broken.first_wrong is not None
    assert (broken.first_wrong.node, broken.first_wrong.op) == ("last", "Gemm")
    found = decide(one.config.export, entries)
    assert (found.name, "export.choose=int8-static is not shipped: accuracy is" in found.refusal) == ("", True)
    assert not any(row["chosen"] for row in rows(entries, found.reasons, "", "accuracy"))
    assert "the first node that is wrong is `last` (Gemm)" in explanations(entries, found.reasons)[3]
    fastest = decide(config(variants=ALL, choose="fastest-that-passes").export, entries)
    assert fastest.name in ("fp32", "fp16", "int8-dynamic")
    assert digest_file(one.path) == before


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("fp16", not_a_number, "0.05 are allowed"),
        ("int8-dynamic", half_of_the_classes, "misses the margin"),
        ("fp16", another_output, "its inputs and outputs are others than those of fp32, which codec and clients know"),
    ],
)
def test_damage_of_any_kind_is_a_fault_of_that_variant_alone(
    name: str, damage: Damage, message: str, tmp_path: Path
) -> None:
    entries = by_name(contest(tmp_path, damaging(name, damage), variants=["fp32", name]).entries())
    assert entries["fp32"].faults == ()
    assert message in "; ".join(entries[name].faults)


def test_failing_converter_is_reported_and_others_continue(tmp_path: Path) -> None:
    def broken(material: VariantInputs, path: Path) -> str:
        raise KeyError("a scale")

    entries = by_name(contest(tmp_path, {**CONVERTERS, "int8-static": broken}, variants=ALL[2:]).entries())
    assert entries["int8-static"].faults == ("it cannot be made: KeyError: 'a scale'",)
    assert entries["int8-static"].bytes == 0
    assert entries["int8-dynamic"].faults == ()
    body = rows(list(entries.values()), dict.fromkeys(entries, ""), "fp32", "accuracy")
    assert [row["p50_ms"] is None for row in body] == [False, False, True]


def test_calibration_data_of_another_type_is_a_fault_of_its_variant(tmp_path: Path) -> None:
    task = Hills({"x": np.ones((64, 16)), "label": np.zeros(64, np.int64)})
    entries = by_name(contest(tmp_path, task=task, variants=["int8-static"]).entries())
    assert "data('train') gives `x` as float64, the model takes float32" in entries["int8-static"].faults[0]
    assert entries["fp32"].faults == ()


def test_budget_is_applied_to_each_variant(tmp_path: Path) -> None:
    limit = 0.011  # megabytes, between fp32 and int8
    budget = {"megabytes": limit, "p50_ms": 1e6, "p99_ms": 1e-9}
    entries = by_name(contest(tmp_path, variants=["int8-static"], budget=budget).entries())
    assert [len(entries[name].faults) for name in ("fp32", "int8-static")] == [2, 1]
    assert entries["fp32"].faults[0].endswith("MB exceed export.budget megabytes=0.011")
    assert "over export.budget p99_ms=1e-09" in entries["int8-static"].faults[0]


def test_required_metric_that_torch_reaches_holds_for_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.variants.judge.INT8_NOISE", 1)
    settings: dict[str, Any] = {"variant_margin": 1, "evaluate": {"require": {"accuracy": 0.999}}}
    makers = damaging("int8-static", half_of_the_classes)
    entries = by_name(contest(tmp_path, makers, variants=["int8-static"], **settings).entries())
    assert "is below the required 0.999, which torch's answers reach" in entries["int8-static"].faults[0]


def test_shipped_bytes_are_those_evaluated(tmp_path: Path) -> None:
    one = contest(tmp_path, variants=["fp16"], external=True)
    entry = by_name(one.entries())["fp16"]
    assert entry.faults == ()
    before, size = digest_file(entry.path), entry.bytes
    ship(entry, one.path)
    assert digest_file(one.path) == before
    assert sum(path.stat().st_size for path in one.path.parent.iterdir()) == size


def test_single_test_sample_cannot_evaluate_a_variant(tmp_path: Path) -> None:
    one = contest(tmp_path, variants=["int8-dynamic"])
    few = replace(one, exporter=open_exporter(replace(one.exporter.subject, test=one.exporter.subject.test.first(1))))
    entries = by_name(few.entries())
    assert entries["int8-dynamic"].faults == ("accuracy cannot be evaluated on a single test sample",)
    assert entries["fp32"].faults == ()  # it is compared number by number


class OnlyVerified(OrdinaryExporter):
    measures_fp32_alone = LanguageExporter.measures_fp32_alone

    def open_variants(self, config: Any) -> Any:
        raise AssertionError("it must not be run")


def test_size_budget_applies_without_a_comparison(tmp_path: Path) -> None:
    evaluation = contest(tmp_path, variants=["fp32"], budget={"megabytes": 1e-6})
    (entry,) = replace(evaluation, exporter=OnlyVerified(evaluation.exporter.subject)).entries()
    assert entry.faults[0].endswith("MB exceed export.budget megabytes=1e-06")
    assert entry.outcome is None


def test_variants_of_other_kinds_of_models_are_refused() -> None:
    check_export(Hills(), config(variants=ALL).export)
    with pytest.raises(ConfigError, match="int4 is not for this model; use int8-dynamic or int8-static"):
        check_export(Hills(), config(variants=["int4"]).export)
    with pytest.raises(ConfigError, match="perplexity is only known of language models"):
        check_export(Hills(), config(budget={"perplexity": 0.1}).export)
