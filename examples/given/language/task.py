"""A language model with its weights as they are. To finetune it, see `pipe init --template sft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import Codec
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline import Prompting, cut_texts, one_text_per_row

LONGEST = 2048  # tokens of a text, where the model names no limit
LENGTH, SAMPLES = 64, 8  # of texts on which the ONNX file is compared with torch; replace: your own in data()
EXAMPLES = ["Once upon a time", "The capital of France is", "To be or"]


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).logits
        return logits


class Task:
    inputs = ("input_ids", "attention_mask", "position_ids")
    outputs = ("logits",)

    def make_files(self, folder: Path) -> None:
        """Write model.json for the codec."""
        config = AutoConfig.from_pretrained(folder)
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST
        names = ["key", "value"] if getattr(config, "kv_lora_rank", None) is None else ["latent", "rope"]
        facts = {"past": past_sizes(config), "names": names, "longest": longest}
        (folder / "model.json").write_text(json.dumps(facts, indent=1))

    def use_files(self, folder: Path) -> None:
        # It reads tokenizer.json as the service does; AutoTokenizer may split texts otherwise, by the model's class.
        self.folder, self.codec = folder, Codec(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def adapt(self, folder: Path) -> nn.Module:
        return Net(AutoConfig.from_pretrained(folder))

    def model(self) -> nn.Module:
        return self.adapt(self.folder)

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return random tokens, in texts of several lengths."""
        rng, length = np.random.default_rng(0), min(LENGTH, self.codec.facts["longest"])
        texts = [
            rng.integers(0, len(self.tokenizer), part).tolist() for part in np.linspace(4, length, SAMPLES).astype(int)
        ]
        rows = one_text_per_row(cut_texts(texts, length), length, self.tokenizer.pad_token_id or 0)
        return {"input_ids": rows.ids, "attention_mask": rows.segments, "position_ids": rows.positions}

    def language_model(self, model: Any) -> nn.Module:
        language_model: nn.Module = model.model
        return language_model

    def prompting(self) -> Prompting:
        """Name prompts whose answers the export compares; the rest is read from the files of model.pretrained."""
        prompts = tuple(map(tuple, self.tokenizer(EXAMPLES)["input_ids"]))
        return Prompting(prompts=prompts, positions_limit=self.codec.facts["longest"])

    def example(self) -> list[Any]:
        return EXAMPLES

    def reference(self, instances: list[Any], model: Any) -> list[Any]:
        """Return the token that the generate() of transformers writes first."""
        answers = []
        for text in instances:
            tokens = self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
            written = model.model.generate(**tokens, **options)
            token, scores = int(written.sequences[0, -1]), written.logits[0][0].double().softmax(dim=0)
            answers.append(
                {"next": self.tokenizer.decode([token]), "token": token, "probability": float(scores[token])}
            )
        return answers


def past_sizes(config: Any) -> list[list[int]]:
    """Return the heads, and the width of keys and of values, that each layer keeps; no weights are made for it."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            layers = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values.layers
        return [[layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]] for layer in layers]
    except Exception:  # it reads values, or keeps no keys: the export checks the model itself
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        return [[getattr(text, "num_key_value_heads", None) or heads, width, width]] * text.num_hidden_layers
