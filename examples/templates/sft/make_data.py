"""Make up a small model and chats of a shop: data/base and data/*.jsonl. Replace these by your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# As in Qwen's models; {% generation %} marks what the assistant writes, up to the token that ends it.
CHAT_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()


def made_up_chat(random: np.random.Generator) -> list[dict[str, str]]:
    """Return one or two questions on products, and their answers."""
    messages = []
    for index in random.choice(len(_PRODUCTS), random.integers(1, 3), replace=False):
        product, aisle, price = _PRODUCTS[index], 1 + index * 5 % 12, 1 + index * 7 % 9
        if random.random() < 0.5:
            question, answer = random.choice(_WHERE), f"You find {product} in aisle {aisle}."
        else:
            question, answer = random.choice(_PRICE), f"The price of {product} is {price} euros."
        messages.append({"role": "user", "content": str(question).format(product)})
        messages.append({"role": "assistant", "content": answer})
    return messages


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=448, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    names = {"eos_token": special[2], "pad_token": special[0]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, **names)


def make_model(tokenizer: Any) -> Qwen2ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


_PRODUCTS = (
    "apples", "bread", "butter", "candles", "cheese", "coffee", "eggs", "flour", "honey", "jam", "lemons", "matches",
    "milk", "nuts", "olives", "onions", "paper", "pasta", "rice", "salt", "soap", "sugar", "tea", "vinegar",
)  # fmt: skip
_WHERE = ("Where do I find {}?", "Where are the {}, please?", "Which aisle has {}?", "I am looking for {}.")
_PRICE = ("What is the price of {}?", "How much are the {}?", "What do I pay for {}?", "Are {} expensive?")


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    chats = list({json.dumps(made_up_chat(generator)): None for _ in range(3000)})
    Path("data").mkdir(exist_ok=True)
    for name, part in {"train": slice(1200), "validation": slice(1200, 1300), "test": slice(1300, 1500)}.items():
        Path(f"data/{name}.jsonl").write_text("".join(f'{{"messages": {chat}}}\n' for chat in chats[part]))
    tokenizer = make_tokenizer([message["content"] for chat in chats[:1200] for message in json.loads(chat)])
    tokenizer.save_pretrained("data/base")
    make_model(tokenizer).save_pretrained("data/base")
