"""A network of timm; model.json has its name and how timm prepares pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import create_transform
from timm.layers import set_fused_attn
from torch import nn

FACTS = Path(__file__).parent / "model.json"


def write_facts(folder: Path) -> None:
    shutil.copyfile(FACTS, folder / "model.json")


def build(folder: Path) -> nn.Module:
    facts = json.loads(FACTS.read_text())
    set_fused_attn(False)  # torch's fused attention gives strides and shapes with which some models do not export
    model: nn.Module = timm.create_model(facts["name"], num_classes=len(facts["labels"]))
    return model


def answers(model: nn.Module, pictures: list[Image.Image], folder: Path, labels: list[str]) -> list[Any]:
    transform = create_transform(**json.loads(FACTS.read_text())["data"])
    logits = model(torch.stack([transform(picture.convert("RGB")) for picture in pictures]))
    best = logits.softmax(dim=1).topk(min(5, len(labels)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [[{"label": labels[i], "score": s} for s, i in zip(*pair, strict=True)] for pair in pairs]
