from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.contract.run import Run, RunFile, StepRecord, own_identity, step_main
from pipeline.executors.local import LocalLauncher, step_environment
from pipeline.system.errors import ConfigError, DataError, GateError, PipelineError, clear_error, read_error
from pipeline.system.files import digest_bytes, digest_file

CONFIG = {"name": "digits", "task": "task.py:T", "codec": "codec.py:C", "train": {"epochs": 3}}


def write(path: Path, config: dict[str, object]) -> RunFile:
    file = RunFile(id=path.name, created="2026-01-01", wanted=("train",), config=config, environment={})
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text(file.model_dump_json())
    return file


def test_a_run_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = write(tmp_path, dict(CONFIG))
    assert Run(tmp_path).read() == file
    assert Run(tmp_path).config.train.epochs == 3


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="not a run directory"):
        Run(tmp_path).read()


def test_a_configuration_of_another_version_is_refused_by_its_key(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "train": {"epohcs": 3}})
    with pytest.raises(ConfigError, match="epohcs"):
        _ = Run(tmp_path).config


def test_a_run_of_a_newer_version_is_named_as_such(tmp_path: Path) -> None:
    newer = json.loads(write(tmp_path, dict(CONFIG)).model_dump_json()) | {
        "schema_version": RunFile.SCHEMA + 1,
        "unheard_of": 1,
    }
    (tmp_path / "run.json").write_text(json.dumps(newer))
    with pytest.raises(
        PipelineError, match=rf"written by a newer version of pipe \(schema {RunFile.SCHEMA + 1}, this one reads"
    ):
        Run(tmp_path).read()


def test_step_whose_owner_process_is_gone_has_died() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "from pipeline.contract.run import own_identity as i; print(i())"], stdout=subprocess.PIPE, text=True)  # fmt: skip  # noqa: E501
    gone, _ = ended.communicate()

    def status(owner: str, status: str = "running") -> str:
        return StepRecord.model_validate(
            {"step": "train", "status": status, "key": "k", "parts": {}, "owner": owner}
        ).current_status

    assert status(gone.strip()) == "died"
    assert status(own_identity()) == "running"
    assert status(own_identity() + "9") == "died", "another process has its number now"
    assert status(f"elsewhere {gone.partition(' ')[2]}") == "running", "nothing is known of that machine"
    assert status("") == "running", "a pod, or a run of an older version"
    assert status(gone.strip(), "done") == "done"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_step_reads_only_what_earlier_steps_recorded(tmp_path: Path) -> None:
    """Files that were replaced between two steps stop the next one, also where the record was edited with them."""
    run, worked = Run(tmp_path / "run"), list[str]()
    write(run.path, dict(CONFIG))
    for step in ("prepare", "train"):
        run.output(step).mkdir()
        for name in ("data.json", "model.safetensors", "order.npy", "checkpoints"):
            (run.output(step) / name).write_text(name)
    names = {
        step: {path.name: digest_file(path) for path in run.output(step).iterdir()} for step in ("prepare", "train")
    }
    inputs = {"input:prepare/data.json": names["prepare"]["data.json"]}
    inputs["input:train/model.safetensors"] = names["train"]["model.safetensors"]

    def record(edited: str = "") -> None:
        outputs = {**names, "train": {**names["train"], **({"model.safetensors": edited} if edited else {})}}
        steps = {
            step: {"step": step, "status": "done", "key": "k", "parts": {}, "outputs": outputs[step]} for step in names
        }
        steps["evaluate"] = {"step": "evaluate", "status": "running", "key": "k", "parts": inputs}
        (run.path / "run.json").write_text(json.dumps({**json.loads(run.read().model_dump_json()), "steps": steps}))

    def evaluate() -> int:
        return step_main("evaluate", lambda run, _: worked.append(run.id), [str(run.path), "--root", str(tmp_path)])

    record()
    assert (evaluate(), worked) == (0, ["run"])
    for file in ("train/model.safetensors", "prepare/order.npy"):
        original = (run.path / file).read_text()
        (run.path / file).write_text("other")
        clear_error(run.partial("evaluate"))
        assert evaluate() != 0
        digests = rf"recorded {short_digest(original)}, found {short_digest('other')}"
        expected = rf"{file}: changed since it was recorded \({digests}"
        assert re.search(expected, str(read_error(run.partial("evaluate"))))
        (run.path / file).write_text(original)
    (run.path / "train" / "model.safetensors").write_text("other")
    record(edited=digest_bytes(b"other"))
    assert evaluate() != 0, "the key of the step names the weights that were trained"
    assert worked == ["run"]


def short_digest(text: str) -> str:
    return digest_bytes(text.encode())[:12]


def fails_with(error: BaseException) -> Callable[[Run, Path], None]:
    def work(run: Run, root: Path) -> None:
        raise error

    return work


def left_behind(tmp_path: Path, error: BaseException) -> tuple[int, PipelineError]:
    status = step_main("train", fails_with(error), [str(tmp_path), "--root", str(tmp_path)])
    found = read_error(tmp_path / "train.partial")
    assert found is not None
    return status, found


def test_step_gets_run_project_and_an_output_folder(tmp_path: Path) -> None:
    seen: list[tuple[Path, Path, bool]] = []

    def work(run: Run, root: Path) -> None:
        seen.append((run.path, root, run.partial("train").is_dir()))

    assert step_main("train", work, [str(tmp_path / "run"), "--root", str(tmp_path)]) == 0
    assert seen == [(tmp_path / "run", tmp_path, True)]
    assert read_error(tmp_path / "run" / "train.partial") is None


@pytest.mark.parametrize(("error", "status"), [(DataError("bad sample"), 2), (GateError("too weak"), 3)])
def test_user_error_is_recorded_for_the_runner_and_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: PipelineError, status: int
) -> None:
    found = left_behind(tmp_path, error)
    assert (found[0], type(found[1]), str(found[1])) == (status, type(error), str(error))
    assert capfd.readouterr().err == f"error: {error}\n"


def test_bug_has_its_traceback_in_the_log_and_one_line_as_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = left_behind(tmp_path, ValueError("two\n  lines"))
    assert status == 1
    assert str(found) == "ValueError: two lines"
    assert "Traceback" in capfd.readouterr().err


def test_a_bug_in_the_users_file_names_its_line(tmp_path: Path) -> None:
    source = tmp_path / "task.py"
    source.write_text("\n\ndef work(run, root):\n    return {}['label']\n")
    scope: dict[str, Callable[[Run, Path], None]] = {}
    exec(compile(source.read_text(), str(source), "exec"), scope)
    step_main("train", scope["work"], [str(tmp_path), "--root", str(tmp_path)])
    assert str(read_error(tmp_path / "train.partial")) == "KeyError: 'label' (task.py, line 4)"


@pytest.mark.parametrize("call", ["input()", "breakpoint()", "import pdb; pdb.set_trace()"])
def test_code_that_waits_for_input_is_named_by_its_line(call: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(f"def work(run, root):\n    {call}\n    return 1\n")
    program = (
        "import sys; from pipeline.contract.run import step_main; sys.path.insert(0, '.'); import task; "
        f"sys.exit(step_main('train', task.work, [{str(tmp_path)!r}, '--root', {str(tmp_path)!r}]))"
    )
    deadline = time.monotonic() + 300

    def tick() -> None:
        assert time.monotonic() < deadline, "it waits for input"

    launcher = LocalLauncher(tmp_path, tick, grace_seconds=0)
    assert launcher.launch(("python", "-c", program), tmp_path / "log", {}) == 1
    error = str(read_error(tmp_path / "train.partial"))
    assert "standard input of a step is empty; to fix it: remove the call of input() or of the debugger" in error
    assert error.endswith((" (task.py, line 2)", " (task.py, line 3)")), "a debugger stops behind its call"


def test_a_bug_names_the_rank_where_there_are_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert str(left_behind(tmp_path, ValueError("x"))[1]) == "rank 1: ValueError: x"


def test_a_full_disk_is_reported_with_its_fix(tmp_path: Path) -> None:
    status, found = left_behind(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert status == 2
    assert f"disk full on {socket.gethostname()} under {tmp_path}" in str(found)


def test_interrupt_is_not_recorded_as_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        step_main("train", fails_with(KeyboardInterrupt()), [str(tmp_path)])
    assert read_error(tmp_path / "train.partial") is None


LOADS = """
import sys
from pathlib import Path
from pipeline.contract.run import step_main
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

def work(run, root):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(root / "saved")
    for kind, size in ((LlamaModel, 16), (LlamaForSequenceClassification, 16), (LlamaModel, 17)):
        print(f"loading {kind.__name__} {size}", file=sys.stderr, flush=True)
        config = LlamaConfig(vocab_size=size, **sizes, pad_token_id=0)
        kind.from_pretrained(root / "saved", config=config, ignore_mismatched_sizes=True)

sys.exit(step_main(sys.argv[1], work, [sys.argv[2], "--root", sys.argv[2]]))
"""


@pytest.mark.parametrize("step", ["check", "train"])
def test_log_has_reports_of_loaded_weights_only_where_weights_differ(tmp_path: Path, step: str) -> None:
    environment = {**os.environ, **step_environment(1, 1)}
    argv = [sys.executable, "-c", LOADS, step, str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=True)
    _, unused, new, other_shape = re.split("loading Llama.*\n", done.stderr)
    assert unused == "", "weights of the file that this model does not have"
    assert ("| MISSING" in new) == (step == "check"), "new weights are named once, before training"
    assert "MISMATCH" in other_shape
    assert "\x1b" not in done.stderr
