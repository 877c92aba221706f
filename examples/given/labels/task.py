"""The model of task.py with labelled data: its answers, as the codec gives them, are compared with the labels."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import task
import torch
from torch import Tensor
from torch.nn import functional

from pipeline import Bundle, ConfigError, read_jsonl, read_table

DATA = ""  # a folder with one folder for each class, or .csv, .parquet or .jsonl with a column `label`
BASELINE = ""  # the bundle of a model that this one is compared with
TRAIN = ""  # other labelled data like DATA, to finetune the model with train.epochs=1


def read_rows(data: str = DATA) -> list[tuple[Any, Any]]:
    """Return what is sent of each sample, a file or the fields of a row, and its label."""
    path = Path(data)
    if path.is_dir():
        return [(file, file.parent.name) for file in sorted(path.glob("*/*")) if file.is_file()]
    if path.suffix == ".jsonl":
        rows = list(read_jsonl(data))
    else:
        columns = {name: column.tolist() for name, column in read_table(data).items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not rows or not all(isinstance(row, dict) and len(row) > 1 and "label" in row for row in rows):
        raise ConfigError(f"{data}: every row needs the field `label`, and another one")
    return [({name: row[name] for name in row if name != "label"}, row["label"]) for row in rows]


def are_numbers(labels: list[Any]) -> bool:
    """Return whether the labels are numbers to predict, and no classes."""
    return any(isinstance(label, float) and not label.is_integer() for label in labels)


class Answers(Tensor):
    """What predicted() returns for the baseline, whose own codec makes the answers."""


class Task(task.Task):
    classes: tuple[str, ...]

    def use_files(self, folder: Path) -> None:
        super().use_files(folder)
        self.rows = read_rows()
        labels = [label for _, label in self.rows]
        facts = {**getattr(self.codec, "facts", {}), **vars(self.codec)}
        if are_numbers(labels):
            self.directions = {"absolute_error": "lower"}
            return
        if facts.get("tags") or facts.get("function") not in (None, "softmax"):
            raise ConfigError(f"{DATA}: the model gives no single class, so that a label is no answer of it")
        self.classes = tuple(facts.get("labels", ())) or _all_classes(labels)

    def data(self, split: str) -> Any:
        rows, data = self.rows, DATA
        if TRAIN and split != "test":  # a tenth validates
            rows, data = read_rows(TRAIN), TRAIN
            rows = [row for number, row in enumerate(rows) if (number % 10 == 9) == (split == "validation")]
        return [
            {
                "instance": np.frombuffer(json.dumps(self._instance(row, data)).encode(), np.uint8),
                "label": self._value(label, data),
            }
            for row, label in rows
        ]

    def _instance(self, row: Any, data: str) -> Any:
        inputs = getattr(self.codec, "inputs", {})
        if inputs and {*row} != {*inputs}:
            return {name: [*row.values()] for name in inputs}  # of the only one, which has a number of each column
        file = Path(data).parent / row["file"] if isinstance(row, Mapping) and "file" in row else row
        if isinstance(file, Path):
            return {"b64": base64.b64encode(file.read_bytes()).decode()}
        return next(iter(row.values())) if len(row) == 1 and not inputs else row

    def _value(self, label: Any, data: str) -> Any:
        """Return the number of a class, which may be written as its name or its number."""
        if not hasattr(self, "classes"):
            return float(label)
        name = str(int(label) if isinstance(label, float) else label)
        if name in self.classes:
            return self.classes.index(name)
        if name.isdigit() and int(name) < len(self.classes):
            return int(name)
        raise ConfigError(
            f"{data}: {label!r} is no class of the model; its classes are {', '.join(self.classes)[:300]}"
        )

    def collate(self, samples: Any) -> Any:
        """Let the codec decode what a client would send, which each sample has as JSON; spaces follow a shorter one."""
        texts = [bytes(np.asarray(sample["instance"])) for sample in samples]
        longest = max(map(len, texts))
        arrays = self.codec.decode([json.loads(text) for text in texts])
        return {
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
            "instance": torch.frombuffer(bytearray(b"".join(text.ljust(longest) for text in texts)), dtype=torch.uint8)
            .reshape(len(texts), longest),
            "label": torch.tensor([np.asarray(sample["label"]).item() for sample in samples]),
        }  # fmt: skip

    def instances(self, batch: Any) -> list[Any]:
        return [json.loads(bytes(row.numpy())) for row in batch["instance"]]

    def actual(self, batch: Any) -> Tensor:
        label: Tensor = batch["label"]
        return label

    def predicted(self, outputs: Any) -> Tensor:
        arrays = outputs if isinstance(outputs, Mapping) else {self.outputs[0]: outputs}
        first = next(iter(arrays.values()))
        if isinstance(first, Answers):
            return first.as_subclass(Tensor)
        numbers = {name: array.detach().cpu().numpy() for name, array in arrays.items()}
        unused = [{}] * (len(inspect.signature(self.codec.encode).parameters) - 1)  # the inputs, for answers of tokens
        return self._read(self.codec.encode(numbers, *unused))

    def _read(self, predictions: list[Any]) -> Tensor:
        return torch.tensor([self.answer(prediction) for prediction in predictions])

    def answer(self, prediction: Any) -> Any:
        """Return the class of the highest score, or the number that is predicted."""
        best = prediction[0] if isinstance(prediction, list) else prediction
        value = best["label"] if "label" in best else next(iter(best.values()))
        numbers = np.ravel(value)
        if not hasattr(self, "classes"):
            return float(best.get("score", numbers[0]))
        if len(numbers) > 1:
            return min(int(numbers.argmax()), len(self.classes) - 1)
        return self.classes.index(str(value)) if str(value) in self.classes else len(self.classes) - 1  # "another"

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if not TRAIN:
            raise ConfigError(f"{DATA} judges the model; to finetune it, set TRAIN in labelled.py to other data")
        first = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
        if hasattr(self, "classes"):
            return functional.cross_entropy(first, self.actual(batch))
        return functional.mse_loss(first.reshape(len(first)), self.actual(batch).to(first.dtype))

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        predicted, actual = self.predicted(outputs), self.actual(batch)
        if hasattr(self, "classes"):
            return {"accuracy": (predicted == actual).float()}
        return {"absolute_error": (predicted - actual).abs()}

    if BASELINE:

        def baseline(self) -> Any:
            bundle = Bundle.load(BASELINE)

            def predict(batch: Any) -> Any:
                answers = self._read(bundle.predict(self.instances(batch))).as_subclass(Answers)
                return dict.fromkeys(self.outputs, answers)

            return predict


def _all_classes(labels: list[Any]) -> tuple[str, ...]:
    """Return the classes of a model without names: all numbers up to the last label, and those that no label has."""
    if all(isinstance(label, int | float) for label in labels):
        return (*map(str, range(int(max(labels)) + 1)), "another")
    return (*sorted({*map(str, labels)}), "another")
