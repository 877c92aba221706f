"""Loading of tasks, and of the files that a task shares with its codec."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import (
    Classifier,
    HasBaseline,
    HasExample,
    check_export,
    declared_axes,
    load_class,
    load_task,
    open_task,
    shared_file_digests,
)
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import write_json

from ..records import write_run_file

TASK = """
class Net:
    inputs = ("x",)
    outputs = ("y",)

    def model(self): ...
    def data(self, split): ...
    def loss(self, outputs, batch): ...
    def metrics(self, outputs, batch): ...

    def make_files(self, folder): ...

    def use_files(self, folder):
        self.words = (folder / "words.txt").read_text()
"""


@pytest.fixture
def run(root: Path) -> Run:
    """A run after prepare."""
    (root / "some_task.py").write_text(TASK)
    run = Run(root / "runs" / "one")
    files = run.output("prepare") / "files"
    files.mkdir(parents=True)
    (files / "words.txt").write_text("one two")
    write_json(run.output("prepare") / "data.json", {"files": shared_file_digests(files)})
    return write_run_file(run, "train", task="some_task.py:Net")


def test_a_later_step_opens_the_task_with_its_files(run: Run, root: Path) -> None:
    assert vars(open_task(run, root)) == {"words": "one two"}


@pytest.mark.parametrize(
    "harm",
    [
        lambda files: (files / "words.txt").write_text("one too"),
        lambda files: (files / "words.txt").unlink(),
        lambda files: (files / "words.txt").rename(files / "other.txt"),
        lambda files: (files / "more.txt").write_text("never there"),
    ],
    ids=["altered", "gone", "renamed", "added"],
)
def test_shared_files_changed_since_prepare_are_refused(run: Run, root: Path, harm: Callable[[Path], object]) -> None:
    harm(run.output("prepare") / "files")
    with pytest.raises(DataError, match="changed since prepare"):
        open_task(run, root)


def test_shared_files_need_the_record_of_prepare(run: Run, root: Path) -> None:
    (run.output("prepare") / "data.json").unlink()
    with pytest.raises(DataError, match="run the prepare step first"):
        open_task(run, root)


@pytest.mark.parametrize(("left", "gone"), [("make_files", "use_files"), ("use_files", "make_files")])
def test_a_task_that_only_makes_or_only_uses_files_is_refused(run: Run, root: Path, left: str, gone: str) -> None:
    (root / "some_task.py").write_text(TASK.replace(gone, "something_else"))
    with pytest.raises(ConfigError, match=rf"{left}\(folder\) without {gone}\(folder\)"):
        open_task(run, root)


def test_task_in_a_folder_imports_modules_beside_it(root: Path) -> None:
    (root / "tasks").mkdir()
    (root / "tasks" / "beside.py").write_text("WIDTH = 4\n")
    (root / "tasks" / "deep_task.py").write_text("from beside import WIDTH\nclass Net:\n    width = WIDTH\n")
    assert load_class("tasks/deep_task.py:Net", root).width == 4


def test_the_codec_a_task_imports_is_the_codec_that_is_loaded(root: Path) -> None:
    (root / "my_codec.py").write_text("class Codec: ...\n")
    (root / "my_task.py").write_text("from my_codec import Codec\nclass Net:\n    codec = Codec\n")
    assert load_class("my_task.py:Net", root).codec is load_class("my_codec.py:Codec", root)


def test_project_file_does_not_shadow_an_installed_module(root: Path) -> None:
    assert "sched" not in sys.modules
    (root / "sched.py").write_text("class Net: ...\n")
    (root / "pip.py").write_text("class Net: ...\n")
    for reference in ("sched.py:Net", "pip.py:Net"):
        load_class(reference, root)
    assert "sched" not in sys.modules
    assert "pip" not in sys.modules


def test_two_projects_may_have_files_of_one_name(root: Path) -> None:
    for project in ("a", "b"):
        (root / project).mkdir()
        (root / project / "same.py").write_text(f"class Net:\n    project = {project!r}\n")
    assert [load_class("same.py:Net", root / project).project for project in ("a", "b")] == ["a", "b"]


def test_a_missing_file_or_class_is_named_with_where_it_was_searched(root: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no file my_task\.py in {root}"):
        load_class("my_task.py:Net", root)
    (root / "my_task.py").write_text("class Other: ...\n")
    with pytest.raises(ConfigError, match=r"my_task\.py has no class Net"):
        load_class("my_task.py:Net", root)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("class Net(:", "SyntaxError"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines (my_task.py, line 1)"),
        (
            "\nraise EOFError('EOF when reading a line')",
            "remove the call of input() or of the debugger (my_task.py, line 2)",
        ),
        ("import sys; sys.exit(0)", "SystemExit"),  # a script without a main guard must not end the step as done
    ],
)
def test_an_import_that_fails_states_why_on_one_line(root: Path, source: str, cause: str) -> None:
    (root / "my_task.py").write_text(source + "\n")
    with pytest.raises(ConfigError, match=r"my_task\.py: import failed: ") as caught:
        load_class("my_task.py:Net", root)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_import_that_failed_can_be_fixed_and_tried_again(root: Path) -> None:
    path = root / "my_task.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError):
        load_class("my_task.py:Net", root)
    path.write_text("class Net: ...  # fixed\n")
    assert load_class("my_task.py:Net", root).__name__ == "Net"


WHOLE = {
    "inputs": "    inputs = ('x',)",
    "outputs": "    outputs = ('y',)",
    "model": "    def model(self): ...",
    "data": "    def data(self, split): ...",
    "loss": "    def loss(self, outputs, batch): ...",
    "metrics": "    def metrics(self, outputs, batch): ...",
}


def write(root: Path, parts: dict[str, str]) -> None:
    (root / "some_task.py").write_text("class Net:\n" + "\n".join(parts.values()) + "\n")


def test_a_task_with_all_its_parts_is_built(root: Path) -> None:
    write(root, WHOLE)
    task = load_task("some_task.py:Net", root)
    assert (task.inputs, task.outputs) == (("x",), ("y",))
    assert not isinstance(task, HasBaseline | HasExample | Classifier)


@pytest.mark.parametrize("missing", ["model", "data", "loss", "metrics"])
def test_a_missing_method_is_named(root: Path, missing: str) -> None:
    write(root, {name: text for name, text in WHOLE.items() if name != missing})
    with pytest.raises(ConfigError, match=rf"has no method {missing}\("):
        load_task("some_task.py:Net", root)


@pytest.mark.parametrize("attribute", ["inputs", "outputs"])
@pytest.mark.parametrize("value", [None, "'x'", "()", "('',)", "(1,)", "7", "('z', 'z')", "('a\\nb',)", "(' ',)"])
def test_missing_or_invalid_tensor_names_are_refused(root: Path, attribute: str, value: str | None) -> None:
    parts = {**WHOLE, attribute: f"    {attribute} = {value}"}
    write(root, parts if value else {name: text for name, text in WHOLE.items() if name != attribute})
    with pytest.raises(ConfigError, match=f"set `{attribute} = "):
        load_task("some_task.py:Net", root)


def test_task_that_needs_arguments_is_refused(root: Path) -> None:
    write(root, {**WHOLE, "init": "    def __init__(self, depth): ..."})
    with pytest.raises(ConfigError, match="cannot be built without arguments"):
        load_task("some_task.py:Net", root)


def test_a_classifier_has_classes_and_both_of_its_methods(root: Path) -> None:
    extra = {
        "classes": "    classes = ('a', 'b')",
        "predicted": "    def predicted(self, outputs): ...",
        "actual": "    def actual(self, batch): ...",
    }
    write(root, {**WHOLE, **extra})
    assert isinstance(load_task("some_task.py:Net", root), Classifier)


def test_an_import_from_a_former_internal_module_names_the_public_api(tmp_path: Path) -> None:
    (tmp_path / "old_codec.py").write_text("from pipeline.spec.errors import InvalidPayload\n")
    with pytest.raises(ConfigError, match="to fix it: import the name from `pipeline`"):
        load_class("old_codec.py:Codec", tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("outputs = ('y', 'x')", "`x` is an input and an output, and in ONNX one name is one tensor"),
        ("serving_inputs = ('x',)", "has no `export_model`; what is served needs export_model, serving_inputs"),
        (
            "serving_inputs = 'x'; serving_outputs = ('z',); export_model = print",
            'set `serving_inputs = ("name", ...)`, the names of what is served',
        ),
        ("serving_inputs = ('x',); serving_outputs = ('x',); export_model = print", "`x` is an input and an output"),
        ("axes = {'x': ('batch', 'time')}", "has `axes` without `longest`"),
        ("longest = {'time': 3}", "has `longest` without `axes`"),
        ("axes = ('batch', 'time'); longest = {'time': 3}", "write `axes` as {"),
        (
            "axes = {'z': ('batch',)}; longest = {}",
            "`axes` names z, which is no input of the task (x) and no output (y)",
        ),
        (
            "axes = {'x': ('time', 'batch')}; longest = {'time': 3}",
            "`axes` of x: write the names of its axes, `batch` first",
        ),
        ("axes = {'x': ('batch', 'a', 'a')}; longest = {'a': 3}", "`axes` of x"),
        ("shortest = {'time': 3}", "has `shortest` without `axes`"),
        *(
            (
                f"axes = {{'x': ('batch', 'time')}}; longest = {{'time': 3}}; shortest = {shortest}",
                "`shortest` must give",
            )
            for shortest in ({"times": 2}, {"time": 3}, {"time": 0}, {"time": 1.5}, 2)
        ),
        ("axes = {'x': ('batch', 'time')}; longest = {}", "`longest` must give the maximum of each of time"),
    ],
)
def test_invalid_names_and_axes_are_refused_when_the_task_is_loaded(root: Path, lines: str, message: str) -> None:
    write(root, {**WHOLE, "wrong": f"    {lines}"})
    with pytest.raises(ConfigError) as caught:
        load_task("some_task.py:Net", root)
    assert message in str(caught.value)


def test_outputs_may_repeat_an_axis_and_inputs_may_have_fixed_ones(root: Path) -> None:
    axes = "axes = {'x': ('batch', 80, 'time'), 'y': ('batch', 'time', 'time')}; longest = {'time': 3}"
    write(root, {**WHOLE, "axes": f"    {axes}"})
    task: Any = load_task("some_task.py:Net", root)
    assert declared_axes(task) == {"x": ("batch", 80, "time"), "y": ("batch", "time", "time")}


def test_formats_that_cannot_hold_the_model_are_refused(root: Path) -> None:
    write(root, {**WHOLE, "outputs": "    outputs = ('größe', 'a.b')"})
    task = load_task("some_task.py:Net", root)
    check_export(task, Export(formats=("onnx", "pt2")))
    with pytest.raises(ConfigError, match="a SavedModel cannot have a tensor called `größe`"):
        check_export(task, Export(formats=("onnx", "savedmodel")))
    with pytest.raises(ConfigError, match="genai is for language models"):
        check_export(task, Export(formats=("onnx", "genai")))
