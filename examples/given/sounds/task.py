"""A model of sound with its weights as they are. To finetune it, return labelled data() and add loss()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import MOST, Codec
from sounds import draw_sounds, read_sound
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForAudioClassification,
    AutoModelForCTC,
    AutoTokenizer,
    pipeline,
)

LONGEST = 20  # seconds of a recording
SAMPLES = 4  # sounds on which the ONNX file is compared with torch; replace: your own in data()


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        kind = AutoModelForCTC if _writes_text(config) else AutoModelForAudioClassification
        # "eager": the fused attention of torch gives strides with which some models do not export.
        self.model = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")

    def forward(self, input_values: Tensor) -> Tensor:
        logits: Tensor = self.model(input_values).logits
        return logits


def _writes_text(config: Any) -> bool:
    return bool(config.architectures[0].endswith("ForCTC"))


class Task:
    inputs = ("input_values",)
    outputs = ("logits",)
    axes = {"input_values": ("batch", "samples")}
    longest = {"samples": 16000 * LONGEST}

    def make_files(self, folder: Path) -> None:
        """Write model.json for the codec."""
        config, sound = AutoConfig.from_pretrained(folder), AutoFeatureExtractor.from_pretrained(folder)
        shortest = 1
        for kernel, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
            shortest = (shortest - 1) * stride + kernel  # samples of one frame
        facts = {
            "rate": sound.sampling_rate,
            "normalizes": sound.do_normalize,
            "shortest": shortest,
            "longest": LONGEST * sound.sampling_rate,
        }
        if _writes_text(config):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            facts["tokens"] = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
            facts["blank"], facts["space"] = tokenizer.pad_token, tokenizer.word_delimiter_token
            facts["lowercase"] = tokenizer.do_lower_case
        else:
            functions = {"regression": "none", "multi_label_classification": "sigmoid"}
            facts["labels"] = [config.id2label[i] for i in range(config.num_labels)]
            facts["function"] = functions.get(config.problem_type, "softmax")
        (folder / "model.json").write_text(json.dumps(facts, indent=1))

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)
        self.longest = {"samples": self.codec.facts["longest"]}
        self.shortest = {"samples": self.codec.facts["shortest"]}

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
        library = {"model": model.model, "feature_extractor": AutoFeatureExtractor.from_pretrained(self.folder)}
        rate, limits = self.codec.facts["rate"], (self.codec.facts["shortest"], self.codec.facts["longest"])
        sounds = [{"raw": read_sound(instance, rate, *limits), "sampling_rate": rate} for instance in instances]
        if "tokens" in self.codec.facts:
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            return list(pipeline("automatic-speech-recognition", tokenizer=tokenizer, **library)(sounds))
        most = min(MOST, len(self.codec.facts["labels"]))
        return list(pipeline("audio-classification", **library)(sounds, top_k=most))

    def _sounds(self, count: int) -> list[Any]:
        return draw_sounds(np.linspace(0.1, 0.5, count) * self.codec.facts["longest"], self.codec.facts["rate"])
