from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from pipeline.cli import app
from pipeline.contract.run import Run, StepRecord
from pipeline.evaluate.__main__ import evaluate
from pipeline.evaluate.compare_runs import compare_runs, describe_comparison
from pipeline.history import write_record
from pipeline.system.errors import DataError
from pipeline.system.files import digest_tree

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


def evaluated_run(project: Project, answers: str, name: str, task: str = "task.py", **more: Any) -> Run:
    run = project.run(answers, name, task=f"{task}:Greater", evaluate={"margin": 9.0, **more})
    evaluate(run, project.root)
    run.partial("evaluate").rename(run.output("evaluate"))
    outputs = digest_tree(run.output("evaluate"))
    write_record(run, StepRecord(step="evaluate", status="done", key="k", parts={}, outputs=outputs))
    return run


def another(project: Project, old: str, new: str) -> str:
    """Write a changed task to another module, as a module is loaded once per process."""
    text = (project.root / "task.py").read_text()
    assert old in text
    (project.root / "another.py").write_text(text.replace(old, new))
    return "another.py"


def test_runs_with_different_baselines_are_compared_sample_by_sample(with_baseline: Project) -> None:
    first, second = evaluated_run(with_baseline, "right", "one"), evaluated_run(with_baseline, "first", "two")
    found = compare_runs(first, second, first.config.evaluate)
    (row,) = found["metrics"]
    assert (row["metric"], row["candidate"], row["samples"]) == ("accuracy", 1.0, 50)
    wrong = row["mcnemar"]["only_candidate"]
    assert row["difference"]["estimate"] == pytest.approx(wrong / 50)
    assert row["mcnemar"]["only_baseline"] == 0 and row["adjusted_p"] < 0.01
    text = "\n".join(describe_comparison(found))
    assert "accuracy 1.0000 against" in text and "significant (adjusted p" in text
    back = compare_runs(second, first, first.config.evaluate)
    assert back["metrics"][0]["difference"]["estimate"] == -row["difference"]["estimate"]
    assert f"worse by {wrong / 50:.4f} (95% interval +0." in "\n".join(describe_comparison(back))


def test_identical_runs_do_not_differ(with_baseline: Project) -> None:
    first, second = evaluated_run(with_baseline, "first", "one"), evaluated_run(with_baseline, "first", "two")
    found = compare_runs(first, second, first.config.evaluate)
    difference = found["metrics"][0]["difference"]
    assert difference["estimate"] == 0.0
    assert difference["low"] == pytest.approx(-difference["high"])
    assert "the same on average" in "\n".join(describe_comparison(found))


def test_runs_on_different_samples_are_not_compared(with_baseline: Project) -> None:
    first = evaluated_run(with_baseline, "right", "one")
    second = evaluated_run(with_baseline, "right", "two", another(with_baseline, "default_rng(7)", "default_rng(8)"))
    with pytest.raises(DataError, match=r"one and two were evaluated on different test data \(fingerprints \w{12} and"):
        compare_runs(first, second, first.config.evaluate)


def test_missing_changed_or_relabelled_predictions_are_rejected(with_baseline: Project) -> None:
    first, second = evaluated_run(with_baseline, "right", "one"), evaluated_run(with_baseline, "wrong", "two")
    config = first.config.evaluate
    path = second.output("evaluate") / "predictions.npz"
    whole = path.read_bytes()
    path.write_bytes(whole + b" ")
    with pytest.raises(DataError, match=r"predictions\.npz: changed since the evaluation"):
        compare_runs(first, second, config)
    path.unlink()
    with pytest.raises(DataError, match=r"run two has no per-sample predictions; to fix it: `pipe run --resume two`"):
        compare_runs(first, second, config)
    path.write_bytes(whole)
    third = evaluated_run(
        with_baseline,
        "wrong",
        "three",
        another(with_baseline, '        return batch["label"]\n', '        return 1 - batch["label"]\n'),
    )
    with pytest.raises(DataError, match=r"different labels for the same samples \(actual\): the task changed"):
        compare_runs(first, third, config)


def test_different_classes_of_equal_number_are_rejected(with_baseline: Project) -> None:
    first = evaluated_run(with_baseline, "right", "one")
    swapped = another(with_baseline, '("first", "second")', '("second", "first")')
    second = evaluated_run(with_baseline, "right", "two", swapped)
    assert json.loads((second.output("evaluate") / "metrics.json").read_text())["classes"] == ["second", "first"]
    with pytest.raises(DataError, match="have different classes"):
        compare_runs(first, second, first.config.evaluate)


def test_gate_explain_compares_two_runs(with_baseline: Project) -> None:
    first, second = evaluated_run(with_baseline, "right", "one"), evaluated_run(with_baseline, "first", "two")
    other = evaluated_run(with_baseline, "right", "three", another(with_baseline, "default_rng(7)", "default_rng(8)"))
    (with_baseline.root / "pipe.yaml").write_text("name: greater\ntask: task.py:Greater\ncodec: codec.py:None_\n")
    typed = CliRunner()

    def pipe(*words: str) -> Result:
        return typed.invoke(app, ["-C", str(with_baseline.root), *words])

    done = pipe("gate", "explain", first.id, "--against", second.id, "-o", "json")
    assert json.loads(done.stdout)["metrics"][0]["metric"] == "accuracy"
    assert "significant (adjusted p" in pipe("gate", "explain", first.id, "--against", second.id).stdout
    refused = pipe("gate", "explain", first.id, "--against", other.id)
    assert isinstance(refused.exception, DataError)
    assert "pipe gate explain RUN --against RUN" in pipe("compare", first.id, second.id).stderr
    assert "their numbers cannot be compared" in pipe("compare", first.id, other.id).stderr
