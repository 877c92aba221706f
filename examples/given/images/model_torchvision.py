"""A network of torchvision; model.json has its name and how torchvision prepares pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torchvision import models

FACTS = Path(__file__).parent / "model.json"


def write_facts(folder: Path) -> None:
    shutil.copyfile(FACTS, folder / "model.json")


def build(folder: Path) -> nn.Module:
    facts = json.loads(FACTS.read_text())
    options = {"init_weights": False} if facts["name"] in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(facts["name"], weights=None, num_classes=len(facts["labels"]), **options)
    return model


def answers(model: nn.Module, pictures: list[Image.Image], folder: Path, labels: list[str]) -> list[Any]:
    transform = models.get_model_weights(json.loads(FACTS.read_text())["name"]).DEFAULT.transforms()
    logits = model(torch.stack([transform(picture.convert("RGB")) for picture in pictures]))
    best = logits.softmax(dim=1).topk(min(5, len(labels)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[{"label": labels[i], "score": s} for s, i in zip(*pair, strict=True)] for pair in pairs]
