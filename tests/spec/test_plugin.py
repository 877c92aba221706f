from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import train
from pipeline.spec.errors import ConfigError
from pipeline.spec.plugin import load_class


def test_a_class_and_the_helper_beside_it_are_imported(root: Path) -> None:
    (root / "plugin_helper.py").write_text("WIDTH = 3\n")
    (root / "my_task.py").write_text("import plugin_helper\nclass Net:\n    width = plugin_helper.WIDTH\n")
    assert load_class("my_task.py:Net", root).width == 3


def test_a_file_in_a_folder_finds_what_stands_beside_it(root: Path) -> None:
    (root / "tasks").mkdir()
    (root / "tasks" / "beside.py").write_text("WIDTH = 4\n")
    (root / "tasks" / "deep_task.py").write_text("from beside import WIDTH\nclass Net:\n    width = WIDTH\n")
    assert load_class("tasks/deep_task.py:Net", root).width == 4


def test_loading_twice_gives_one_and_the_same_class(root: Path) -> None:
    (root / "my_task.py").write_text("class Net: ...\n")
    assert load_class("my_task.py:Net", root) is load_class("my_task.py:Net", root)


def test_the_codec_a_task_imports_is_the_codec_that_is_loaded(root: Path) -> None:
    (root / "my_codec.py").write_text("class Codec: ...\n")
    (root / "my_task.py").write_text("from my_codec import Codec\nclass Net:\n    codec = Codec\n")
    assert load_class("my_task.py:Net", root).codec is load_class("my_codec.py:Codec", root)


def test_a_users_train_py_does_not_shadow_ours(root: Path) -> None:
    (root / "train.py").write_text("class Net: ...\n")
    assert load_class("train.py:Net", root).__module__ != "train"
    assert importlib.import_module("train") is train


def test_a_users_file_does_not_shadow_what_is_installed_but_not_yet_imported(root: Path) -> None:
    assert "wave" not in sys.modules
    (root / "wave.py").write_text("class Net: ...\n")
    (root / "pip.py").write_text("class Net: ...\n")
    for reference in ("wave.py:Net", "pip.py:Net"):
        load_class(reference, root)
    assert "wave" not in sys.modules
    assert "pip" not in sys.modules


def test_two_projects_with_files_of_one_name_stay_apart(root: Path) -> None:
    for project in ("a", "b"):
        (root / project).mkdir()
        (root / project / "same.py").write_text(f"class Net:\n    project = {project!r}\n")
    assert [load_class("same.py:Net", root / project).project for project in ("a", "b")] == ["a", "b"]


def test_a_missing_file_is_named_with_the_folder_that_was_searched(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file task\.py in") as caught:
        load_class("task.py:Net", root)
    assert str(root) in str(caught.value)


def test_a_missing_class_is_named(root: Path) -> None:
    (root / "my_task.py").write_text("class Other: ...\n")
    with pytest.raises(ConfigError, match=r"my_task\.py has no class Net"):
        load_class("my_task.py:Net", root)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("class Net(:", "SyntaxError"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import sys; sys.exit(0)", "SystemExit"),  # a script without a main guard must not end the step as done
    ],
)
def test_an_import_that_fails_says_why_on_one_line(root: Path, source: str, cause: str) -> None:
    (root / "my_task.py").write_text(source + "\n")
    with pytest.raises(ConfigError, match=r"my_task\.py: import failed: ") as caught:
        load_class("my_task.py:Net", root)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_import_that_failed_can_be_mended_and_tried_again(root: Path) -> None:
    path = root / "my_task.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError):
        load_class("my_task.py:Net", root)
    path.write_text("class Net: ...  # mended\n")
    assert load_class("my_task.py:Net", root).__name__ == "Net"
