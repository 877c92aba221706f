from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.contract.config import Config
from pipeline.contract.run import Run, StepRecord, all_runs
from pipeline.history import (
    begin_run,
    changed_outputs,
    create_run,
    describe_commit,
    describe_environment,
    example_folder,
    find_project,
    find_run,
    is_locked,
    link_outputs,
    load_history,
    lock_run,
    lock_runs,
    lock_service,
    publish_step,
    try_lock,
    unreadable_runs,
    write_record,
)
from pipeline.system.errors import ConfigError, PipelineError, ResourceError
from pipeline.system.files import digest_bytes, digest_mapping, exclusive_lock
from pipeline.system.sources import SOURCE_ROOT

from .conftest import NewRun


@pytest.fixture
def sealed(new_run: NewRun) -> tuple[Run, StepRecord]:
    """A run whose train step is complete."""
    run = new_run()
    (run.partial("train") / "checkpoints").mkdir(parents=True)
    (run.partial("train") / "model.bin").write_bytes(b"weights")
    (run.partial("train") / "checkpoints" / "one").write_bytes(b"state")
    outputs, digest = publish_step(run, "train")
    record = StepRecord(step="train", status="done", key="k", parts={}, outputs=outputs, digest=digest)
    return run, write_record(run, record)


def test_new_run_records_its_settings_and_environment(new_run: NewRun, config: Config) -> None:
    run = new_run()
    assert run.config == config
    assert run.read().wanted == ("prepare", "train")
    assert run.read().environment == describe_environment()
    assert "torch" in describe_environment()


def test_sealing_renames_the_folder_and_digests_every_file(sealed: tuple[Run, StepRecord]) -> None:
    run, record = sealed
    assert not run.partial("train").exists()
    assert record.outputs == {"checkpoints/one": digest_bytes(b"state"), "model.bin": digest_bytes(b"weights")}
    assert record.digest == digest_mapping(record.outputs)


def test_sealing_again_replaces_the_earlier_outputs_completely(sealed: tuple[Run, StepRecord]) -> None:
    run, _ = sealed
    run.partial("train").mkdir()
    (run.partial("train") / "model.bin").write_bytes(b"better")
    outputs, _ = publish_step(run, "train")
    assert outputs == {"model.bin": digest_bytes(b"better")}
    assert not (run.output("train") / "checkpoints").exists()


@pytest.mark.parametrize("what", ["altered", "removed", "added", "all gone"])
def test_any_difference_in_outputs_is_noticed(sealed: tuple[Run, StepRecord], what: str) -> None:
    run, record = sealed
    path = run.output("train") / "model.bin"
    if what == "altered":
        path.write_bytes(b"weightz")
    elif what == "removed":
        path.unlink()
    elif what == "added":
        path = path.with_name("extra")
        path.touch()
    else:
        run.output("train").rename(run.path / "elsewhere")
    assert path.name in changed_outputs(run, record)


def test_linking_replaces_files_that_a_crash_left(sealed: tuple[Run, StepRecord], new_run: NewRun) -> None:
    source, record = sealed
    target = new_run()
    target.partial("train").mkdir()
    (target.partial("train") / "junk").touch()
    link_outputs(source, target, record)
    assert changed_outputs(target, record) == []
    names = [run.output("train") / "model.bin" for run in (source, target)]
    assert os.path.samefile(*names)


def named(runs: Path, config: Config, *names: str) -> None:
    for name in names:
        begin_run(Run(runs / name), config, ("prepare",))


def test_run_is_found_by_id_prefix_path_or_latest(tmp_path: Path, config: Config) -> None:
    named(tmp_path, config, "20260101-100000-aaaa", "20260102-100000-bbbb")
    (tmp_path / "manifests").mkdir()  # not a run
    assert find_run(tmp_path, "latest").id == "20260102-100000-bbbb"
    assert find_run(tmp_path, "20260101").id == "20260101-100000-aaaa"
    assert find_run(tmp_path, "20260101-100000-aaaa").id == "20260101-100000-aaaa"
    assert find_run(Path("/nowhere"), str(tmp_path / "20260101-100000-aaaa")).id == "20260101-100000-aaaa"


def test_runs_created_in_one_second_are_ordered(tmp_path: Path, config: Config) -> None:
    made = [create_run(tmp_path, config, ("prepare",), "") for _ in range(12)]
    assert [run.id for run in all_runs(tmp_path)] == [run.id for run in reversed(made)]
    assert len({run.id[:15] for run in made}) < len(made), "several in one second"
    assert find_run(tmp_path, "latest") == made[-1]


def test_name_that_exists_is_drawn_again(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(drawn) // 3:04x}")  # each three times
    assert len({create_run(tmp_path, config, ("prepare",), "").path for _ in range(4)}) == 4


def test_unknown_or_ambiguous_run_name_is_an_error(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ConfigError, match=r"no runs in .* yet; `pipe run all` makes one"):
        find_run(tmp_path, "latest")
    named(tmp_path, config, "20260101-100000-aaaa", "20260102-100000-bbbb")
    with pytest.raises(ConfigError, match=r"more than one run '2026' .*newest: 20260102-100000-bbbb"):
        find_run(tmp_path, "2026")
    with pytest.raises(ConfigError, match="no run '2025'"):
        find_run(tmp_path, "2025")


def test_unreadable_run_is_left_out_and_named(sealed: tuple[Run, StepRecord], config: Config) -> None:
    run, _ = sealed
    other = create_run(run.runs, config, ("prepare",), "")
    (run.path / "run.json").write_text("{")
    history = load_history(run.runs)
    assert [each for each, _ in history] == [other]
    ((unreadable, problem),) = unreadable_runs(run.runs, history)
    assert unreadable == run
    assert "run.json: damaged: Invalid JSON" in problem
    with pytest.raises(PipelineError, match=r"run.json: damaged"):
        find_run(run.runs, run.id)


def test_runs_named_by_a_workflow_are_ordered_by_creation_time(tmp_path: Path, config: Config) -> None:
    before, after = (datetime(2026, 1, 1, 12, 0, second, tzinfo=UTC) for second in (0, 2))
    begin_run(Run(tmp_path / "wf-first"), config, ("prepare",), created=before)
    begin_run(Run(tmp_path / "20260101-120001-0000"), config, ("prepare",))
    begin_run(Run(tmp_path / "a-later-one"), config, ("prepare",), created=after)
    assert [run.id for run in all_runs(tmp_path)] == ["a-later-one", "20260101-120001-0000", "wf-first"]
    assert find_run(tmp_path, "latest").id == "a-later-one"


HOLDER = """
import sys, time
from pathlib import Path
from pipeline.history import lock_runs
with lock_runs(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, cwd=SOURCE_ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_process_learns_who_holds_the_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ResourceError, match=rf"\(pid {holder.pid} on .*\) is working here"), lock_runs(tmp_path):
        pass


def test_a_killed_owner_leaves_no_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait(timeout=300)
    with lock_runs(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / ".lock").read_text()


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    runs = tmp_path / "new" / "runs"  # is created
    with pytest.raises(ZeroDivisionError), lock_runs(runs):
        _ = 1 / 0
    assert (runs / ".lock").read_text() == ""
    with lock_runs(runs):
        pass


def test_lock_with_a_half_written_owner_is_respected(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    (tmp_path / ".lock").write_text("")
    with pytest.raises(ResourceError, match="another `pipe` is working here"), lock_runs(tmp_path):
        pass


def test_shared_and_exclusive_locks_exclude_each_other(tmp_path: Path) -> None:
    taken = pytest.raises(ResourceError, match=rf"\(pid {os.getpid()} on .*\) is working here")
    with lock_runs(tmp_path, shared=True), lock_runs(tmp_path, shared=True), taken, lock_runs(tmp_path):
        pass
    with lock_runs(tmp_path), pytest.raises(ResourceError, match="is working here"), lock_runs(tmp_path, shared=True):
        pass


def test_service_lock_excludes_service_commands_but_not_training(tmp_path: Path, config: Config) -> None:
    holding = [sys.executable, "-c", HOLDER.replace("lock_runs", "lock_service"), str(tmp_path)]
    run = create_run(tmp_path, config, ("train",), parent="")
    with subprocess.Popen(holding, cwd=SOURCE_ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with lock_runs(tmp_path, shared=True), lock_run(run):
            assert is_locked(run)
        with pytest.raises(ResourceError, match="is changing the service; wait"), lock_service(tmp_path):
            pass
        other.kill()
    with lock_service(tmp_path), lock_service(tmp_path):  # a command deploys within its own lock
        assert not is_locked(run)


def test_process_waits_for_the_lock_after_reporting_its_holder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    waits: list[str] = []

    def on_wait(text: str) -> None:
        waits.append(text)
        holder.kill()

    with lock_runs(tmp_path, on_wait=on_wait):
        assert holder.wait(timeout=300) == -9
    assert len(waits) == 1
    assert f"(pid {holder.pid} on " in waits[0]


def test_try_lock_returns_none_if_the_lock_is_held(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path / "one"):
        assert try_lock(tmp_path / "one") is None
    for _ in range(2):
        held = try_lock(tmp_path / "one")
        assert held is not None
        assert try_lock(tmp_path / "one") is None
        held.release()


@pytest.mark.usefixtures("without_locks")
def test_command_without_locks_warns_once(tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(tmp_path, config, ("train",), parent="")
    with lock_runs(tmp_path, shared=True), lock_service(tmp_path), lock_run(run), lock_run(run):
        assert not is_locked(run)
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}: this file system has no locks (Lustre has them with the mount option `flock`), "
        "so do not let two commands work on one run at the same time\n"
    )


@pytest.mark.usefixtures("without_locks")
def test_command_that_needs_a_lock_is_refused_without_locks(tmp_path: Path) -> None:
    refused = pytest.raises(ResourceError, match=f"^{tmp_path}: this file system has no locks, which x needs$")
    with refused, lock_runs(tmp_path, need="which x needs"):
        pass


def test_other_errors_of_a_lock_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="Input/output error"), exclusive_lock(tmp_path / "one"):
        pass


def test_a_folder_with_settings_is_its_own_project(folder: Path) -> None:
    project = find_project(folder)
    assert (project.root, project.runs) == (folder, folder / "runs")
    assert project.config(["train.epochs=3"]).train.epochs == 3


def test_a_folder_without_settings_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pipe\.yaml in .*`pipe init NAME` makes a project, `pipe demo` runs"):
        find_project(tmp_path)


@pytest.mark.parametrize("name", ["digits", "starter"])
def test_task_and_codec_of_each_example_exist(name: str) -> None:
    project = find_project(example_folder(name))
    config = project.config()
    for reference in (config.task, config.codec):
        assert (project.root / reference.partition(":")[0]).is_file()
    with pytest.raises(ConfigError, match="no example 'none'"):
        example_folder("none")


def test_run_records_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) == {}, "no repository"
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "task.py").write_text("")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "runs").mkdir()
    run = create_run(tmp_path / "runs", Config(name="a", task="task.py:A", codec="codec.py:B"), ("train",), "")
    recorded = run.read().environment
    assert len(recorded["git commit"]) == 40
    assert recorded["git working tree"] == "clean", "the runs do not count"
    (tmp_path / "codec.py").write_text("")
    assert describe_commit(tmp_path)["git working tree"] == "uncommitted changes"
