from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.spec.errors import ConfigError
from pipeline.spec.task import Classifier, HasBaseline, HasExample, load_task

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
@pytest.mark.parametrize("value", [None, "'x'", "()", "('',)", "(1,)", "7"])
def test_names_that_are_missing_or_no_names_are_refused(root: Path, attribute: str, value: str | None) -> None:
    parts = {**WHOLE, attribute: f"    {attribute} = {value}"}
    write(root, parts if value else {name: text for name, text in WHOLE.items() if name != attribute})
    with pytest.raises(ConfigError, match=f"set `{attribute} = "):
        load_task("some_task.py:Net", root)


def test_one_name_used_twice_is_refused(root: Path) -> None:
    write(root, {**WHOLE, "outputs": "    outputs = ('y', 'y')"})
    with pytest.raises(ConfigError, match="set `outputs = "):
        load_task("some_task.py:Net", root)


def test_a_task_that_wants_arguments_is_refused(root: Path) -> None:
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
