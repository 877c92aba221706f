"""Whisper with its weights as they are: it writes down what is spoken."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from codec import Codec
from sounds import draw_sounds, read_sound
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    WhisperForConditionalGeneration,
)

from pipeline import repeat

SAMPLES = 4  # sounds on which the ONNX file is compared with torch; replace: your own in data()
DETECTED = -1  # stands for a language that the model detects


class Net(nn.Module):
    """The encoder, and a loop in which the decoder writes the likeliest token."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config, facts = AutoConfig.from_pretrained(folder), json.loads((folder / "model.json").read_text())
        self.model = WhisperForConditionalGeneration._from_config(config, dtype=torch.float32)
        self.model.generation_config = GenerationConfig.from_pretrained(folder)
        self.prefix, self.end, self.most = facts["prefix"], facts["end"], facts["most"]
        suppressed = torch.zeros(3, config.vocab_size)  # in a language, at the beginning, later
        suppressed[0] = -torch.inf
        suppressed[0, facts["languages"]] = 0
        suppressed[1:, facts["suppressed"]] = -torch.inf
        suppressed[1, facts["suppressed_first"]] = -torch.inf
        self.register_buffer("suppressed", suppressed, persistent=False)

    def forward(self, input_features: Tensor) -> Tensor:
        memory = self.model.model.encoder(input_features).last_hidden_state
        begin, rows = len(self.prefix), memory.shape[0]
        forced = torch.tensor([*self.prefix, *[DETECTED] * self.most])
        kind = torch.tensor([0] * (begin - 1) + [1] + [2] * self.most)
        attentions = [layer.encoder_attn for layer in self.model.model.decoder.layers]
        heads = [attention.num_heads for attention in attentions]
        cross = [
            [_split(project(memory), attention.num_heads) for project in (attention.k_proj, attention.v_proj)]
            for attention in attentions
        ]
        places = torch.arange(begin + self.most)

        def step(i: Tensor, tokens: Tensor, ended: Tensor, *arrays: Tensor) -> list[Tensor]:
            i = i.reshape(1)
            past = _Past((places == i)[:, None], arrays)
            cache = EncoderDecoderCache(past, DynamicCache([tuple(pair) for pair in cross]))
            hidden = self.model.model.decoder(
                tokens.index_select(1, i),
                attention_mask=(places <= i)[None, None, None].expand(rows, 1, 1, -1),
                encoder_hidden_states=memory,
                past_key_values=cache,
                position_ids=i.reshape(1, 1),
            ).last_hidden_state
            scores = self.model.proj_out(hidden[:, 0]) + self.suppressed.index_select(0, kind[i])
            token, after = scores.argmax(dim=1), forced[i + 1]
            token = torch.where(after == DETECTED, torch.where(ended, self.end, token), after)
            is_end = (token == self.end) & (i + 1 >= begin)
            return [torch.where(places == i + 1, token[:, None], tokens), ended | is_end, *past.arrays]

        tokens = torch.where(forced == DETECTED, self.end, forced).expand(rows, -1)
        width = memory.shape[2] // heads[0]
        empty = [memory.new_zeros(rows, heads[0], len(forced), width) for _ in range(2 * len(heads))]
        state = tokens, torch.zeros_like(tokens[:, 0], dtype=torch.bool), *empty
        tokens = repeat(step, state, len(forced) - 1, until=lambda *state: state[1].all())[0]
        return tokens[:, begin:]


def _split(hidden: Tensor, heads: int) -> Tensor:
    return hidden.unflatten(2, (heads, -1)).transpose(1, 2)


class _Past(DynamicCache):
    """Keys and values of every token: arrays of a fixed size, in which one place is written."""

    def __init__(self, place: Tensor, arrays: Any) -> None:
        super().__init__()
        self.place, self.arrays = place, list(arrays)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> Any:
        both = slice(2 * layer, 2 * layer + 2)
        self.arrays[both] = [
            torch.where(self.place, *pair) for pair in zip((key, value), self.arrays[both], strict=True)
        ]
        return self.arrays[both]


class Task:
    inputs = ("input_features",)
    outputs = ("tokens",)

    def make_files(self, folder: Path) -> None:
        """Write the files for the codec, and how Whisper begins a text."""
        sound, config = AutoFeatureExtractor.from_pretrained(folder), AutoConfig.from_pretrained(folder)
        generation = GenerationConfig.from_pretrained(folder)
        generation.return_timestamps = False
        detection = SimpleNamespace(device="cpu", detect_language=lambda **_: torch.tensor([DETECTED]))
        begin = WhisperForConditionalGeneration._retrieve_init_tokens(detection, None, 1, generation, config, 0, {})
        longest = min(generation.max_length or config.max_target_positions, config.max_target_positions)
        facts = {
            "rate": sound.sampling_rate,
            "longest": sound.n_samples,
            "window": sound.n_fft,
            "step": sound.hop_length,
            "prefix": begin[0].tolist(),
            "languages": list(getattr(generation, "lang_to_id", {}).values()),
            "suppressed": generation.suppress_tokens or [],
            "suppressed_first": generation.begin_suppress_tokens or [],
            "end": generation.eos_token_id,
            "most": longest - begin.shape[1],
        }
        (folder / "model.json").write_text(json.dumps(facts, indent=1))
        np.save(folder / "bands.npy", sound.mel_filters)

    def use_files(self, folder: Path) -> None:
        self.folder, self.codec = folder, Codec(folder)

    def adapt(self, folder: Path) -> nn.Module:
        return Net(folder)

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> Any:
        return self.codec.decode(draw_sounds(np.linspace(0.3, 1, SAMPLES) * self.codec.longest, self.codec.rate))

    def example(self) -> list[Any]:
        return draw_sounds(np.array([0.3, 1]) * self.codec.longest, self.codec.rate)

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return what the generate() of transformers writes."""
        library, tokenizer = (
            AutoFeatureExtractor.from_pretrained(self.folder),
            AutoTokenizer.from_pretrained(self.folder),
        )
        sounds = [read_sound(instance, self.codec.rate, 1, self.codec.longest) for instance in instances]
        features = library(sounds, sampling_rate=self.codec.rate, return_tensors="pt").input_features
        tokens = model.model.generate(features, max_new_tokens=model.most, return_timestamps=False)
        return [{"text": text} for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
