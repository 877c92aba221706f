"""Which side of the line a point lies on: a task that trains in a moment, and can be paused by tests."""

import time
from pathlib import Path

import torch
from codec import SideCodec
from points import points
from torch import nn
from torch.nn import functional

HOLD = Path(__file__).with_name("hold")  # contains the number of steps after which training waits


class Sides:
    inputs = ("place",)
    outputs = ("scores",)
    classes = ("below", "above")
    steps = 0

    def model(self):
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.05), nn.Linear(64, 2))

    def data(self, split):
        place, label = points(split)
        return {**SideCodec().decode(place), "label": label}

    def loss(self, outputs, batch):
        if torch.is_grad_enabled():
            self.steps += 1
            while HOLD.exists() and self.steps > int(HOLD.read_text()):
                time.sleep(0.01)
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs, batch):
        return {"accuracy": (self.predicted(outputs) == batch["label"]).float()}

    def predicted(self, outputs):
        return outputs.argmax(dim=1)

    def actual(self, batch):
        return batch["label"]

    def baseline(self):
        """Above the axis is above the line: mostly right."""
        return lambda batch: functional.one_hot((batch["place"][:, 1] > 0).long(), 2).float()

    def example(self):
        return [[0.5, -0.5], [-0.25, 0.75]]
