"""Modules of a project may have the names of installed ones: each importer gets the module that it means."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.task import load_class
from pipeline.system.errors import ConfigError

# Names that onnxruntime.transformers, which appends its folder to sys.path, and others have as well.
NAMES = (
    "constants", "metrics", "optimizer", "profiler", "utils", "model", "dataset", "train", "evaluate", "test", "code",
    "queue", "io_binding_helper", "fusion_base", "export", "serve", "k8s", "types", "logging", "random", "data",
)  # fmt: skip


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a file for each name, each of which imports another one in its own way."""
    modules = {f"{name}.py": f"NAME = 'own {name}'\n" for name in NAMES}
    ways = ["import {0}", "from {0} import NAME as {0}_name", "import {0} as other_{0}", "from {0} import *"]
    lines = [ways[number % len(ways)].format(name) for number, name in enumerate(NAMES)]
    modules["task.py"] = "\n".join(lines) + "\nimport torch\nfrom onnxruntime.transformers import optimizer as theirs\n"
    modules["task.py"] += f"names = [__import__('sys').modules[__package__ + '.' + n].NAME for n in {NAMES}]\n"
    modules["task.py"] += "class Net:\n    names, theirs = names, theirs\n"
    write(tmp_path, modules)
    return tmp_path


def test_a_project_has_its_own_files_and_packages_have_theirs(project: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pipeline.contract.task import load_class\n"
        "net = load_class('task.py:Net', Path(sys.argv[1]))\n"
        "print(*net.names, sep='|'); print(net.theirs.__file__); import train, queue, logging; print(train.__file__)\n"
        "print(sys.modules['constants'].__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(project)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    names, theirs, ours, constants = done.stdout.splitlines()
    assert names.split("|") == [f"own {name}" for name in NAMES]
    assert "onnxruntime" in theirs
    assert not ours.startswith(str(project))
    assert "onnxruntime" in constants


def test_all_forms_of_import_find_the_projects_packages(root: Path) -> None:
    files = {
        "models/__init__.py": "from .net import Net\nDEPTH = 2\n",
        "models/net.py": "from . import layers\nfrom .layers import WIDTH\nfrom models.layers import WIDTH as same\n"
        "import models.layers as aliased\nclass Net:\n    width = WIDTH + same + aliased.WIDTH + layers.WIDTH\n",
        "models/layers.py": "WIDTH = 1\n",
        "plain/part.py": "PART = 5\n",
        "task.py": "import models.layers, json, plain.part as part\nimport models.net\n"
        "from plain import part as again\nfrom helper import task_name\n"
        "class Net(models.net.Net):\n    depth = models.DEPTH + models.layers.WIDTH\n"
        "    part, again = part.PART, again\n    text = json.dumps(1)\n    name = task_name()\n",
        "helper.py": "import task\ndef task_name():\n    return task.__name__\n",
    }
    write(root, files)
    net = load_class("task.py:Net", root)
    assert (net.width, net.depth, net.part, net.again.PART, net.text) == (4, 3, 5, 5, "1")
    assert net.name == net.__module__ == "pipeline.project.task"


def test_a_main_guard_does_not_run_and_annotations_resolve(root: Path) -> None:
    write(
        root,
        {
            "types.py": "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
            "@dataclass\nclass Point:\n    x: int\n    others: list[Point] = field(default_factory=list)\n",
            "task.py": "from typing import get_type_hints\nfrom types import Point\nclass Net:\n"
            "    hints = get_type_hints(Point)\nif __name__ == '__main__':\n    raise SystemExit(1)\n",
        },
    )
    hints = load_class("task.py:Net", root).hints
    assert hints["x"] is int
    assert hints["others"].__args__[0].__name__ == "Point"


DATASET = """import torch
from queue import SCALE

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * SCALE
"""


def test_spawned_workers_import_the_users_classes(tmp_path: Path) -> None:
    write(tmp_path, {"dataset.py": DATASET, "queue.py": "SCALE = 3\n", "src/task.py": "from dataset import Numbers\n"})
    program = (
        "import sys; from pathlib import Path; import torch; from pipeline.contract.task import load_class\n"
        "if __name__ == '__main__':\n"
        "    data = load_class('src/task.py:Numbers', Path(sys.argv[1]))()\n"
        "    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context='spawn')\n"
        "    print([int(item) for item in loader])\n"
    )
    script = tmp_path / "elsewhere" / "main.py"
    write(script.parent, {"main.py": program})
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(tmp_path)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "[0, 3, 6, 9]\n", done.stderr


def test_a_plain_name_is_the_same_module_after_installed_ones(root: Path) -> None:
    write(
        root,
        {
            "registry.py": "KINDS = {}\n",
            "nets/small.py": "from registry import KINDS\nclass Small: ...\nKINDS['small'] = Small\n",
            "json.py": "mine = True\n",
            "wandb_logs/notes.txt": "",
            "task.py": "import importlib\nfrom registry import KINDS\nimportlib.import_module('nets.small')\n"
            "theirs = importlib.import_module('json')\nclass Net:\n    kinds, theirs = KINDS, theirs\n",
        },
    )
    net = load_class("task.py:Net", root)
    assert net.kinds["small"].__module__ == "pipeline.project.nets.small"
    assert not hasattr(net.theirs, "mine")
    assert importlib.import_module("nets.small").Small is net.kinds["small"]
    assert importlib.import_module("nets.small").__name__ == "pipeline.project.nets.small"
    assert pickle.loads(pickle.dumps(net.kinds["small"]())).__class__ is net.kinds["small"]
    assert pickle.loads(b"cnets.small\nSmall\n.") is net.kinds["small"]  # as a script of the user pickles it
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("wandb_logs")


def test_a_project_works_with_compiled_and_inspected_code(root: Path) -> None:
    write(root, {"utils.py": "def double(x):\n    return 2 * x\n", "task.py": COMPILED})
    net = load_class("task.py:Net", root)
    assert net.result() == 6
    assert "torch.compile" in net.source()
    assert not list(root.rglob("*.pyc"))


COMPILED = """import inspect
import torch
import utils

class Net:
    @staticmethod
    def result():
        compiled = torch.compile(lambda x: utils.double(x) + len([0]) - 1, backend="eager", fullgraph=True)
        return int(compiled(torch.tensor(3)))

    @staticmethod
    def source():
        return inspect.getsource(Net.result)
"""


def test_two_packages_have_different_files_of_one_name(tmp_path: Path) -> None:
    kinds: list[Any] = []
    for number in (1, 2):
        write(
            tmp_path / str(number),
            {"codec.py": "import utils\nclass Codec:\n    value = utils.VALUE\n", "utils.py": f"VALUE = {number}\n"},
        )
        kinds.append(load_class("codec.py:Codec", tmp_path / str(number), f"_codec_{number}"))
    assert [kind.value for kind in kinds] == [1, 2]
    (tmp_path / "1" / "utils.py").write_text("VALUE = 3\n")
    assert load_class("codec.py:Codec", tmp_path / "1", "_codec_1").value == 3


def test_a_module_missing_below_a_project_file_is_reported_by_its_name(root: Path) -> None:
    write(root, {"task.py": "import helper.missing\nclass Net: ...\n", "helper.py": ""})
    with pytest.raises(ConfigError, match=r"No module named 'helper\.missing'") as caught:
        load_class("task.py:Net", root)
    assert "pipeline" not in str(caught.value)


def test_one_bundle_can_be_loaded_in_several_threads(tmp_path: Path) -> None:
    codec = "import utils\nclass Codec:\n    value = utils.VALUE\n"
    write(tmp_path, {"codec.py": codec, "utils.py": "VALUE = 1\n"})
    with ThreadPoolExecutor(4) as pool:
        kinds = pool.map(lambda _: load_class("codec.py:Codec", tmp_path, "_codec_in_threads"), range(40))
    assert {kind.value for kind in kinds} == {1}
