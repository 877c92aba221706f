from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.run import CHECKED_FILES, Run, StepRecord
from pipeline.display import Display
from pipeline.executors.local import LocalExecutor
from pipeline.failures import find_failure
from pipeline.history import Project, create_run, link_outputs, load_history, lock_run, publish_step, write_record
from pipeline.plan import JUDGED, Decision, digest_key, key_parts
from pipeline.redeploy import deployment_config, find_deployable, redeploy
from pipeline.resume import accept_outputs, describe_kept_settings, latest_unfinished, override_resumed
from pipeline.run import resume_run, run_pipeline
from pipeline.system.errors import BundleError, ConfigError, LostContact, ResourceError, StageError, write_error
from pipeline.system.fork_server import THREADS_VARIABLE
from pipeline.user.readers import find_files, write_read_files
from pipeline.work import RunRequest, Work

from .conftest import NewRun


def test_resumed_run_with_other_machines_keeps_its_key(project: Project, new_run: NewRun) -> None:
    run = new_run()
    before = key_parts("train", run.config, project, {})
    found = override_resumed(run, ["train.processes=4", "train.restarts=9"])
    assert (found.config.train.processes, found.config.train.restarts) == (4, 9)
    assert key_parts("train", found.original_config, project, {}) == before, "an unchanged rerun reuses its outputs"
    assert Run(run.path).config.train.processes == 4, "the training processes read it there"


def test_settings_that_a_resumed_run_ignores_are_named(project: Project, new_run: NewRun) -> None:
    run = new_run()
    assert describe_kept_settings(project, run) == ""
    file = project.root / "pipe.yaml"
    file.write_text(file.read_text() + "\nprepare: {missing_share: 0.05}\n")
    assert describe_kept_settings(project, run) == "prepare.missing_share 0.0 (pipe.yaml: 0.05)"
    file.write_text("name: [")
    assert describe_kept_settings(project, run) == "", "a resumed run does not need the file"


def test_later_resume_overrides_take_precedence(new_run: NewRun) -> None:
    run = override_resumed(override_resumed(new_run(), ["train.processes=4", "train.nodes=2"]), ["train.processes=3"])
    assert run.read().continued == ("train.nodes=2", "train.processes=3")
    assert (run.config.train.processes, run.config.train.nodes) == (3, 2)


NO_NUMBER = "train.processes=many"


@pytest.mark.parametrize("word", ["train.lr=1", "train.checkpoints=elsewhere", "deploy.port=1", "epochs=3", NO_NUMBER])
def test_settings_that_change_results_cannot_be_overridden(word: str, new_run: NewRun) -> None:
    run = new_run()
    message = r"train\.processes" if word == NO_NUMBER else r"changes what the run computes.* starts a new one"
    with pytest.raises(ConfigError, match=message):
        override_resumed(run, ["train.processes=4", word])
    assert run.read().continued == ()


QUIET = Display(live=False)


def recorded(run: Run, step: str, status: str = "done") -> Run:
    """A step with one file of output, as if it had run."""
    run.partial(step).mkdir(exist_ok=True)
    (run.partial(step) / "file").write_text(step)
    outputs, digest = publish_step(run, step)
    values = {"step": step, "status": status, "key": "k", "parts": {}, "outputs": outputs, "digest": digest}
    write_record(run, StepRecord.model_validate(values))
    return run


@pytest.mark.parametrize("status", ["", "failed", "interrupted", "running"])
def test_the_newest_unfinished_run_is_resumed(project: Project, new_run: NewRun, status: str) -> None:
    stopped = recorded(new_run(), "prepare")
    if status:
        recorded(stopped, "train", status)
    assert latest_unfinished(project).id == stopped.id
    recorded(stopped, "train")
    with pytest.raises(ConfigError, match="every run is complete"):
        latest_unfinished(project)


def test_rejected_run_is_not_resumed_implicitly(project: Project, new_run: NewRun) -> None:
    run = recorded(new_run(), "train", "rejected")
    with pytest.raises(ConfigError, match=f"run {run.id} was rejected by the gate"):
        latest_unfinished(project)


def test_preview_uses_reused_outputs_only_while_it_runs(project: Project, config: Config, new_run: NewRun) -> None:
    run = recorded(new_run(), "prepare")
    key = Work(project, config, RunRequest(("prepare",)), []).decide("prepare").key
    write_record(run, run.read().steps["prepare"].model_copy(update={"key": key}))
    work = Work(project, config, RunRequest(("prepare", "train")), load_history(project.runs))
    assert [(step.name, step.action) for step in work.preview()] == [("prepare", "reuse"), ("train", "run")]
    assert work.outputs == {}


def test_trial_is_trained_again_where_its_validation_would_have_other_metrics(
    project: Project, config: Config, new_run: NewRun
) -> None:
    def decided(study: str = "") -> Decision:
        history, outputs = load_history(project.runs), {"prepare": {"data.json": "d"}}
        return Work(project, config, replace(TRAINED, study=study), history, outputs).decide("train")

    run, parts = recorded(new_run(), "train"), decided().parts
    update = {"key": digest_key(parts), "parts": {**parts, JUDGED: "other"}}
    write_record(run, run.read().steps["train"].model_copy(update=update))
    assert decided().action == "reuse"
    trial = decided(study="one")
    assert (trial.action, trial.reason) == ("run", "metrics() changed")


def test_settings_without_effect_on_a_reused_step_are_named(project: Project, config: Config, new_run: NewRun) -> None:
    def decided(config: Config) -> Decision:
        return Work(project, config, TRAINED, load_history(project.runs), {"prepare": {"data.json": "d"}}).decide(
            "train"
        )

    run = recorded(new_run(), "train")
    write_record(run, run.read().steps["train"].model_copy(update={"key": decided(config).key}))
    assert decided(config).reason == f"unchanged since {run.id}"
    hint = 'train.launcher="mpirun", train.trace=true would have an effect with --force train'
    train = config.train.model_copy(update={"trace": True, "launcher": "mpirun"})
    assert decided(config.model_copy(update={"train": train})).reason == f"unchanged since {run.id}; {hint}"


def test_from_a_step_with_missing_outputs_before_it_is_refused(project: Project, config: Config) -> None:
    order = RunRequest(("prepare", "train"), reuse_only=frozenset({"prepare"}))
    with pytest.raises(ConfigError, match="--from starts after prepare, but prepare has to run: never run"):
        Work(project, config, order, []).preview()


def test_error_of_a_step_becomes_the_error_of_the_run(project: Project, folder: Path, config: Config) -> None:
    """The task has no data(): the real prepare step reports it."""
    with pytest.raises(ConfigError, match=r"^prepare: task\.py:T: has no method model\(\)"):
        run_pipeline(project, config, RunRequest(("prepare",)), QUIET)
    run, body = load_history(project.runs)[0]
    assert body.steps["prepare"].status == "failed"
    assert body.steps["prepare"].reason.startswith("prepare: task.py:T")
    assert not run.output("prepare").exists()


def test_missing_client_of_a_tracker_stops_before_the_first_step(
    project: Project, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tracking.process.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"`wandb` is not installed; to fix it: pip install 'pipe-road\[wandb\]'"):
        run_pipeline(project, override_config(config, ["track=[wandb]"]), RunRequest(("prepare", "train")), QUIET)
    assert load_history(project.runs) == []


def test_process_without_an_error_is_reported_by_its_exit_status(
    project: Project, folder: Path, config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "task.py").write_text("import os\n\n\nclass T:\n    os.kill(os.getpid(), 9)\n")
    with pytest.raises(StageError, match="prepare: its process was killed by signal 9 and left no reason"):
        run_pipeline(project, config, RunRequest(("prepare",)), QUIET)
    message = capfd.readouterr().err
    assert f"pipe run --resume {load_history(project.runs)[0][0].id}" in message


def test_requested_cores_are_divided_among_processes(
    project: Project, folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (folder / "task.py").write_text("import os\n\n\nclass T:\n    print('threads', os.environ['OMP_NUM_THREADS'])\n")
    with pytest.raises(ConfigError, match="has no method"):
        run_pipeline(project, config, RunRequest(("prepare",), cores=3), QUIET)
    assert "threads 3\n" in load_history(project.runs)[0][0].log("prepare").read_text()


def test_resume_ignores_trials_and_pruned_runs(project: Project, config: Config) -> None:
    create_run(project.runs, config, ("prepare", "train"), "", study="abc", trial=0)
    recorded(create_run(project.runs, config, ("prepare", "train"), ""), "train", "pruned")
    with pytest.raises(ConfigError, match="nothing to resume"):
        latest_unfinished(project)


def complete_run(project: Project, config: Config, text: str = "export") -> Run:
    """Return a run with a bundle and an image, each one file."""
    run = create_run(project.runs, config, ("export", "package"), parent="")
    (run.partial("export") / "bundle").mkdir(parents=True)
    (run.partial("export") / "bundle" / "manifest.json").write_text(text)
    return recorded(recorded(run, "export"), "package")


def test_only_an_undamaged_bundle_is_deployed_again(project: Project, config: Config) -> None:
    run = complete_run(project, config)
    (run.output("export") / "bundle" / "manifest.json").write_text("other")
    with pytest.raises(BundleError, match=r"export/bundle/manifest\.json changed on disk; it must not be deployed"):
        redeploy(project, run, config, QUIET)
    assert len(load_history(project.runs)) == 1


def test_deployment_takes_settings_as_they_are_now(project: Project, config: Config) -> None:
    then = ["deploy.namespace=old", "deploy.context=old", "rollout.canary_percent=10", "serve.page=false", "train.lr=9"]
    source = complete_run(project, override_config(config, then))
    file = project.root / "pipe.yaml"
    file.write_text(file.read_text() + "registry: /shared\ndeploy: {min_replicas: 3}\nserve: {max_batch_size: 7}\n")
    now = deployment_config(project, source, ["deploy.max_replicas=9"])
    assert (now.deploy.namespace, now.deploy.context, now.rollout.canary_percent, now.serve.page) == (
        "default", "", 0, True,
    )  # fmt: skip
    assert (now.deploy.min_replicas, now.deploy.max_replicas, now.registry) == (3, 9, "/shared")
    assert (now.train.lr, now.serve.max_batch_size) == (9, config.serve.max_batch_size), (
        "the bundle keeps its own settings"
    )
    with pytest.raises(
        ConfigError,
        match=r"train\.lr=1: a deployment may change only deploy\.\*, monitor\.\*, package\.\*, rollout\.\* and "
        r"serve\.\{.*api_keys.*\}",
    ):
        deployment_config(project, source, ["train.lr=1"])


def test_deployment_monitors_with_image_and_volume_as_they_are_now(project: Project, config: Config) -> None:
    source = complete_run(project, override_config(config, ["train.image=old@sha256:0", "monitor.every=1d"]))
    file = project.root / "pipe.yaml"
    file.write_text(file.read_text() + "train: {image: new@sha256:1}\ncluster: {volume_claim: runs}\n")
    now = deployment_config(project, source, ["monitor.every=2h"])
    assert (now.train.image, now.cluster.volume_claim, now.monitor.every) == ("new@sha256:1", "runs", "2h")
    assert deployment_config(project, source, []).monitor.every == ""


def test_deployment_with_package_settings_makes_a_new_image_of_the_same_bundle(
    project: Project, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project.root / "pipe.yaml"
    file.write_text(file.read_text() + "package: {builder: podman}\n")
    source, ran = complete_run(project, config), []

    def run_step(work: Work, run: Run, decision: Decision, display: Display) -> StepRecord:
        ran.append(f"{decision.name} {run.config.package.image!r} {run.config.package.builder}")
        return recorded(run, decision.name).read().steps[decision.name]

    monkeypatch.setattr("pipeline.redeploy.run_step", run_step)
    redeploy(project, source, deployment_config(project, source, []), QUIET)
    assert ran == ["deploy '' auto"], "pipe.yaml alone makes no new image"
    run = redeploy(project, source, deployment_config(project, source, ["package.image=r.example/m"]), QUIET)
    assert ran[1:] == ["package 'r.example/m' auto", "deploy 'r.example/m' auto"]
    steps = run.read().steps
    assert (steps["export"].reused_from, steps["package"].reused_from) == (source.id, "")
    assert steps["export"].digest == source.read().steps["export"].digest


def test_complete_run_of_the_same_bundle_is_deployed(project: Project, config: Config) -> None:
    complete = complete_run(project, config, "same")
    complete_run(project, config, "other")
    run = create_run(project.runs, config, ("export",), parent="")
    link_outputs(complete, run, complete.read().steps["export"])
    write_record(run, complete.read().steps["export"])
    reports: list[str] = []
    assert find_deployable(project, run, reports.append).id == complete.id
    assert reports == [f"run {run.id} has no finished package; run {complete.id} has one of the same bundle"]
    assert find_deployable(project, complete, reports.append) is complete


def test_run_without_a_package_names_the_newest_complete_one(project: Project, config: Config) -> None:
    run = recorded(create_run(project.runs, config, ("export",), parent=""), "export")
    with pytest.raises(ConfigError, match=rf"{run.id} has no finished package; `pipe run --resume {run.id} package` "):
        find_deployable(project, run, print)
    other = complete_run(project, config)
    with pytest.raises(ConfigError, match=f"`pipe deploy {other.id}` deploys another bundle, of the newest complete"):
        find_deployable(project, run, print)


def test_train_step_without_a_model_on_this_machine_fails(new_run: NewRun) -> None:
    run = new_run()
    run.partial("train").mkdir()
    failure = find_failure(run, "train", 0, "")
    assert failure is not None
    assert "this machine has no model" in str(failure)
    (run.partial("train") / "model.safetensors").touch()
    assert find_failure(run, "train", 0, "") is None
    assert find_failure(run, "prepare", 0, "") is None


def test_prepare_runs_again_when_a_file_that_it_read_has_changed(
    project: Project, folder: Path, config: Config, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.user.readers._patterns", {})
    run = new_run()
    run.partial("prepare").mkdir()
    (folder / "rows.csv").write_text("x\n1\n")
    find_files(f"{folder}/rows.csv")
    write_read_files(folder, run.partial("prepare"))
    outputs, digest = publish_step(run, "prepare")
    key = Work(project, config, RunRequest(("prepare",)), []).decide("prepare").key
    values = {"step": "prepare", "status": "done", "key": key, "parts": {}, "outputs": outputs, "digest": digest}
    write_record(run, StepRecord.model_validate(values))
    work = Work(project, config, RunRequest(("prepare",)), load_history(project.runs))
    assert work.decide("prepare").action == "reuse"
    (folder / "rows.csv").write_text("x\n2\n")
    decision = work.decide("prepare")
    assert (decision.action, decision.reason) == ("run", "rows.csv changed")
    with pytest.raises(ConfigError, match=r"prepare: rows.csv of run .* changed on disk; it cannot be accepted"):
        accept_outputs(work, ["prepare"])


class Steps:
    """Replaces the processes of steps: each writes its output and ends as the test has chosen."""

    def __init__(self) -> None:
        self.ends: dict[str, int | BaseException] = {}
        self.ran: list[str] = []

    def __call__(self, _executor: object, run: Run, record: StepRecord, _tick: object) -> int:
        self.ran.append(record.step)
        run.partial(record.step).mkdir(exist_ok=True)
        (run.partial(record.step) / "model.safetensors").touch()
        end = self.ends.get(record.step, 0)
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    replaced = Steps()
    monkeypatch.setattr("pipeline.executors.executor.LocalExecutor.execute", lambda *arguments: replaced(*arguments))
    monkeypatch.setattr("pipeline.run.start_fork_server", lambda *_: contextlib.nullcontext({}))
    return replaced


TRAINED = RunRequest(("prepare", "train"))


def interrupted_training(project: Project, config: Config, steps: Steps) -> Run:
    steps.ends["train"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(project, config, TRAINED, QUIET)
    steps.ends.clear()
    run = load_history(project.runs)[0][0]
    (run.partial("train") / "checkpoints" / "step-00000001").mkdir(parents=True)
    return run


def test_an_interrupted_step_is_recorded_and_goes_on(project: Project, config: Config, steps: Steps) -> None:
    run = interrupted_training(project, config, steps)
    assert run.read().steps["train"].status == "interrupted"
    resume_run(project, run, TRAINED, QUIET)
    assert run.read().steps["train"].status == "done"
    assert steps.ran == ["prepare", "train", "train"]
    assert (run.output("train") / "checkpoints" / "step-00000001").is_dir()


def test_a_training_is_not_resumed_with_other_code(
    project: Project, folder: Path, config: Config, steps: Steps
) -> None:
    run = interrupted_training(project, config, steps)
    (folder / "task.py").write_text((folder / "task.py").read_text() + "\n\nmore = len('x')\n")
    with pytest.raises(ConfigError, match=rf"since the training of run {run.id} began, this changed: task\.py changed"):
        resume_run(project, run, TRAINED, QUIET)
    assert steps.ran == ["prepare", "train"], "nothing ran again before the question"
    assert (run.partial("train") / "checkpoints" / "step-00000001").is_dir()


def test_checkpoints_are_kept_until_the_new_training_is_complete(
    project: Project, folder: Path, config: Config, steps: Steps
) -> None:
    run = interrupted_training(project, config, steps)
    (folder / "task.py").write_text((folder / "task.py").read_text() + "\n\nmore = len('x')\n")
    request = replace(TRAINED, on_changes="restart")
    steps.ends["train"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resume_run(project, run, request, QUIET)
    kept = run.path / "train.replaced-1" / "checkpoints" / "step-00000001"
    assert kept.is_dir()
    steps.ends.clear()
    resume_run(project, run, request, QUIET)
    assert not kept.exists()
    assert run.read().steps["train"].complete


def test_a_damaged_training_is_run_again_in_its_place(project: Project, config: Config, steps: Steps) -> None:
    run = run_pipeline(project, config, TRAINED, QUIET)
    (run.output("train") / "model.safetensors").write_bytes(b"0")
    (run.output("train") / "summary.json").write_bytes(b"")
    steps.ends["train"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        resume_run(project, run, TRAINED, QUIET)
    assert not run.output("train").exists(), "its summary would end the new training"
    assert (run.path / "train.replaced-1" / "model.safetensors").is_file()
    steps.ends.clear()
    resume_run(project, run, TRAINED, QUIET)
    assert steps.ran == ["prepare", "train", "train", "train"]
    assert [path.name for path in run.path.glob("train*")] == ["train"]


def test_an_edited_record_is_not_reused(project: Project, config: Config, steps: Steps) -> None:
    run = run_pipeline(project, config, RunRequest(("prepare",)), QUIET)
    path = run.path / "run.json"
    path.write_text(path.read_text().replace('"platform": "', '"platform": "other '))
    with pytest.raises(BundleError, match="were edited since pipe wrote it"):
        run_pipeline(project, config, RunRequest(("prepare",)), QUIET)
    assert steps.ran == ["prepare"]


def test_run_of_another_command_is_not_resumed(project: Project, new_run: NewRun) -> None:
    run = new_run()
    with lock_run(run), pytest.raises(ResourceError, match=f"is working on run {run.id}"):
        latest_unfinished(project)
    assert latest_unfinished(project).id == run.id


def test_a_killed_node_of_training_is_started_again(
    new_run: NewRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started, statuses = new_run(), [], iter([-signal.SIGKILL, 0])

    def launch(_launcher: object, argv: tuple[str, ...], *_: object) -> int:
        started.append(argv)
        return next(statuses)

    monkeypatch.setattr("pipeline.executors.local.LocalLauncher.launch", launch)
    record = StepRecord(step="train", status="running", key="k", parts={}, argv=("python", "-m", "train"))
    assert LocalExecutor(folder, 1, {}).execute(run, record, lambda: None) == 0
    assert started == [record.argv, (*record.argv, "--again")]


def test_a_forked_step_has_all_cores_unless_the_user_limits_it(
    new_run: NewRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()

    def launch(_launcher: object, _argv: object, _log: object, environment: Mapping[str, str]) -> int:
        threads.append(environment[THREADS_VARIABLE])
        return 0

    monkeypatch.setattr("pipeline.executors.local.LocalLauncher.launch", launch)
    monkeypatch.setattr("pipeline.executors.local.has_server", lambda _: True)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    record = StepRecord(step="export", status="running", key="k", parts={}, argv=("python", "-m", "export"))
    executor, run = LocalExecutor(folder, 4, {}), new_run()
    executor.execute(run, record, lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    executor.execute(run, record, lambda: None)
    assert threads == ["4", "3"]


KILLED = "process rank 1 with PID 7 on node node1 exited on signal 9"


def test_killed_process_is_the_cause_rather_than_lost_contact(new_run: NewRun) -> None:
    run = new_run()
    run.partial("train").mkdir()
    write_error(LostContact("rank 0: lost contact"), run.partial("train"))
    assert "rank 1 on node1 was killed" in str(find_failure(run, "train", 1, KILLED))
    write_error(StageError("the loss is not finite"), run.partial("train"))
    assert str(find_failure(run, "train", 1, KILLED)) == "train: the loss is not finite"


def test_a_full_disk_is_named(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    assert f"disk full on {socket.gethostname()} under {run.path}; free" in str(find_failure(run, "prepare", 1, ""))


def test_files_of_check_are_removed_where_prepare_is_reused(project: Project, config: Config, steps: Steps) -> None:
    request = RunRequest(("check", "prepare"))
    run_pipeline(project, config, request, QUIET)
    kept = []

    def execute(_executor: object, run: Run, record: StepRecord, tick: object) -> int:
        kept.append(run.path / CHECKED_FILES)
        kept[-1].mkdir()
        return steps(_executor, run, record, tick)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pipeline.executors.executor.LocalExecutor.execute", execute)
        run_pipeline(project, config, replace(request, force=frozenset({"check"})), QUIET)
    assert len(kept) == 1
    assert not kept[0].exists()
