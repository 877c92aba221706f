from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.bundle import Override, read_override, write_override
from pipeline.contract.config import Config
from pipeline.contract.run import Run, StepRecord
from pipeline.display import Display
from pipeline.history import Project, load_history, publish_step, write_record
from pipeline.override import outputs_with_override, override_verdict, reuse_override, verdict_digest
from pipeline.plan import decide_step, digest_key, key_parts
from pipeline.resume import latest_unfinished
from pipeline.run import _finish_step
from pipeline.system.errors import BundleError, ConfigError, GateError
from pipeline.system.files import write_json
from pipeline.work import RunRequest, Work

from .conftest import NewRun

RULE = {"rule": "require.accuracy", "passed": False, "detail": "too low", "how": "measured", "change": "a lower floor"}
FAILED = {"verdict": "fail", "summary": "accuracy 0.5", "checkpoint": "c", "samples": 9, "margin": 0.1, "rules": [RULE]}


def evaluated(run: Run, status: str = "rejected", verdict: str = "fail", key: str = "k") -> Run:
    run.partial("evaluate").mkdir()
    write_json(run.partial("evaluate") / "verdict.json", {**FAILED, "verdict": verdict})
    outputs, digest = publish_step(run, "evaluate")
    values = {"step": "evaluate", "status": status, "key": key, "parts": {}, "outputs": outputs, "digest": digest}
    write_record(run, StepRecord.model_validate(values))
    return run


def record_of(run: Run) -> StepRecord:
    return run.read().steps["evaluate"]


def test_override_names_the_verdict_it_is_about(new_run: NewRun, project: Project) -> None:
    run = evaluated(new_run())
    given = override_verdict(run, "  shown on\nMonday ")
    assert (given.reason, given.verdict) == ("shown on Monday", verdict_digest(run))
    assert "@" in given.by
    assert read_override(run.path) == given
    assert record_of(run).status == "overridden"
    assert run.verdict()["verdict"] == "fail", "the verdict itself stays"
    assert latest_unfinished(project).id == run.id


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_without_a_reason_nothing_is_overridden(new_run: NewRun, reason: str) -> None:
    run = evaluated(new_run())
    with pytest.raises(ConfigError, match="--reason is empty"):
        override_verdict(run, reason)
    assert read_override(run.path) is None


def test_only_a_failed_verdict_can_be_overridden_and_only_once(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match="has no verdict yet"):
        override_verdict(run, "why not")
    evaluated(run, "done", "pass")
    with pytest.raises(ConfigError, match="was not rejected, its verdict is `pass`; there is nothing to override"):
        override_verdict(run, "why not")
    other = evaluated(new_run())
    override_verdict(other, "first")
    with pytest.raises(ConfigError, match=r"overridden by .*: first; an override cannot be changed"):
        override_verdict(other, "second")


def test_a_verdict_that_changed_on_disk_is_not_overridden(new_run: NewRun) -> None:
    run = evaluated(new_run())
    (run.output("evaluate") / "verdict.json").write_text(json.dumps(FAILED | {"summary": "accuracy 0.9"}))
    with pytest.raises(BundleError, match=r"evaluate/verdict\.json changed on disk"):
        override_verdict(run, "why not")


def test_override_reuses_the_evaluation_and_reruns_the_export(
    new_run: NewRun, config: Config, project: Project
) -> None:
    before = {"prepare": {"data.json": "1", "near_copies.json": "3"}, "train": {"model.safetensors": "2"}}
    run = new_run()
    key = digest_key(key_parts("evaluate", config, project, before))
    run = evaluated(run, key=key)

    def step(name: str) -> tuple[str, str]:
        work = Work(project, config, RunRequest(("evaluate", "export")), [(run, run.read())], outputs=dict(before))
        work.outputs["evaluate"] = outputs_with_override(run, record_of(run))
        found = work.decide(name)
        return found.action, found.key

    assert step("evaluate")[0] == "run", "a rejected candidate is evaluated again"
    export = step("export")[1]
    override_verdict(run, "one")
    assert step("evaluate") == ("reuse", key)
    assert step("export")[1] != export
    printed = Override(at="later", by="ann", reason="another", verdict=verdict_digest(run))
    first = step("export")[1]
    write_override(run.path, printed)
    assert step("export")[1] != first, "the reason is part of the bundle"


def test_override_applies_to_the_same_verdict_of_a_later_run_only(
    new_run: NewRun, project: Project, config: Config
) -> None:
    first, again, other = evaluated(new_run()), new_run(), new_run()
    given = override_verdict(first, "for a reproduction")
    history = load_history(project.runs)
    work = Work(project, config, RunRequest(("evaluate",)), history)
    for run, summary in ((again, FAILED["summary"]), (other, "accuracy 0.4")):
        run.partial("evaluate").mkdir()
        write_json(run.partial("evaluate") / "verdict.json", {**FAILED, "summary": summary})
    record = StepRecord(step="evaluate", status="running", key="k", parts={})
    display = Display(live=False)
    display.start(again, "evaluate", "again")
    done = _finish_step(work, again, record, GateError("rejected"), display)
    assert (done.status, done.reason, read_override(again.path)) == ("overridden", "rejected", given)
    with pytest.raises(GateError):
        _finish_step(work, other, record, GateError("rejected"), display)
    assert record_of(other).status == "rejected"
    assert reuse_override(other, [first]) is None


def test_gate_commands_explain_and_override_a_verdict(new_run: NewRun, folder: Path) -> None:
    run, typed = evaluated(new_run()), CliRunner()

    def pipe(*words: str) -> str:
        done = typed.invoke(app, ["-C", str(folder), "gate", *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    text = pipe("explain", run.id)
    assert "FAILED  require.accuracy: too low" in text
    assert "how: measured" in text and "what would change it: a lower floor" in text
    assert json.loads(pipe("override", run.id, "--reason", "a test", "-o", "json"))["reason"] == "a test"
    found = json.loads(pipe("explain", "-o", "json"))
    assert (found["run"], found["verdict"], found["override"]["reason"]) == (run.id, "fail", "a test")
    assert found["rules"] == [RULE]
    write_json(run.output("evaluate") / "verdict.json", {**FAILED, "verdict": "pass"})
    with pytest.raises(BundleError, match=r"verdict\.json changed on disk"):
        pipe("explain", run.id)


def test_overridden_step_is_reused() -> None:
    made = StepRecord(step="evaluate", status="overridden", key=digest_key({}), parts={})
    assert decide_step("evaluate", {}, [("one", made)], False, lambda *_: []).action == "reuse"
