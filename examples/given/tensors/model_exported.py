"""The program of torch.export, whose bytes are in weights/."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline import ExportedModel


def build() -> ExportedModel:
    return ExportedModel(json.loads(Path(__file__).with_name("model.json").read_text())["bytes"])
