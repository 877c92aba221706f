from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.contract.data import fingerprint, open_split
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.task import load_task
from pipeline.evaluate.__main__ import choose_device, evaluate, shard_range
from pipeline.evaluate.results import describe_verdict, explain
from pipeline.history import write_record
from pipeline.system.errors import ConfigError, DataError, GateError, StageError
from pipeline.system.files import write_json
from pipeline.system.processes import Rank

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


LENIENT = {"margin": 2.0}  # everything passes


def written(run: Run, name: str) -> Any:
    return json.loads((run.partial("evaluate") / name).read_text())


def test_candidate_equal_to_the_baseline_passes(with_baseline: Project) -> None:
    run = with_baseline.run("right")
    evaluate(run, with_baseline.root)
    verdict = written(run, "verdict.json")
    assert (verdict["verdict"], verdict["baseline"]) == ("pass", {"kind": "task", "bundle": None})
    assert verdict["difference"]["estimate"] == 0
    assert verdict["mcnemar"] == {"p_value": 1, "only_candidate": 0, "only_baseline": 0}


def counted(project: Project, name: str, weights: str, **settings: Any) -> Any:
    """Evaluate a run that is counted; return its verdict.json."""
    run = project.run(weights, name, evaluate=LENIENT | settings)
    write_record(run, StepRecord(step="evaluate", status="running", key=name, parts={}))
    evaluate(run, project.root)
    return written(run, "verdict.json")


def test_repeated_comparisons_on_one_test_set_widen_the_interval(with_baseline: Project) -> None:
    """The same predictions count once, over all runs and codecs; the first comparison is as configured."""

    def interval(name: str, weights: str) -> tuple[int, str, float]:
        body = counted(with_baseline, name, weights, widen="always")
        (use,) = [line for line in describe_verdict(explain(body, None)) if line.startswith("comparison ")]
        assert f"comparison {body['comparison']['number']} on this test set, interval at " in use
        return body["comparison"]["number"], body["comparison"]["level"], body["difference"]["low"]

    alone = with_baseline.run("first", "alone", evaluate=LENIENT)
    evaluate(alone, with_baseline.root)  # without a record, as in a notebook: not counted
    first = interval("one", "first")
    assert first == (1, "95%", written(alone, "verdict.json")["difference"]["low"])
    assert interval("codec", "first") == first, "the same predictions again"
    second = interval("two", "wrong")
    assert second[:2] == (2, "98.3%")
    third = interval("three", "right")
    assert third[:2] == (3, "99.17%")
    assert interval("again", "wrong") == second
    intervals = written(Run(with_baseline.runs / "three"), "metrics.json")["intervals"]
    assert intervals["confidence"] == 0.95, "of all metrics, which decide nothing"


def test_comparisons_of_one_author_do_not_widen_the_interval(
    with_baseline: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(with_baseline, "one", "first")
    own = counted(with_baseline, "two", "wrong")
    assert "(comparison 2 on this test set, not widened, 95% interval " in own["summary"]
    assert own["comparison"]["text"].endswith("interval at 95%, not widened: evaluate.widen is shared, authors: 1")
    monkeypatch.setattr("pipeline.contract.registry.current_user", lambda: "another@elsewhere")
    never = counted(with_baseline, "three", "right", widen="never")
    assert (never["comparison"]["number"], never["comparison"]["level"]) == (3, "95%")
    shared = counted(with_baseline, "four", "right")
    assert (shared["comparison"]["number"], shared["comparison"]["level"]) == (3, "99.17%")


def test_without_a_baseline_nothing_is_compared_and_nothing_counted(project: Project) -> None:
    run = project.run("right")
    write_record(run, StepRecord(step="evaluate", status="running", key="k", parts={}))
    evaluate(run, project.root)
    verdict = written(run, "verdict.json")
    assert (verdict["verdict"], verdict["comparison"]) == ("no-baseline", None)
    assert written(run, "metrics.json")["baseline"] is None
    assert not (project.runs / "registry").exists()


def test_rejected_candidate_leaves_all_files(with_baseline: Project) -> None:
    run = with_baseline.run("wrong", evaluate={"require": {"accuracy": 0.9}})
    with pytest.raises(GateError, match=r"accuracy 0\.0000 is 0\.9 below the required 0\.9 \(also failed: non-inf"):
        evaluate(run, with_baseline.root)
    verdict, metrics = written(run, "verdict.json"), written(run, "metrics.json")
    assert verdict["verdict"] == "fail"
    assert verdict["mcnemar"]["only_baseline"] == 50
    assert metrics["candidate"] == {"accuracy": 0.0}
    assert metrics["baseline"] == {"accuracy": 1.0}
    assert (run.partial("evaluate") / "predictions.npz").is_file()


def test_verdict_warns_that_the_best_checkpoint_was_lost(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    run = project.run("right")
    write_json(run.output("train") / "summary.json", {"best_step": 200, "lost_best": {"step": 48, "loss": 0.1}})
    evaluate(run, project.root)
    sentence = "the model is of step 200, because the better checkpoint of step 48 was damaged"
    assert f"warning: {sentence}" in capsys.readouterr().out
    assert any(warning.startswith(sentence) for warning in written(run, "verdict.json")["warnings"])


def test_predictions_metrics_and_confusion_are_consistent(with_baseline: Project) -> None:
    run = with_baseline.run("first", evaluate=LENIENT)
    evaluate(run, with_baseline.root)
    metrics = written(run, "metrics.json")
    with np.load(run.partial("evaluate") / "predictions.npz", allow_pickle=False) as arrays:
        actual = arrays["actual"]
        assert arrays["candidate.predicted"].tolist() == [0] * 50
        assert (arrays["baseline.predicted"] == actual).all()
        assert arrays["candidate.accuracy"].mean() == metrics["candidate"]["accuracy"]
    firsts = int((actual == 0).sum())
    assert metrics["confusion"] == [[firsts, 0], [50 - firsts, 0]]
    assert metrics["per_class"]["first"]["recall"] == 1
    assert metrics["per_class"]["second"] == {"samples": 50 - firsts, "precision": None, "recall": 0, "f1": 0}


def test_nan_metric_fails_and_is_written_as_null(with_baseline: Project) -> None:
    with_baseline.replace(".float()}", '.float().where(batch["pair"][:, 0] < 1, torch.nan)}')
    run = with_baseline.run("right")
    with pytest.raises(GateError, match="accuracy of the candidate is not a finite number"):
        evaluate(run, with_baseline.root)
    assert written(run, "metrics.json")["candidate"] == {"accuracy": None}
    assert written(run, "verdict.json")["difference"] is None


def test_compared_metric_must_exist(project: Project) -> None:
    run = project.run("right", evaluate={"metric": "f1"})
    with pytest.raises(ConfigError, match=r"evaluate\.metric: the task has no metric f1 \(it has accuracy\)"):
        evaluate(run, project.root)


def test_only_the_data_recorded_by_prepare_are_accepted(project: Project) -> None:
    run = project.run("right")
    expected = fingerprint(open_split(load_task("task.py:Greater", project.root), "test"))
    run.output("prepare").mkdir()
    write_json(run.output("prepare") / "data.json", {"splits": {"test": {"fingerprint": expected}}})
    evaluate(run, project.root)
    assert written(run, "metrics.json")["test_fingerprint"] == expected
    write_json(run.output("prepare") / "data.json", {"splits": {"test": {"fingerprint": "f" * 64}}})
    with pytest.raises(DataError, match=r"data\('test'\) changed since prepare"):
        evaluate(run, project.root)


def test_missing_weights_are_named(project: Project) -> None:
    run = project.run("right")
    (run.output("train") / "model.safetensors").unlink()
    with pytest.raises(StageError, match="run the train step first"):
        evaluate(run, project.root)


def test_task_without_classes_is_evaluated(with_baseline: Project) -> None:
    with_baseline.replace('    classes = ("first", "second")\n', "")
    run = with_baseline.run("right")
    evaluate(run, with_baseline.root)
    metrics = written(run, "metrics.json")
    assert metrics["classes"] is metrics["per_class"] is metrics["confusion"] is None
    assert written(run, "verdict.json")["verdict"] == "pass"


def test_single_test_sample_decides_nothing(with_baseline: Project) -> None:
    with_baseline.replace("size=(50, 2)", "size=(1, 2)")
    with_baseline.add("    def probabilities(self, outputs):\n        return outputs.softmax(dim=1)\n")
    run = with_baseline.run("right", evaluate={"require": {"ece": 1.0}})
    with pytest.raises(GateError, match="inconclusive: accuracy cannot be compared with the baseline"):
        evaluate(run, with_baseline.root)
    verdict, metrics = written(run, "verdict.json"), written(run, "metrics.json")
    assert verdict["detectable"] is None
    assert any("too few samples to evaluate" in warning for warning in verdict["warnings"])
    assert metrics["undefined"] == {"auc": "the test set has samples of a single class"}
    assert verdict["calibration"]["candidate"]["intervals"]["ece"] is None


def test_regression_and_ranking_tasks_are_evaluated(with_baseline: Project) -> None:
    with_baseline.replace('    classes = ("first", "second")\n', "")
    run = with_baseline.run("first", evaluate={"metric": "rmse", "margin": 9.0, "require": {"rmse": 1.0}})
    evaluate(run, with_baseline.root)
    assert list(written(run, "metrics.json")["candidate"]) == ["accuracy", "mae", "r2", "rmse", "spearman"]
    assert "rmse 0." in written(run, "verdict.json")["summary"]
    assert written(run, "worst.json")["metric"] == "rmse"
    text = (with_baseline.root / "task.py").read_text()
    (with_baseline.root / "lists.py").write_text(
        text + "    def queries(self, batch):\n        return (batch['pair'][:, 0] * 2).long()\n"
    )
    run = with_baseline.run("right", "two", task="lists.py:Greater", evaluate={"metric": "ndcg", "margin": 0.4})
    evaluate(run, with_baseline.root)
    assert written(run, "verdict.json")["verdict"] == "pass"
    assert set(written(run, "metrics.json")["candidate"]) == {"accuracy", "ndcg", "mrr", "auc"}


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 360])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shards_cover_every_sample_once_in_order_and_start_with_a_batch(samples: int, world_size: int) -> None:
    shares = [shard_range(Rank(rank, rank, world_size), samples, batch_size=4) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(samples))
    assert all(share.start % 4 == 0 or share.start == samples for share in shares)


def test_processes_use_different_gpus_and_a_missing_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [choose_device("auto", Rank(i, i, 3)).index for i in range(3)] == [0, 1, 0]
    assert choose_device("cpu", Rank()).type == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto", Rank()).type == "cpu"
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        choose_device("cuda", Rank())


def test_rejection_is_explained_with_rules_power_and_tests(with_baseline: Project) -> None:
    run = with_baseline.run("first", evaluate={"require": {"accuracy": 0.9}})
    with pytest.raises(GateError):
        evaluate(run, with_baseline.root)
    run.partial("evaluate").rename(run.output("evaluate"))
    found = explain(dict(run.verdict()), None)
    rules = {rule["rule"]: rule for rule in found["rules"]}
    assert {"finite", "require.accuracy", "non-inferior"} <= set(rules)
    assert rules["require.accuracy"]["limit"] == 0.9
    assert rules["non-inferior"]["value"] < rules["non-inferior"]["limit"] == -0.1
    assert found["power"]["samples_for_margin"] > 50 == found["power"]["samples"]
    text = "\n".join(describe_verdict(found))
    assert text.startswith("fail: accuracy ")
    assert "what would change it: a limit of" in text
    assert "or more shows in four of five test sets of 50 samples" in text
    assert text.endswith("to let it pass anyway: `pipe gate override RUN --reason WHY`")
    assert "McNemar's exact test: p = " in text and "permutation test: p = " in text
