from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.contract.bundle import open_bundle
from pipeline.contract.registry import ProposedChange, change_registry, publish, read_registry
from pipeline.contract.run import Run
from pipeline.evaluate.__main__ import evaluate
from pipeline.system.errors import BundleError, DataError, GateError
from pipeline.system.files import digest_file, write_json

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('raise RuntimeError("no solver")', r"baseline\(\): RuntimeError: no solver"),
        ('return lambda batch: batch["picture"]', r"baseline\(\): its predictor failed: KeyError: 'picture'"),
        ('return lambda batch: batch["pair"][:-1]', r"returned scores of shape \(49, 2\) for 50 samples"),
    ],
)
def test_baseline_that_cannot_be_fitted_or_predict_is_named(project: Project, body: str, message: str) -> None:
    project.add(f"    def baseline(self):\n        {body}\n")
    with pytest.raises(DataError, match=message):
        evaluate(project.run("right"), project.root)


def test_equal_inputs_and_a_random_baseline_give_equal_bytes(project: Project) -> None:
    project.add("""
    def baseline(self):
        noise = torch.rand(1, 2)
        return lambda batch: batch["pair"] + noise
""")
    runs = [project.run("right", name, evaluate={"margin": 2.0}) for name in ("one", "two")]
    for run in runs:
        evaluate(run, project.root)
    for name in ("verdict.json", "metrics.json", "predictions.npz"):
        first, second = ((run.partial("evaluate") / name).read_bytes() for run in runs)
        assert first == second


def baseline_of(run: Run) -> object:
    return json.loads((run.partial("evaluate") / "verdict.json").read_text())["baseline"]


def test_champion_replaces_the_baseline_of_the_task(with_baseline: Project) -> None:
    bundle = with_baseline.crown("wrong")
    run = with_baseline.run("right")
    evaluate(run, with_baseline.root)
    assert baseline_of(run) == {"kind": "champion", "bundle": digest_file(bundle / "manifest.json")}
    assert json.loads((run.partial("evaluate") / "metrics.json").read_text())["baseline"] == {"accuracy": 0.0}
    champion = json.loads((run.partial("evaluate") / "champion.json").read_text())
    assert (champion["run"], champion["bundle"], champion["reason"]) == (
        "old",
        digest_file(bundle / "manifest.json"),
        "test",
    )
    assert champion["registry"] == "", "its own run had it"


def test_champion_without_local_run_comes_from_the_shared_registry(project: Project, tmp_path: Path) -> None:
    registry = str(tmp_path / "shared")
    bundle = project.crown("right")
    entry = read_registry(project.runs, "").names["champion"]
    change_registry(project.runs, registry, lambda _: ProposedChange("champion", entry, "shared"))
    publish(open_bundle(bundle), project.runs, registry)
    shutil.rmtree(bundle)
    run = project.run("right")
    body = json.loads((run.path / "run.json").read_text())
    write_json(run.path / "run.json", {**body, "config": {**body["config"], "registry": registry}})
    evaluate(Run(run.path), project.root)
    assert baseline_of(run) == {"kind": "champion", "bundle": entry.bundle}
    assert json.loads((run.partial("evaluate") / "champion.json").read_text())["registry"] == registry


def test_champion_with_caches_starts_with_empty_ones(project: Project) -> None:
    bundle = project.crown("wrong", cached=True)
    run = project.run("right")
    evaluate(run, project.root)
    assert baseline_of(run) == {"kind": "champion", "bundle": digest_file(bundle / "manifest.json")}
    assert json.loads((run.partial("evaluate") / "metrics.json").read_text())["baseline"] == {"accuracy": 0.0}


def test_champion_is_not_compared_with_itself(project: Project) -> None:
    run = project.run("right")
    project.crown("right", checkpoint=digest_file(run.output("train") / "model.safetensors"))
    evaluate(run, project.root)
    assert baseline_of(run) is None


def test_tampered_champion_is_rejected(project: Project) -> None:
    bundle = project.crown("right")
    (bundle / "card.md").write_text("# better\n")
    with pytest.raises(BundleError, match="content changed since export"):
        evaluate(project.run("right"), project.root)


def test_champion_with_other_inputs_is_rejected(project: Project) -> None:
    project.crown("right", inputs="picture")
    with pytest.raises(BundleError, match="does not accept this task's data: no column picture"):
        evaluate(project.run("right"), project.root)


TWO_RULES = {"rule": "superior", "margin": 0.02, "champion_margin": 0.1}


def test_a_model_as_good_as_the_champion_passes(with_baseline: Project) -> None:
    with_baseline.crown("right")
    run = with_baseline.run("right", evaluate=TWO_RULES)
    evaluate(run, with_baseline.root)
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    assert (verdict["rule"], verdict["margin"]) == ("non-inferior", 0.1)
    assert "against the champion's 1.0000" in verdict["summary"]
    (rule,) = [rule for rule in verdict["rules"] if rule["rule"] == "non-inferior"]
    assert rule["detail"].startswith("accuracy is at most 0.")


def test_a_model_worse_than_the_champion_is_rejected(with_baseline: Project) -> None:
    with_baseline.crown("right")
    with pytest.raises(GateError, match=r"accuracy is 0\.\d+ worse than the champion's and may be 0\.\d+ worse"):
        evaluate(with_baseline.run("first", evaluate=TWO_RULES), with_baseline.root)
