"""A classifier of transformers; model.pretrained has its configuration and its image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, pipeline


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        # "eager": the fused attention of torch gives strides with which some models do not export.
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForImageClassification.from_config(config, **options)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


def write_facts(folder: Path) -> None:
    """Write model.json for the codec: what the image processor does, and the classes."""
    labels = AutoConfig.from_pretrained(folder).id2label
    facts = {"processor": _steps(_processor(folder)), "labels": [labels[i] for i in range(len(labels))]}
    (folder / "model.json").write_text(json.dumps(facts, indent=1, default=str))


def _steps(processor: Any) -> dict[str, Any]:
    """Return the settings of the image processor, with what is in the code of its class written out."""
    steps: dict[str, Any] = processor.to_dict()
    name, edge = type(processor).__name__, (steps.get("size") or {}).get("shortest_edge")
    if name.startswith("ConvNext"):  # at 384 and above it squeezes the whole picture
        crop = {"height": edge, "width": edge}
        resized = {"shortest_edge": int(edge / steps["crop_pct"])} if edge < 384 else crop
        steps |= {"size": resized, "do_center_crop": edge < 384, "crop_size": crop}
    elif name.startswith("PoolFormer") and edge and steps["crop_pct"]:
        steps["size"] = {"shortest_edge": int(edge / steps["crop_pct"])}
    elif name.startswith("Levit") and edge:
        steps["size"] = {"shortest_edge": int(256 / 224 * edge)}
    if "clusters" in steps or not ("height" in (steps.get("size") or {}) or steps.get("do_center_crop")):
        raise ValueError(f"{name} does not give pixels of one size, which this task needs; write its steps in codec.py")
    return steps


def build(folder: Path) -> nn.Module:
    return Net(AutoConfig.from_pretrained(folder))


def answers(model: nn.Module, pictures: list[Image.Image], folder: Path, labels: list[str]) -> list[Any]:
    classify = pipeline("image-classification", model=model.model, image_processor=_processor(folder))
    return [list(answer) for answer in classify(pictures, top_k=min(5, len(labels)))]


def _processor(folder: Path) -> Any:
    return AutoImageProcessor.from_pretrained(folder, backend="pil")  # which the codec uses, too
