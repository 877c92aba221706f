from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from pipeline.system.sources import SOURCE_ROOT, code_digest, project_sources, third_party_imports

from ..package_files import package_files

TASK = "import my_helper\nclass Net: ...\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def found(root: Path, reference: str = "task.py:Net") -> set[str]:
    return set(project_sources(root, reference))


@pytest.mark.parametrize(
    ("name", "counts"), [("task.py", True), ("my_helper.py", True), ("my_deeper.py", True), ("notes.py", False)]
)
def test_digest_changes_with_any_imported_module(tmp_path: Path, name: str, counts: bool) -> None:
    files = {"task.py": TASK, "my_helper.py": "from my_deeper import x\n", "my_deeper.py": "x = 1\n", "notes.py": ""}
    write(tmp_path, files)
    before = code_digest(tmp_path, "task.py:Net")
    with (tmp_path / name).open("a") as file:
        file.write("\n# edited\n")
    assert (code_digest(tmp_path, "task.py:Net") != before) is counts


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "class Net:\n    def model(self):\n        import my_late\n", "my_late.py": ""})
    assert found(tmp_path) == {"task.py", "my_late.py"}


def test_imported_packages_count_with_all_parent_inits(tmp_path: Path) -> None:
    files = {
        "task.py": "from my_pkg.inner.net import Net\n",
        "my_pkg/__init__.py": "",
        "my_pkg/inner/__init__.py": "",
        "my_pkg/inner/net.py": "from ..layers import a\nfrom . import sibling\nclass Net: ...\n",
        "my_pkg/inner/sibling.py": "",
        "my_pkg/layers.py": "a = 1\n",
        "my_pkg/unused.py": "",
    }
    write(tmp_path, files)
    assert found(tmp_path) == set(files) - {"my_pkg/unused.py"}


def test_module_of_a_namespace_package_counts(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "from my_pkg import net\nclass Net: ...\n", "my_pkg/net.py": ""})
    assert found(tmp_path) == {"task.py", "my_pkg/net.py"}


def test_circular_imports_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": TASK, "my_helper.py": "import task\n"})
    assert found(tmp_path) == {"task.py", "my_helper.py"}


def test_task_in_a_folder_imports_from_its_folder_and_the_root(tmp_path: Path) -> None:
    write(tmp_path, {"t/task.py": "import my_beside, my_top\nclass Net: ...\n", "t/my_beside.py": "", "my_top.py": ""})
    assert found(tmp_path, "t/task.py:Net") == {"t/task.py", "t/my_beside.py", "my_top.py"}


def test_helper_at_the_root_imports_from_the_tasks_folder(tmp_path: Path) -> None:
    files = {"t/task.py": "import my_top\nclass Net: ...\n", "my_top.py": "import my_beside\n", "t/my_beside.py": ""}
    write(tmp_path, files)
    assert found(tmp_path, "t/task.py:Net") == set(files)


def test_task_and_codec_have_one_digest_together(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "class Net: ...\n", "my_codec.py": "class Codec: ...\n"})
    both = project_sources(tmp_path, "task.py:Net", "my_codec.py:Codec")
    assert set(both) == {"task.py", "my_codec.py"}
    assert code_digest(tmp_path, "task.py:Net") != code_digest(tmp_path, "task.py:Net", "my_codec.py:Codec")


@pytest.mark.parametrize("name", ["json", "train", "yaml", "wave", "utils"])
def test_project_module_counts_even_with_the_name_of_another(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"task.py": f"from {name} import a\nclass Net: ...\n", f"{name}.py": "a = 1\n"})
    assert found(tmp_path) == {"task.py", f"{name}.py"}
    assert third_party_imports(tmp_path, "task.py:Net") == {}


def test_all_ambiguous_module_names_are_refused_at_once(tmp_path: Path) -> None:
    files = {
        "task.py": "import torch.nn\nimport helper\nfrom pydantic import BaseModel, mine\nclass Net: ...\n",
        "helper.py": "from json import dumps\nimport yaml.nodes\nimport time\nfrom wave import anything\n",
        "pydantic/mine.py": "",
        "wave.py": "from helper import *\n",
    }
    write(tmp_path, {**files, **{f"{name}.py": "dumping = 1\n" for name in ("torch", "json", "yaml", "time")}})
    with pytest.raises(ConfigError) as caught:
        project_sources(tmp_path, "task.py:Net")
    message = str(caught.value)
    for part in (
        "task.py imports `torch.nn`",
        "task.py imports `BaseModel` from `pydantic`",
        "helper.py imports `dumps` from `json`",
        "helper.py imports `yaml.nodes`",
        "helper.py imports `time`",
    ):
        assert part in message
    assert message.partition("rename the project's ")[2] == "`json`, `yaml`, `time`, `torch`, `pydantic`"
    assert "wave" not in message


def test_a_folder_without_modules_hides_no_installed_package(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "from datasets import load_dataset\nclass Net: ...\n", "datasets/notes.txt": ""})
    assert found(tmp_path) == {"task.py"}
    assert third_party_imports(tmp_path, "task.py:Net") == {"datasets": "task.py"}


def test_readers_of_pipeline_count_as_the_packages_they_import(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "from pipeline import DataError, read_images, read_table\nclass Net: ...\n"})
    assert third_party_imports(tmp_path, "task.py:Net") == {"PIL": "task.py", "pyarrow": "task.py"}


def test_a_module_that_is_linked_into_the_project_counts_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    write(tmp_path / "project", {"task.py": "import my_linked\nclass Net: ...\n"})
    write(tmp_path, {"my_linked.py": "x = 1\n"})
    (tmp_path / "project" / "my_linked.py").symlink_to("../my_linked.py")
    monkeypatch.syspath_prepend(tmp_path / "project")  # as in a step that has loaded the task
    before = project_sources(tmp_path / "project", "task.py:Net")
    assert set(before) == {"task.py", "my_linked.py"}
    write(tmp_path, {"my_linked.py": "x = 2\n"})
    assert project_sources(tmp_path / "project", "task.py:Net")["my_linked.py"] != before["my_linked.py"]


def test_module_inside_a_package_may_have_any_name(tmp_path: Path) -> None:
    files = {"task.py": "import my_pkg.net\nclass Net: ...\n", "my_pkg/net.py": "import json\n", "my_pkg/json.py": ""}
    write(tmp_path, files)
    assert found(tmp_path) == {"task.py", "my_pkg/net.py"}


def test_installed_modules_are_not_the_users_code(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "import json, numpy, torch.nn\nfrom pathlib import Path\nclass Net: ...\n"})
    assert found(tmp_path) == {"task.py"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no file task\.py"),
        ({"task.py": "class Other: ...\n"}, r"task\.py has no class Net"),
        ({"task.py": "class Net:\n  x = (\n"}, r"task\.py, line \d"),
        ({"task.py": "x = '\0'\n"}, r"task\.py"),
        ({"task.py": TASK, "my_helper.py": "\n\nx = = 1\n"}, r"my_helper\.py, line 3"),
    ],
)
def test_a_task_that_cannot_be_read_is_reported_without_running_it(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=message):
        project_sources(tmp_path, "task.py:Net")


def test_a_task_outside_the_project_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "class Net: ...\n", "project/pipe.yaml": ""})
    with pytest.raises(ConfigError, match="outside the project"):
        project_sources(tmp_path / "project", "../task.py:Net")


def test_a_class_that_is_imported_or_assigned_is_found(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "from my_nets import Wide as Net\nAlias = Net\n", "my_nets.py": "class Wide: ...\n"})
    assert found(tmp_path, "task.py:Net") == found(tmp_path, "task.py:Alias") == {"task.py", "my_nets.py"}


def relative(paths: Iterable[Path]) -> set[str]:
    return {path.relative_to(SOURCE_ROOT).as_posix() for path in paths}


def test_step_depends_on_its_package_and_contracts_but_no_other_stage() -> None:
    names = relative(package_files("train"))
    assert {"train/__main__.py", "train/batch_order.py", "pipeline/contract/config.py", "pipeline/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("evaluate/", "export/", "serve/", "k8s/"))]


def test_step_may_be_a_single_module() -> None:
    names = relative(package_files("pipeline.steps.prepare"))
    assert {"pipeline/steps/prepare.py", "pipeline/contract/data.py"} <= names
    assert "pipeline/run.py" not in names
