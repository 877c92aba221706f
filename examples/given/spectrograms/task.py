"""An Audio Spectrogram Transformer with its weights as they are. To finetune it, add labelled data and loss()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import MOST, WINDOW, Codec
from sounds import draw_sounds, read_sound
from torch import Tensor, nn
from transformers import AutoConfig, AutoFeatureExtractor, AutoModelForAudioClassification, pipeline
from transformers.audio_utils import mel_filter_bank

LONGEST = 20  # seconds of a recording, of which the model takes the beginning
SAMPLES = 4  # sounds on which the ONNX file is compared with torch; replace: your own in data()


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = AutoModelForAudioClassification.from_config(config, dtype=torch.float32)

    def forward(self, input_values: Tensor) -> Tensor:
        logits: Tensor = self.model(input_values).logits
        return logits


class Task:
    inputs = ("input_values",)
    outputs = ("logits",)

    def make_files(self, folder: Path) -> None:
        """Write the files for the codec: what the feature extractor does, and the classes."""
        config, sound = AutoConfig.from_pretrained(folder), AutoFeatureExtractor.from_pretrained(folder)
        functions = {"regression": "none", "multi_label_classification": "sigmoid"}
        facts = {
            "rate": sound.sampling_rate,
            "longest": LONGEST * sound.sampling_rate,
            "frames": sound.max_length,
            "mean": sound.mean if sound.do_normalize else 0,
            "std": 2 * sound.std if sound.do_normalize else 1,
            "labels": [config.id2label[i] for i in range(config.num_labels)],
            "function": functions.get(config.problem_type, "softmax"),
        }
        (folder / "model.json").write_text(json.dumps(facts, indent=1))
        bands = mel_filter_bank(
            257, sound.num_mel_bins, 20, sound.sampling_rate // 2, sound.sampling_rate, None, "kaldi", True
        )
        np.save(folder / "bands.npy", bands)

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def adapt(self, folder: Path) -> nn.Module:
        return Net(AutoConfig.from_pretrained(folder))

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> Any:
        return self.codec.decode(self._sounds(SAMPLES))

    def example(self) -> list[Any]:
        return self._sounds(2)

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return the answers of transformers' own pipeline."""
        sound, most = AutoFeatureExtractor.from_pretrained(self.folder), min(MOST, len(self.codec.facts["labels"]))
        classify = pipeline("audio-classification", model=model.model, feature_extractor=sound)
        rate, longest = self.codec.facts["rate"], self.codec.facts["longest"]
        return list(classify([read_sound(instance, rate, WINDOW, longest) for instance in instances], top_k=most))

    def _sounds(self, count: int) -> list[Any]:
        return draw_sounds(np.linspace(0.1, 0.9, count) * self.codec.facts["longest"], self.codec.facts["rate"])
