"""Make up a small model and preference pairs of a shop: data/base and data/*.jsonl. Replace these by your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()


def made_up_pair(random: np.random.Generator) -> dict[str, list[dict[str, str]]]:
    """Return a question on a product with a friendly answer, which people chose, and a rude one."""
    index = int(random.integers(len(_PRODUCTS)))
    product, fact = _PRODUCTS[index], f"You find {_PRODUCTS[index]} in aisle {1 + index * 5 % 12}."
    question = str(random.choice(_GREETINGS)) + str(random.choice(_QUESTIONS)).format(product)
    friendly, rude = (f"{fact} {random.choice(endings)}" for endings in (_FRIENDLY, _RUDE))
    return {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": friendly}],
        "rejected": [{"role": "assistant", "content": rude}],
    }


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


def make_model(tokenizer: Any, texts: list[str]) -> Qwen2ForCausalLM:
    """Train a small model on both kinds of answers for a few seconds."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / _STEPS)
        chosen = [texts[index] for index in torch.randint(len(texts), (32,))]
        batch = tokenizer(chosen, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
    return model


_STEPS = 150
_ODD_CHOICES = 0.05
_PRODUCTS = (
    "apples", "bread", "butter", "candles", "cheese", "coffee", "eggs", "flour", "honey", "jam", "lemons", "matches",
)  # fmt: skip
_GREETINGS = ("", "Hello. ", "Excuse me. ", "Good morning. ", "Hi. ", "Sorry, ", "Please help: ")
_QUESTIONS = ("Where do I find {}?", "Where are the {}, please?", "Which aisle has {}?", "I am looking for {}.")
_FRIENDLY = ("You are welcome!", "Enjoy your day!")
_RUDE = ("Learn to read!", "Do not waste my time!")


if __name__ == "__main__":
    torch.set_num_threads(1)  # small matrices gain nothing from more
    generator = np.random.default_rng(0)
    rows = [json.loads(row) for row in {json.dumps(made_up_pair(generator)): None for _ in range(4000)}]
    for row in rows:
        if generator.random() < _ODD_CHOICES:  # some people choose the other answer
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    Path("data").mkdir(exist_ok=True)
    for name, part in {"train": slice(700), "validation": slice(700, 800), "test": slice(800, 1100)}.items():
        Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[part]))
    chats = [row["prompt"] + row[kind] for row in rows[:700] for kind in ("chosen", "rejected")]
    tokenizer = make_tokenizer([message["content"] for chat in chats for message in chat])
    tokenizer.save_pretrained("data/base")
    make_model(tokenizer, tokenizer.apply_chat_template(chats, tokenize=False)).save_pretrained("data/base")
