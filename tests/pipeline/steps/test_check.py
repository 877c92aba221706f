"""The check step: mistakes in task and codec are found with an untrained model, and each names a line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.contract.run import Run
from pipeline.steps.check import check
from pipeline.system.errors import PipelineError

from ..records import write_run_file

TASK = """
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.head(hidden)


class Task:
    inputs = ("x",)
    outputs = ("logits",)
    classes = ("low", "middle", "high")

    def model(self):
        return Net()

    def data(self, split):
        seed = {"train": 0, "validation": 1, "test": 2}[split]
        x = np.random.default_rng(seed).standard_normal((24, 4)).astype(np.float32)
        label = np.digitize(x.sum(1), [-1, 1])
        return {"x": x, "label": label}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(1) == batch["label"]).float()}

    def predicted(self, outputs):
        return outputs.argmax(1)

    def actual(self, batch):
        return batch["label"]

    def probabilities(self, outputs):
        return outputs.softmax(1)

    def slices(self, batch):
        return {"sign": ["+" if row[0] > 0 else "-" for row in batch["x"]]}

    def baseline(self):
        return lambda batch: torch.zeros(len(batch["x"]), 3)

    def show(self, batch, outputs):
        return [{"x": row} for row in batch["x"]]

    def instances(self, batch):
        return batch["x"].tolist()

    def example(self):
        return [[0.1, 0.2, 0.3, 0.4]]
"""
CODEC = """
import numpy as np


class Codec:
    def decode(self, instances):
        return {"x": np.asarray(instances, np.float32)}

    def encode(self, outputs):
        return [("low", "middle", "high")[i] for i in outputs["logits"].argmax(1)]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "codec.py").write_text(CODEC)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text(), old
    path.write_text(path.read_text().replace(old, new))


def new_run(root: Path, **sections: Any) -> Run:
    run = Run(root / "runs" / "run")
    run.partial("check").mkdir(parents=True)
    return write_run_file(run, "check", task="task.py:Task", codec="codec.py:Codec", **sections)


def test_what_was_seen_is_recorded_and_nothing_else_is_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(root, evaluate={"metric": "accuracy"}, export={"variants": ["fp32", "int8-dynamic"]})
    check(run, root)
    folder = run.partial("check")
    assert [path.name for path in folder.iterdir()] == ["check.json"]
    seen = json.loads((folder / "check.json").read_text())
    assert seen["columns"] == {"x": "float32 [8, 4]", "label": "int64 [8]"}
    assert {"accuracy", "auc"} <= set(seen["metrics"])
    assert (seen["golden_requests"], seen["largest_difference"] < 1e-5, seen["loss"] > 0) == (1, True, True)
    assert seen["codec"][0] == "codec compared with the test data: decode() on 16 samples and encode() on 16 samples"
    assert set(seen["seconds"]) >= {"data()", "forward()", "loss()", "metrics()", "baseline()", "export of forward()"}
    assert "an untrained model went through the pipeline in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("member", "warned"),
    [
        ("def slice(self, batch): ...", True),
        ("def _slice(self, batch): ...", False),
        ("direction = {'error': 'lower'}", True),
        ("texts = ['a']", False),
    ],
)
def test_misspelt_optional_member_is_a_warning(
    root: Path, capsys: pytest.CaptureFixture[str], member: str, warned: bool
) -> None:
    edit(root / "task.py", "    def slices(", f"    {member}\n\n    def other(")
    check(new_run(root, evaluate={"metric": "accuracy"}), root)
    assert ("of the task; did you mean `" in capsys.readouterr().err) == warned


def test_column_of_some_splits_is_a_warning(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root / "task.py", '"label": label}', '"label": label, **({"weight": label} if split == "train" else {})}')
    check(new_run(root, evaluate={"metric": "accuracy"}), root)
    assert "warning: only data('train') has the column `weight`" in capsys.readouterr().err


def test_code_of_several_processes_runs_in_one(root: Path) -> None:
    edit(root / "task.py", "import torch\n", "import os\nimport torch\nimport torch.distributed as dist\n")
    edit(
        root / "task.py",
        "    def loss(self, outputs, batch):\n",
        "    def loss(self, outputs, batch):\n        dist.all_reduce(torch.ones(1 + int(os.environ['RANK'])))\n",
    )
    check(new_run(root, evaluate={"metric": "accuracy"}), root)
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_metric_named_like_an_error_may_have_either_direction(root: Path) -> None:
    edit(root / "task.py", '{"accuracy": ', '{"mae": outputs[:, 0], "accuracy": ')
    edit(root / "task.py", "    inputs =", '    directions = {"mae": "higher"}\n    inputs =')
    check(new_run(root, evaluate={"metric": "accuracy"}), root)


MISTAKES: dict[str, tuple[str, str, str, str]] = {  # name → old, new, message, and what the named line contains
    "shape": ("nn.Linear(4, 8)", "nn.Linear(5, 8)", "shapes cannot be multiplied.*`x` float32.*8, 4", "hidden = torch"),
    "an error without a direction": (
        '{"accuracy": ',
        '{"loss": outputs[:, 0], "accuracy": ',
        r"metrics.* returns `loss`, which reads like an error, .* directions = \{\"loss\": \"lower\"\}",
        "def metrics",
    ),
    "type of data": (".astype(np.float32)", "", "forward.*dtype.*`x` float64 .8, 4", "hidden = torch"),
    "branch": (
        "        return self.head(hidden)",
        "        return self.head(hidden if x.sum() > 0 else -hidden)",
        "decides in python by what its data are",
        "x.sum() > 0",
    ),
    "item": (
        "        return self.head(hidden)",
        "        return self.head(hidden) * x[0, 0].item()",
        "no Python number",
        "x[0, 0].item()",
    ),
    "forward takes a batch": (
        "x):\n        hidden",
        "x, y):\n        hidden",
        "forward.* does not take them",
        "def forward",
    ),
    "outputs": ('("logits",)', '("logits", "hidden")', "must return the tensors named in `outputs`", "outputs ="),
    "one name twice": ('("logits",)', '("x",)', "`x` is an input and an output", ""),
    "inputs": (
        'inputs = ("x",)',
        'inputs = ("features",)',
        "no column features, which the task names as an input",
        "def data",
    ),
    "axes": (
        '("logits",)',
        '("logits",)\n    axes = {"x": ("batch", 7)}\n    longest = {}',
        "`axes` has 7 for axis 1",
        "axes =",
    ),
    "longest": (
        '("logits",)',
        '("logits",)\n    axes = {"x": ("batch", "time")}\n    longest = {"time": 3}',
        "axis `time` is 4 long; `shortest` and `longest` allow 1 to 3",
        "longest =",
    ),
    "model": ("return Net()", "return Netz()", "NameError: name 'Netz' is not defined", "Netz()"),
    "nothing to train": ("return Net()", "return nn.Softmax(1)", "no weights to train.*train.epochs=0", "def model"),
    "data": ('"test": 2}', '"tset": 2}', "KeyError: 'test'", "{"),
    "loss per sample": (
        'batch["label"])\n\n    def metrics',
        'batch["label"], reduction="none")\n\n    def metrics',
        "loss.*one number.*shape .8.",
        "def loss",
    ),
    "loss without gradient": (
        "cross_entropy(outputs,",
        "cross_entropy(outputs.detach(),",
        "loss.*depends on no trained weight",
        "def loss",
    ),
    "loss column": (
        'cross_entropy(outputs, batch["label"])',
        'cross_entropy(outputs, batch["target"])',
        "KeyError: 'target'.*columns: `x`",
        'batch["target"]',
    ),
    "loss type": (
        'batch["label"])\n\n    def metrics',
        'batch["label"].float())\n\n    def metrics',
        "loss",
        "cross_entropy",
    ),
    "metrics": (").float()}", ").float().mean()}", "metrics.*one value per sample", "def metrics"),
    "metric of the gate": (
        '{"accuracy":',
        '{"accuracies":',
        r"the task has no metric accuracy \(it has accuracies, auc\); to fix it",
        "",
    ),
    "directions": (
        'outputs = ("logits",)',
        'outputs = ("logits",)\n    directions = {"error": "lower"}',
        r"directions of the task: metrics\(\) returns no error",
        "def metrics",
    ),
    "predicted": ("return outputs.argmax(1)", "return outputs", "predicted.*one integer per sample", "def predicted"),
    "actual": (
        'return batch["label"]',
        'return batch["label"] + 1',
        "actual.*class index is outside the 3 classes",
        "def actual",
    ),
    "probabilities": (
        "return outputs.softmax(1)",
        "return outputs",
        "probabilities.*apply a softmax",
        "def probabilities",
    ),
    "slices": ('"+" if row[0] > 0 else "-" for row in batch["x"]', '"+"', "slices", "def slices"),
    "baseline": ('torch.zeros(len(batch["x"]), 3)', "torch.zeros(2, 3)", "baseline.*shape .2, 3. for", "def baseline"),
    "empty split": (
        'return {"x": x, "label": label}',
        'return {"x": x[: 24 * (split != "test")], "label": label[: 24 * (split != "test")]}',
        r"data\('test'\): the split is empty",
        "def data",
    ),
    "lengths": ('"label": label}', '"label": label[1:]}', r"columns differ in length \(x 24, label 23\)", "def data"),
    "texts as labels": ('"label": label}', '"label": ["low"] * 24}', "column `label` has texts, as 'low'", "def data"),
    "infinite loss": (
        "cross_entropy(outputs,",
        "cross_entropy(outputs / 0,",
        r"loss\(\): is nan for the first 8 samples",
        "def loss",
    ),
    "weight of the loss": (
        "    def metrics(",
        '    def loss_weight(self, batch):\n        return batch["label"]\n\n    def metrics(',
        r"loss_weight\(\): must return one finite number",
        "def loss_weight",
    ),
    "optimizer": (
        "    def metrics(",
        (
            "    def optimizer(self, model, settings):\n"
            "        return torch.optim.SGD([model.head.weight], lr=settings.lr)\n\n"
            "    def metrics("
        ),
        r"optimizer\(\): leaves out 3 trained parameters",
        "def optimizer",
    ),
    "collate": (
        "    def loss(",
        "    def collate(self, samples):\n        return samples\n\n    def loss(",
        r"collate\(\): must return a mapping",
        "def collate",
    ),
    "text": (
        "    def show(self, batch, outputs):\n        return [",
        "    def text(self, batch):\n        return [",
        r"text\(\): must return one string for each of the",
        "def text",
    ),
    "instances": (
        'return batch["x"].tolist()',
        'return batch["x"].tolist()[1:]',
        r"instances\(batch\) returns 15 instances for 16 samples",
        "def instances",
    ),
    "answer": (
        "    def example(",
        "    def answer(self, prediction):\n        return prediction['label']\n\n    def example(",
        "the codec raises TypeError",
        "prediction['label']",
    ),
    "example": (
        "return [[0.1, 0.2, 0.3, 0.4]]",
        "return [np.ones(4)]",
        r"example\(\) or instances\(\) must give plain JSON values",
        "def example",
    ),
    "batch statistics": (
        "hidden = torch.relu(self.body(x))",
        "hidden = torch.relu(self.body(x - x.mean(0)))",
        "for a sample depends on the other samples in the batch",
        "def forward",
    ),
    "dropout": (
        "hidden = torch.relu(self.body(x))",
        "hidden = nn.functional.dropout(self.body(x))",
        "dropout stays on in eval mode",
        "functional.dropout",
    ),
    "show": ('[{"x": row} for row in batch["x"]]', "{}", "show.*one mapping", "def show"),
}


SERVED = """
class Served(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x, torch.zeros_like(x[:, 0])), x.sum(1)


class Task:
    serving_inputs = ("x",)
    serving_outputs = ("scores", "total")

    def export_model(self, model):
        return Served(model)
"""


@pytest.fixture
def served(root: Path) -> Path:
    """A model that in training gets the label, and that is served with an output more."""
    edit(root / "task.py", "def forward(self, x):", "def forward(self, x, label):")
    edit(root / "task.py", "return self.head(hidden)", "return self.head(hidden) + label[:, None] * 0.01")
    edit(root / "task.py", "class Task:", SERVED.strip())
    edit(root / "task.py", 'inputs = ("x",)\n    outputs', 'inputs = ("x", "label")\n    outputs')
    text = (root / "task.py").read_text()
    start = text.index("    def metrics")
    metrics = text[start:].replace("outputs.", 'outputs["scores"].').replace("torch.zeros(len(batch", "ZEROS(len(batch")
    metrics = metrics.replace(
        'ZEROS(len(batch["x"]), 3)', '{"scores": torch.zeros(len(batch["x"]), 3), "total": batch["x"]}'
    )
    (root / "task.py").write_text(text[:start] + metrics)
    edit(root / "codec.py", '"logits"', '"scores"')
    return root


def test_served_form_of_a_model_is_what_is_tried(served: Path) -> None:
    run = new_run(served, evaluate={"metric": "accuracy"})
    check(run, served)
    seen = json.loads((run.partial("check") / "check.json").read_text())
    assert seen["validation"].keys() == {"loss"}
    assert "accuracy" in seen["metrics"]
    assert seen["golden_requests"] == 1


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("def forward(self, x):\n        return", "def forward(self, x, y):\n        return", "does not take them", ""),
        (", x.sum(1)", "", "must return the tensors named in `outputs` \\(scores, total\\)", ""),
        ("return Served(model)", "return Served(net)", "NameError: name 'net' is not defined", "return Served(net)"),
        ('serving_inputs = ("x",)', 'serving_inputs = ("y",)', "no column y", ""),
    ],
)
def test_mistake_in_the_served_form_is_one_sentence(
    served: Path, old: str, new: str, message: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(served / "task.py", old, new)
    assert_found(served, "task.py", message, line, monkeypatch)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_the_task_is_one_sentence_with_a_line(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, message, line = MISTAKES[name]
    edit(root / "task.py", old, new)
    assert_found(root, "task.py", message, line, monkeypatch)


def forecast(root: Path) -> None:
    """Make the task one that forecasts three horizons."""
    task = root / "task.py"
    edit(task, '    classes = ("low", "middle", "high")\n', "    quantiles = (0.2, 0.8)\n")
    edit(task, "return outputs.argmax(1)", "return outputs")
    edit(task, 'return batch["label"]\n', 'return batch["x"][:, :3]\n')
    edit(task, "def probabilities(self, outputs):", "def predicted_quantiles(self, outputs):")
    edit(task, "return outputs.softmax(1)", "return torch.stack([outputs - 1, outputs + 1], dim=2)")
    edit(root / "codec.py", CODEC[CODEC.index("        return [(") :], '        return outputs["logits"].tolist()\n')


def test_forecast_of_several_horizons_goes_through(root: Path) -> None:
    forecast(root)
    edit(
        root / "task.py", "def example(", "def answer(self, prediction):\n        return prediction\n\n    def example("
    )
    run = new_run(root, evaluate={"metric": "pinball", "require": {"mae_3": 9, "coverage_error": 1}})
    check(run, root)
    seen = json.loads((run.partial("check") / "check.json").read_text())
    assert seen["metrics"] == ["accuracy", "coverage_error", "mae", "mae_3", "pinball", "r2", "rmse"]
    assert seen["codec"][0] == "codec compared with the test data: decode() on 16 samples and encode() on 16 samples"


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        (
            'batch["x"][:, :3]',
            'batch["x"][:, 0]',
            r"predicted\(\) and actual\(\) have the shapes \(samples, 3\) and \(samples,\)",
            "predicted",
        ),
        (
            "return outputs\n",
            "return outputs[:, 0]\n",
            r"predicted_quantiles\(\): needs predicted",
            "predicted_quantiles",
        ),
        ("outputs + 1], dim=2", "outputs + 1], dim=1", r"must have shape \(16, 3, 2\), not", "predicted_quantiles"),
        ("(0.2, 0.8)", "(0.8, 0.2)", r"write `quantiles` as .* rising", ""),
        ("quantiles = (0.2, 0.8)", "levels = (0.2, 0.8)", r"has predicted_quantiles; a task needs `quantiles`", ""),
        ("def actual(", "def truth(", "`quantiles` are for forecasts", ""),
    ],
)
def test_mistake_in_a_forecast_is_one_sentence_with_a_line(
    root: Path, old: str, new: str, message: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast(root)
    edit(root / "task.py", old, new)
    assert_found(root, "task.py", message, line and f"def {line}(", monkeypatch, metric="pinball")


def test_metric_of_a_horizon_that_is_not_there_is_named(root: Path) -> None:
    forecast(root)
    with pytest.raises(PipelineError, match=r"no metric mae_4 \(it has .*, also for each horizon, as mae_1 to mae_3\)"):
        check(new_run(root, evaluate={"metric": "mae_4"}), root)


CODEC_MISTAKES = {
    "no input": ('{"x":', '{"tokens":', "decode.* gives no array `x`", "def decode"),
    "array": (
        '[("low", "middle", "high")[i] for i in outputs["logits"].argmax(1)]',
        'outputs["logits"]',
        "encode.* list",
        "def encode",
    ),
    "numbers of numpy": ('("low", "middle", "high")[i]', "i", "encode.*plain JSON", "def encode"),
    "too few": (".argmax(1)]", ".argmax(1)][:1]", "encode.* gives 1 predictions for 16 samples", "def encode"),
    "another class": (
        '("low", "middle", "high")',
        '("middle", "high", "low")',
        "encode.* otherwise than the model",
        "def encode",
    ),
    "other values": (
        "np.asarray(instances, np.float32)",
        "np.asarray(instances, np.float32) * 2",
        "decode.* makes other values",
        "def decode",
    ),
    "type": (
        "np.asarray(instances, np.float32)",
        "np.asarray(instances, np.float64)",
        "decode.*float64.*FP32",
        "def decode",
    ),
    "arguments": (
        "def encode(self, outputs)",
        "def encode(self, outputs, inputs, extra)",
        r"encode\(\) must take \(outputs\) or \(outputs, inputs\)",
        "def encode",
    ),
    "torch in the service": (
        "import numpy as np",
        "import numpy as np\nimport torch",
        "codec.py imports torch, which the service does not install",
        "",
    ),
    "output": ('outputs["logits"]', 'outputs["logit"]', "KeyError: 'logit'", "logit"),
}


@pytest.mark.parametrize("name", CODEC_MISTAKES)
def test_mistake_in_the_codec_is_one_sentence_with_a_line(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, message, line = CODEC_MISTAKES[name]
    edit(root / "codec.py", old, new)
    assert_found(root, "codec.py", message, line, monkeypatch)


def assert_found(
    root: Path, file: str, message: str, line: str, monkeypatch: pytest.MonkeyPatch, metric: str = "accuracy"
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(PipelineError, match=message) as caught:
        check(new_run(root, evaluate={"metric": metric}), root)
    text = str(caught.value)
    print(text)
    assert "\n" not in text
    if line:
        number = next(i for i, code in enumerate((root / file).read_text().splitlines(), 1) if line in code)
        found = re.search(rf"{file},? line (\d+)", text)
        assert found, text
        assert int(found[1]) == number, text
