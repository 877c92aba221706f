"""A model of semantic segmentation with its weights as they are. To finetune it, add labelled data and loss()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from pictures import draw_pictures, read_picture, write_picture
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoImageProcessor, AutoModelForSemanticSegmentation

from pipeline import ConfigError

SAMPLES = 4  # pictures on which the ONNX file is compared with torch; replace: your own in data()


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        if getattr(config, "use_pretrained_backbone", False):
            config.use_pretrained_backbone = False  # its weights are in the model's file
        # "eager": torch.export cannot trace the fused attention of BEiT.
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForSemanticSegmentation.from_config(config, **options)

    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values).logits
        return logits


class Task:
    inputs = ("pixel_values",)
    outputs = ("logits",)

    def make_files(self, folder: Path) -> None:
        """Write model.json for the codec: what the image processor does, and the classes."""
        labels, steps = AutoConfig.from_pretrained(folder).id2label, _processor(folder).to_dict()
        sides = steps["crop_size"] if steps.get("do_center_crop") else steps["size"]
        if "height" not in sides or steps.get("keep_aspect_ratio"):
            raise ConfigError(
                "preprocessor_config.json of the model keeps the ratio of pictures, but all must get one size; to fix "
                'it: write `"size": {"height": 512, "width": 512}` and `"keep_aspect_ratio": false` there'
            )
        facts = {"processor": steps, "labels": [labels[i] for i in range(len(labels))]}
        (folder / "model.json").write_text(json.dumps(facts, indent=1, default=str))

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def adapt(self, folder: Path) -> nn.Module:
        return Net(AutoConfig.from_pretrained(folder))

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> dict[str, Any]:
        return {"pixel_values": np.stack([self.codec.pixels(picture) for picture in draw_pictures(SAMPLES)])}

    def example(self) -> list[Any]:
        """Return small pictures, which have few pixels with two classes that are nearly equal."""
        return [write_picture(picture) for picture in draw_pictures(2, 24, 48)]

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return the maps of transformers' own processor."""
        processor, answers = _processor(self.folder), []
        for picture in map(read_picture, instances):
            with torch.inference_mode():
                outputs = model.model(**processor(picture, return_tensors="pt"))
            size = picture.height, picture.width
            classes = processor.post_process_semantic_segmentation(outputs, [size])[0]
            scores = functional.interpolate(outputs.logits, size, mode="bilinear", align_corners=False)[0]
            answers.append(ClassMap(classes.numpy(), scores.numpy()))
        return answers


class ClassMap:
    """A map that equals the codec's where each pixel has the same class, or one with nearly the same score."""

    def __init__(self, classes: Any, scores: Any) -> None:
        self.classes, self.scores = classes, scores

    def __eq__(self, answer: Any) -> bool:
        found = np.repeat(answer["values"], answer["lengths"]).reshape(self.classes.shape)
        scores = [np.take_along_axis(self.scores, classes[None], axis=0) for classes in (self.classes, found)]
        return bool(np.allclose(*scores, rtol=1e-4, atol=1e-4))

    def __str__(self) -> str:
        return f"another class for some pixels of {self.classes.tolist()}"


def _processor(folder: Path) -> Any:
    return AutoImageProcessor.from_pretrained(folder, backend="pil")  # which the codec uses, too
