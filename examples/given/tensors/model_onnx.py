"""The ONNX file, whose bytes are in weights/."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline import OnnxModel


def build() -> OnnxModel:
    return OnnxModel(json.loads(Path(__file__).with_name("model.json").read_text())["bytes"])
