"""`pipe init --from`: what is recognized in training scripts, and the files written for them."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path

import pytest

from pipeline.cli.from_script import Script, read_script, task_source

from .conftest import Pipe

LOOP_SCRIPT = """
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class LeNet(nn.Module):
    def __init__(self, classes):
        super().__init__()

    def forward(self, pixels):
        return pixels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    transform = transforms.Compose([transforms.ToTensor()])
    train_set = datasets.MNIST("data", train=True, transform=transform)
    loader = DataLoader(train_set, batch_size=args.batch_size)
    model = LeNet(10).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        correct = 0
        for images, labels in loader:
            optimizer.zero_grad()
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            correct += (scores.argmax(1) == labels).sum()


if __name__ == "__main__":
    main()
"""

LIGHTNING_SCRIPT = """
import lightning as L
import torch

class Classifier(L.LightningModule):
    def __init__(self, hidden=64):
        super().__init__()
        self.net = torch.nn.Linear(28, hidden)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

class Digits(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.train, batch_size=32)

if __name__ == "__main__":
    L.Trainer(max_epochs=5).fit(Classifier(hidden=32), Digits())
"""

TRAINER_SCRIPT = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

name = "distilbert-base-uncased"
tokenizer = AutoTokenizer.from_pretrained(name)
data = load_dataset("imdb").map(lambda row: tokenizer(row["text"]))
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)

def accuracy_of(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}

arguments = TrainingArguments("out", num_train_epochs=3, learning_rate=2e-5, per_device_train_batch_size=16)
trainer = Trainer(
    model=model, args=arguments, train_dataset=data["train"], eval_dataset=data["test"], compute_metrics=accuracy_of
)
trainer.train()
"""


def read(folder: Path, text: str) -> Script:
    (folder / "fit.py").write_text(text)
    return read_script(folder / "fit.py")


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def left(script: Script) -> set[int]:
    return {piece.line for piece in script.left}


def test_plain_loop(tmp_path: Path) -> None:
    script = read(tmp_path, LOOP_SCRIPT)
    assert (script.models, script.arguments, script.build) == (("LeNet",), ("pixels",), "LeNet(10)")
    assert script.unsafe is None
    for part in ("--epochs", "Compose", "DataLoader(", "SGD(", "loss.backward()", "correct +="):
        assert line_of(LOOP_SCRIPT, part) in left(script), part


def test_lightning_module(tmp_path: Path) -> None:
    script = read(tmp_path, LIGHTNING_SCRIPT)
    assert (script.models, script.data) == (("Classifier",), ("Digits",))
    assert (script.build, script.arguments) == ("Classifier(hidden=32)", ("x",))
    assert line_of(LIGHTNING_SCRIPT, "max_epochs=5") in left(script)


def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    script = read(tmp_path, TRAINER_SCRIPT)
    assert script.unsafe is not None
    assert script.unsafe.line == line_of(TRAINER_SCRIPT, "tokenizer = ")
    assert script.imported == []
    for part in ("tokenizer = ", "load_dataset(", "num_train_epochs=3", "Trainer("):
        assert line_of(TRAINER_SCRIPT, part) in left(script), part


def test_own_loss_and_data_are_imported(tmp_path: Path) -> None:
    text = """
        class Rows(torch.utils.data.Dataset): ...
        class FocalLoss(nn.Module): ...
        def pinball_loss(prediction, target): ...
        class Net(nn.Module):
            def forward(self, past, future): ...
    """
    script = read(tmp_path, textwrap.dedent(text))
    assert (script.data, script.losses) == (("Rows",), ("FocalLoss", "pinball_loss"))
    task = task_source(script)
    assert "from fit import FocalLoss, Net, Rows, pinball_loss\n" in task
    assert 'inputs = ("past", "future",)' in task
    assert (script.build, script.left) == ("", ())


@pytest.mark.parametrize(
    ("statement", "is_safe"),
    [
        ("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')", True),
        ("try:\n    import wandb\nexcept ImportError:\n    wandb = None", True),
        ("if TYPE_CHECKING:\n    import numpy", True),
        ("model = Net()", False),
        ("if LARGE:\n    model = Net()", False),
        ("torch.manual_seed(0)", False),
        ("for epoch in range(3):\n    fit()", False),
    ],
)
def test_script_is_imported_only_if_that_does_no_work(tmp_path: Path, statement: str, is_safe: bool) -> None:
    script = read(tmp_path, f"{statement}\ndef fit():\n    loss.backward()\n")
    assert (script.unsafe is None) == is_safe


@pytest.mark.parametrize("text", [LOOP_SCRIPT, LIGHTNING_SCRIPT, TRAINER_SCRIPT])
def test_files_for_a_script_can_be_planned(pipe: Pipe, tmp_path: Path, text: str) -> None:
    """The script imports packages that are not installed: it is never run."""
    (tmp_path / "fit.py").write_text(text)
    written = json.loads(pipe("init", ".", "--from", "fit.py", "-o", "json", here=tmp_path).stdout)
    assert written["name"] == tmp_path.name.lower().replace("_", "-")[:40].strip("-")
    task = (tmp_path / "task.py").read_text()
    methods = [node for node in ast.walk(ast.parse(task)) if isinstance(node, ast.FunctionDef)]
    assert [method.name for method in methods] == ["model", "data", "loss", "metrics"]
    assert "raise NotImplementedError" in task
    assert ("cannot be imported" in task) == (text is TRAINER_SCRIPT)
    compile((tmp_path / "codec.py").read_text(), "codec.py", "exec")
    pipe("plan", here=tmp_path)


def test_a_model_of_the_script_is_imported_and_built(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(LOOP_SCRIPT)
    printed = pipe("init", "new", "--from", "fit.py", here=tmp_path).stdout
    assert "from fit import LeNet" in (tmp_path / "new" / "task.py").read_text()
    assert f"- line {line_of(LOOP_SCRIPT, 'SGD(')}: optimizer = torch" in (tmp_path / "new" / "task.py").read_text()
    assert "return LeNet(10)" in (tmp_path / "new" / "task.py").read_text()
    assert "copy fit.py" in printed
    assert "train:" not in (tmp_path / "new" / "pipe.yaml").read_text(), "no setting is guessed"


def test_scripts_that_do_not_train_are_refused(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("print('hello')\n")
    assert (
        "defines no nn.Module and trains nothing"
        in pipe("init", "a", "--from", "fit.py", here=tmp_path, expect=2).stderr
    )
    (tmp_path / "fit.py").write_text("def (:\n")
    assert "cannot be read as Python" in pipe("init", "a", "--from", "fit.py", here=tmp_path, expect=2).stderr
    assert "no such file" in pipe("init", "a", "--from", "none.py", here=tmp_path, expect=2).stderr
    assert not (tmp_path / "a").exists()
