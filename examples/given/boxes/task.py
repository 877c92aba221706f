"""A detector of things in pictures with its weights as they are. To finetune it, return labelled data(), add loss()."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from codec import LEAST, Codec
from pictures import draw_pictures, read_picture, write_picture
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection

SAMPLES = 4  # pictures on which the ONNX file is compared with torch; replace: your own in data()
SHORTEST = 32  # pixels of a side, of which some layers leave one


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        if getattr(config, "use_pretrained_backbone", False):
            config.use_pretrained_backbone = False  # its weights are in the model's file
        # "eager": the fused attention of torch gives strides with which some models do not export.
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForObjectDetection.from_config(config, **options)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(pixel_values)
        return outputs.logits, outputs.pred_boxes


class Task:
    inputs = ("pixel_values",)
    outputs = ("logits", "boxes")

    def make_files(self, folder: Path) -> None:
        """Write model.json for the codec: what the image processor does, and the classes."""
        config, processor = AutoConfig.from_pretrained(folder), _processor(folder)
        labels, name = config.id2label, type(processor).__name__
        facts = {
            # Of the classes of all boxes so many are taken, where they are no alternatives.
            "most": 0 if name.startswith(("Detr", "Yolos")) else config.num_queries if "RTDetr" in name else 100,
            "processor": processor.to_dict(),
            "multiple": 16 if "Yolos" in name else 1,  # of which the sides are
            "labels": [labels[i] for i in range(len(labels))],
        }
        (folder / "model.json").write_text(json.dumps(facts, indent=1, default=str))

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)
        size = self.codec.steps["size"]
        if "longest_edge" in size:  # otherwise all pictures get one size
            self.axes = {"pixel_values": ("batch", 3, "height", "width")}
            self.longest = dict.fromkeys(("height", "width"), size["longest_edge"])
            self.shortest = dict.fromkeys(("height", "width"), SHORTEST)

    def adapt(self, folder: Path) -> nn.Module:
        return Net(AutoConfig.from_pretrained(folder))

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> dict[str, Any]:
        return {"pixel_values": self.codec.join([self.codec.pixels(picture) for picture in draw_pictures(SAMPLES)])}

    def example(self) -> list[Any]:
        return [write_picture(picture) for picture in draw_pictures(2)]

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return the answers of transformers, with the boxes before they are rounded to whole pixels."""
        processor, answers = _processor(self.folder), []
        for instance in instances:
            picture = read_picture(instance)
            with torch.inference_mode():
                outputs = model.model(**processor(picture, return_tensors="pt"))
            sizes = torch.tensor([picture.size[::-1]])
            found = SimpleNamespace(**processor.post_process_object_detection(outputs, LEAST, sizes)[0])
            rows = zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist(), strict=True)
            answers.append([_thing(self.codec.labels[label], score, box) for label, score, box in rows])
        return answers


def _thing(label: str, score: float, box: list[float]) -> dict[str, Any]:
    return {"label": label, "score": score, "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))}


def _processor(folder: Path) -> Any:
    return AutoImageProcessor.from_pretrained(folder, backend="pil")  # which the codec uses, too
