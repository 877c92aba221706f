"""`pipe monitor` as a command: exit codes, words, JSON, gauges, the page, and what an alarm starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k8s.objects.jobs import monitor_job
from pipeline.contract.config import Config, override_config
from pipeline.service.process import process_started, write_live

from ..cli.conftest import run_here
from ..records import live_service
from .conftest import Live, make_live

Pipe = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def pipe(live: Live, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    return run_here(live.root, monkeypatch)


@pytest.fixture
def drifted(live: Live) -> Live:
    samples = live.samples(live.normal(300, shift=1.5))
    live.write(samples, live.labels(samples[:100]))
    return live


def test_model_as_promised_exits_with_0(pipe: Pipe, live: Live) -> None:
    samples = live.samples(live.normal(50))
    live.write(samples, live.labels(samples))
    lines = pipe("monitor", "--samples", "live").stdout.splitlines()
    assert lines[0] == f"run {live.run.id}, bundle {live.bundle[:12]}"
    assert lines[1] == "pass: as promised, by 50 samples and 50 labels"
    assert sum(line.startswith("passed  ") for line in lines) == 4


def test_run_that_is_live_is_monitored_else_the_newest(
    pipe: Pipe, live: Live, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    newest = make_live(other, name="20270101-000000-bbbb").run.path
    shutil.copytree(newest, live.run.runs / newest.name)
    assert pipe("monitor", "--samples", "live").stdout.startswith(f"run {newest.name}, ")
    write_live(
        live.run.runs, live_service(run=live.run.id, pid=os.getpid(), process_started=process_started(os.getpid()))
    )
    assert pipe("monitor", "--samples", "live").stdout.startswith(f"run {live.run.id}, ")


def test_model_not_as_promised_exits_with_3_in_the_words_of_the_gate(pipe: Pipe, drifted: Live) -> None:
    printed = pipe("monitor", drifted.run.id, "--samples", str(drifted.root / "live"), expect=3).stdout
    assert re.search(r"fail: \S+ changed first, about 2023-11-14 22:13:\d\d UTC; ", printed)
    assert re.search(r"FAILED  inputs\.pair: pair\[0\] is at most", printed)
    assert "certain at 2023-11-14 22:" in printed


def test_command_of_the_cron_job_names_run_and_samples(pipe: Pipe, drifted: Live) -> None:
    job = monitor_job(monitored_config(drifted), drifted.run.path)["spec"]["jobTemplate"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "pipeline"]
    body = json.loads(pipe(*container["command"][3:], expect=3).stdout)
    assert (body["verdict"], body["run"]) == ("fail", drifted.run.id)


def monitored_config(live: Live) -> Config:
    words = ["monitor.every=1h", f"train.image=train@sha256:{'0' * 64}", "cluster.volume_claim=runs"]
    return override_config(live.config(), [*words, "serve.sample=1", f"serve.sample_to=file://{live.root / 'live'}"])


def test_json_has_every_rule_with_its_times(pipe: Pipe, drifted: Live) -> None:
    body = json.loads(pipe("monitor", "--samples", "live", "-o", "json", expect=3).stdout)
    assert body["verdict"] == "fail"
    failed = [rule for rule in body["rules"] if not rule["passed"]]
    assert body["rules"][: len(failed)] == failed
    assert {"inputs.pair", "answers.predicted"} <= {rule["rule"] for rule in failed}
    assert [rule["since"] for rule in failed] == sorted(rule["since"] for rule in failed)
    for rule in failed:
        assert 1_700_000_000 <= rule["since"] <= rule["alarm"] <= 1_700_000_300
    assert all(rule["value"] is not None for rule in body["rules"])
    assert body["metric"]["labels"] == 100


def test_rendered_folder_has_gauges_and_a_page(pipe: Pipe, drifted: Live) -> None:
    pipe("monitor", "--samples", "live", "--render", "out", expect=3)
    families = text_string_to_metric_families((drifted.root / "out" / "monitor.prom").read_text())
    samples = [sample for family in families for sample in family.samples]
    failed = {each.labels["rule"]: each.value for each in samples if each.name == "pipe_monitor_failed"}
    assert failed["inputs.pair"] == 1
    assert failed["metric.accuracy"] == 0
    assert [each.value for each in samples if each.name == "pipe_monitor_as_promised"] == [0]
    page = (drifted.root / "out" / "monitor.html").read_text()
    assert "Rejected" in page
    assert "inputs.pair" in page
    assert page.count("<svg") == 1
    pipe("monitor", "--samples", "live", "--render", expect=3)
    assert (drifted.root / "runs" / "monitor" / "monitor.html").is_file()


def test_nothing_to_read_is_a_mistake(pipe: Pipe, live: Live) -> None:
    (live.root / "pipe.yaml").write_text((live.root / "pipe.yaml").read_text() + "serve: {sample_to: ''}\n")
    assert "set serve.sample_to, or name the folder with --samples" in pipe("monitor", expect=2).stderr
    assert "write it as 30s, 10min, 1h or 1d" in pipe("monitor", "--every", "often", expect=2).stderr


def test_every_looks_again_until_it_is_interrupted(pipe: Pipe, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        live.write(live.samples(live.normal(5)))
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.monitor.time.sleep", sleep)
    printed = pipe("monitor", "--samples", "live", "--every", "1h", expect=130).stdout
    assert re.findall(r"^(?:pass|not evaluated): (.*)$", printed, re.MULTILINE) == [
        f"no sample of this bundle in {live.root / 'live'} yet",
        "as promised, by 5 samples and 0 labels",
        "as promised, by 10 samples and 0 labels",
    ]
    assert pauses == [3600.0] * 3


def test_alarm_starts_one_run_that_cannot_override_its_gate(
    pipe: Pipe, drifted: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(argv[3:])
        return subprocess.CompletedProcess(argv, 3)

    monkeypatch.setattr("pipeline.cli.monitor.subprocess.run", start)
    pipe("monitor", "--samples", "live", expect=3)
    assert started == []
    path = Path(drifted.root / "pipe.yaml")
    path.write_text(path.read_text() + "monitor: {on_alert: run}\n")
    printed = pipe("monitor", "--samples", "live", expect=3).stderr
    assert f"`pipe run all --since {drifted.run.id}` ended with status 3" in printed
    pipe("monitor", "--samples", "live", expect=3)
    assert started == [["-C", str(drifted.root), "run", "all", "--since", drifted.run.id]]
