"""Edits of the user's code: which of them can change the weights, and which cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.contract.config import parse_config
from pipeline.plan import STEP_KINDS
from pipeline.system.sources import project_code

TASK = '''"""Points on two sides of a line."""

import torch
from codec import PointCodec

WIDTH = 8  # of the hidden layer


def scaled(x):
    """Scale to [0, 1]."""
    return x / 10


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 2))

    def forward(self, point):
        return self.layers(point)


class Sides:
    inputs = ("point",)
    outputs = ("logits",)
    classes = ("left", "right")

    def model(self):
        return Net()

    def data(self, split):
        points = torch.rand(100, 2, generator=torch.Generator().manual_seed(len(split)))
        return {"point": scaled(points), "side": (points[:, 0] > 5).long()}

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs["logits"], batch["side"])

    def metrics(self, outputs, batch):
        return {"accuracy": (self.predicted(outputs) == batch["side"]).float()}

    def predicted(self, outputs):
        return outputs["logits"].argmax(1)

    def actual(self, batch):
        return batch["side"]

    def slices(self, batch):
        return {"height": ["high" if y > 5 else "low" for y in batch["point"][:, 1]]}

    def example(self):
        return [[0.5, 0.5], [1.0, 2.0]]

    def text(self, batch):
        return [f"point {x}" for x in batch["point"]]
'''
CODEC = '''import numpy as np


class PointCodec:
    """Points as JSON lists."""

    def decode(self, instances):
        return {"point": np.asarray(instances, np.float32)}

    def encode(self, outputs):
        return [{"side": int(row.argmax())} for row in outputs["logits"]]
'''
Edit = Callable[[str, str], tuple[str, str]]  # of task.py and codec.py


def task(old: str, new: str) -> Edit:
    assert TASK.count(old) >= 1, old
    return lambda task, codec: (task.replace(old, new), codec)


def codec(old: str, new: str) -> Edit:
    assert CODEC.count(old) >= 1, old
    return lambda task, codec: (task, codec.replace(old, new))


HARMLESS: dict[str, Edit] = {
    "a comment changed": task("# of the hidden layer", "# neurons"),
    "the module's docstring": task('"""Points on two sides of a line."""', '"""Two classes."""'),
    "a function's docstring removed": task('    """Scale to [0, 1]."""\n', ""),
    "a docstring added": task("class Net(torch.nn.Module):\n", 'class Net(torch.nn.Module):\n    """A net."""\n\n'),
    "blank lines": task("\n\nclass Net", "\n\n\n\nclass Net"),
    "other quotes": task('("left", "right")', "('left', 'right')"),
    "a call on several lines": task(
        "torch.nn.Linear(2, WIDTH), ", "\n            torch.nn.Linear(2, WIDTH),\n            "
    ),
    "a number written otherwise": task("rand(100, 2", "rand(1_00, 2"),
    "example() edited": task("[1.0, 2.0]]", "[1.0, 2.5]]"),
    "slices() edited": task('"high" if y > 5', '"high" if y > 6'),
    "slices() removed": task(TASK[TASK.index("    def slices") : TASK.index("    def example")], ""),
    "directions of metrics declared": task(
        'classes = ("left", "right")\n', 'classes = ("left", "right")\n    directions = {"accuracy": "higher"}\n'
    ),
    "text() edited": task('f"point {x}"', 'f"{x}"'),
    "actual() edited": task('return batch["side"]\n\n    def slices', 'return batch["side"].clone()\n\n    def slices'),
    "encode() edited": codec('{"side": int', '{"class": int'),
    "encode() takes the inputs too": codec(
        """encode(self, outputs):
        return [{"side": int(row.argmax())} for row in outputs["logits"]]""",
        """encode(self, outputs, inputs):
        rows = zip(outputs["logits"], inputs["point"])
        return [{"side": int(row.argmax()), "at": point.tolist()} for row, point in rows]""",
    ),
    "encode() edited in a call": codec("row.argmax()", "row.argmax(axis=-1)"),
    "metrics() edited": task(".float()}", ".float() * 2}"),  # the best checkpoint is that of the lowest loss
    "predicted(), which metrics() calls": task(".argmax(1)", ".argmin(1)"),
    "decode(), which the task does not call": codec("np.float32", "np.float16"),
    "a function that nothing calls": task("def scaled(x):", "def shown(x): ...\n\n\ndef scaled(x):"),
    "a function that only slices() calls": task('"high" if y > 5 else "low"', "height(y)"),
    "a type hint of example()": task("    def example(self):", "    def example(self) -> list:"),
}
HARMFUL: dict[str, Edit] = {
    "a constant": task("WIDTH = 8", "WIDTH = 9"),
    "an operator": task("points[:, 0] > 5", "points[:, 0] >= 5"),
    "a layer": task("torch.nn.ReLU()", "torch.nn.Tanh()"),
    "the data": task("rand(100, 2", "rand(200, 2"),
    "the loss": task('batch["side"])\n\n    def metrics', 'batch["side"], reduction="sum")\n\n    def metrics'),
    "the order of statements": task("WIDTH = 8  # of the hidden layer\n", "WIDTH = 8\nWIDTH = 8\n"),
    "the order of inputs": task('inputs = ("point",)', 'inputs = ("point", "other")'),
    "classes": task('("left", "right")', '("right", "left")'),
    "an import": task("import torch\n", "import torch\ntorch.manual_seed(3)\n"),
    "decode(), which data() calls": lambda task, codec: (
        task.replace("        points = torch.rand", "        PointCodec().decode([])\n        points = torch.rand"),
        codec.replace("np.float32", "np.float16"),
    ),
    "a default": task("def scaled(x):", "def scaled(x, y=1):"),
    "a decorator": task("def scaled(x):", "@torch.no_grad()\ndef scaled(x):"),
    "example() with a default that is called at once": task("def example(self):", "def example(self, x=print()):"),
    "example() decorated": task("    def example", "    @torch.no_grad()\n    def example"),
    "directions that data() reads": task(
        'inputs = ("point",)\n', 'inputs = ("point",)\n    directions = {}\n    data_order = "directions"\n'
    ),
    "directions that a call computes": task(
        'inputs = ("point",)\n', 'inputs = ("point",)\n    directions = dict(x=1)\n'
    ),
    "example(), which data() calls": lambda task, codec: (
        task.replace("        points = torch.rand", "        self.example()\n        points = torch.rand").replace(
            "[1.0, 2.0]]", "[1.0, 3.0]]"
        ),
        codec,
    ),
}


def weights_code(folder: Path, edit: Edit = lambda task, codec: (task, codec)) -> dict[str, str]:
    texts = edit(TASK, CODEC)
    for name, text in zip(("task.py", "codec.py"), texts, strict=True):
        (folder / name).write_text(text)
    return step_code(folder, "train")


def step_code(folder: Path, step: str) -> dict[str, str]:
    kind = STEP_KINDS[step]
    config = parse_config({"name": "x", "task": "task.py:Sides", "codec": "codec.py:PointCodec"}, source="test")
    return project_code(folder, kind.user_files(config), kind.unused, kind.named)


@pytest.mark.parametrize("edit", HARMLESS.values(), ids=HARMLESS)
def test_edits_that_cannot_change_the_weights_do_not_retrain(tmp_path: Path, edit: Edit) -> None:
    assert edit(TASK, CODEC) != (TASK, CODEC)
    assert weights_code(tmp_path, edit) == weights_code(tmp_path)


@pytest.mark.parametrize("edit", HARMFUL.values(), ids=HARMFUL)
def test_edits_that_can_change_the_weights_retrain(tmp_path: Path, edit: Edit) -> None:
    assert weights_code(tmp_path, edit) != weights_code(tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        "Sides().example()",
        "getattr(Sides(), 'ex' + 'ample')()",
        "operator.methodcaller('example')(Sides())",
        "[getattr(Sides(), name)() for name in dir(Sides)]",
        "eval('Sides().exam' + 'ple()')",
        "vars(Sides)['exam' 'ple'](None)",
        "Sides.__dict__",
        "match Sides():\n    case object(example=call): call()",
        "Sides = wrapped(Sides)",
        "class Sides(Sides): ...",
    ],
)
def test_method_that_other_code_may_call_counts(tmp_path: Path, call: str) -> None:
    def before(task: str, codec: str) -> tuple[str, str]:
        return f"{task}\n\n{call}\n", codec

    def after(task: str, codec: str) -> tuple[str, str]:
        return f"{task}\n\n{call}\n".replace("[1.0, 2.0]]", "[1.0, 3.0]]"), codec

    assert weights_code(tmp_path, after) != weights_code(tmp_path, before)


def test_methods_called_by_used_ones_count(tmp_path: Path) -> None:
    """text() is called by loss(), and slices() by text(), so that both can change the weights."""
    called = TASK.replace(
        "        return torch.nn.functional", "        self.text(batch)\n        return torch.nn.functional"
    )
    called = called.replace('        return [f"point', '        self.slices(batch)\n        return [f"point')
    digest = weights_code(tmp_path, lambda task, codec: (called, codec))
    assert weights_code(tmp_path, lambda task, codec: (called.replace("y > 5", "y > 6"), codec)) != digest


@pytest.mark.parametrize(
    "reader", ["import inspect", "from inspect import getsource", "print(scaled.__doc__)", "open(__file__).read()"]
)
def test_every_byte_of_code_that_reads_its_source_counts(tmp_path: Path, reader: str) -> None:
    def before(task: str, codec: str) -> tuple[str, str]:
        return f"{task}\n{reader}\n", codec

    def after(task: str, codec: str) -> tuple[str, str]:
        return f"{task}\n{reader}  # a comment\n", codec

    assert weights_code(tmp_path, after) != weights_code(tmp_path, before)


def test_steps_differ_in_what_they_call(tmp_path: Path) -> None:
    def steps(edit: Edit) -> set[str]:
        kinds = [name for name, kind in STEP_KINDS.items() if kind.user_code]
        weights_code(tmp_path)
        before = {step: step_code(tmp_path, step) for step in kinds}
        weights_code(tmp_path, edit)
        return {step for step in kinds if step_code(tmp_path, step) != before[step]}

    assert steps(HARMLESS["slices() edited"]) == {"check", "evaluate"}
    assert steps(HARMLESS["text() edited"]) == {"check", "evaluate"}
    assert steps(HARMLESS["example() edited"]) == {"check", "evaluate", "export"}
    assert steps(HARMLESS["encode() edited"]) == {"check", "evaluate", "export"}
    assert steps(HARMLESS["metrics() edited"]) == {"check", "evaluate", "export"}
    assert steps(HARMLESS["predicted(), which metrics() calls"]) == {"check", "evaluate", "export"}
    assert steps(HARMLESS["a comment changed"]) == set()
    assert steps(HARMFUL["a layer"]) == {"check", "train", "evaluate", "export"}
    assert steps(HARMFUL["the loss"]) == {"check", "train", "evaluate", "export"}
    assert steps(HARMFUL["the data"]) == {"check", "prepare", "train", "evaluate", "export"}
    assert steps(HARMLESS["actual() edited"]) == {"check", "prepare", "evaluate", "export"}


def test_what_is_served_does_not_retrain(tmp_path: Path) -> None:
    """Training only looks whether there is a served form, whose outputs metrics() then gets."""
    serving = """
    serving_inputs, serving_outputs = ("point",), ("side",)

    def export_model(self, model):
        return Served(model, 0.5)
"""
    served = f"{TASK}{serving}\n\nclass Served(torch.nn.Module): ...\n"

    def code(text: str) -> dict[str, str]:
        return weights_code(tmp_path, lambda _, codec: (text, codec))

    assert code(served.replace("0.5", "0.7")) == code(served)
    assert code(served.replace("(torch.nn.Module): ...", "(torch.nn.Module): width = 3")) == code(served)
    assert code(TASK) != code(served)


def test_quantiles_of_a_forecast_repeat_neither_prepare_nor_train(tmp_path: Path) -> None:
    """Unless the loss reads them."""
    methods = "    quantiles = (0.1, 0.9)\n\n    def predicted_quantiles(self, outputs):\n        return outputs\n\n"
    added = task("    def slices(", methods + "    def slices(")

    def codes(edit: Edit) -> list[dict[str, str]]:
        weights_code(tmp_path, edit)
        return [step_code(tmp_path, step) for step in ("prepare", "train")]

    before = codes(lambda task, codec: (task, codec))
    assert codes(added) == before
    read = task("    def slices(", methods.replace("outputs\n\n", "outputs + 1\n\n") + "    def slices(")
    assert codes(read) == before
    in_loss = task(
        "    def loss(self, outputs, batch):\n", "    def loss(self, outputs, batch):\n        self.quantiles\n"
    )
    one = codes(lambda *files: in_loss(*added(*files)))
    other_levels = task("    def slices(", methods.replace("0.1", "0.2") + "    def slices(")
    other = codes(lambda *files: in_loss(*other_levels(*files)))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False]


def test_only_the_existence_of_a_member_may_count(tmp_path: Path) -> None:
    """With predicted() the task is a classifier, whose classes prepare counts; what it returns does not matter."""

    def code(edit: Edit) -> dict[str, str]:
        weights_code(tmp_path, edit)
        return step_code(tmp_path, "prepare")

    removed = task(TASK[TASK.index("    def predicted") : TASK.index("    def actual")], "")
    unchanged = code(lambda task, codec: (task, codec))
    assert code(HARMLESS["predicted(), which metrics() calls"]) == unchanged
    assert code(removed) != unchanged
