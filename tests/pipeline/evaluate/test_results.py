from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pipeline.evaluate.__main__ import evaluate
from pipeline.evaluate.results import describe_verdict, explain
from pipeline.system.errors import GateError

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


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
    assert "power: 50 samples show a true difference of" in text
    assert "McNemar's exact test: p = " in text and "permutation test: p = " in text
