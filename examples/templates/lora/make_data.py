"""Make up a small model like DeepSeek-R1-Distill-Qwen, and chats of a shop. Replace data/ by your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
# As DeepSeek-R1's, it leaves the reasoning out of past answers, and opens that of the next one.
CHAT_TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- 'ASSISTANT' + message.content.split('</think>')[-1] + eos_token }}
{%- else %}{{- ('USER' if message.role == 'user' else '') + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT<think>\\n' }}{%- endif %}
""".strip().replace("ASSISTANT", ASSISTANT).replace("USER", USER)  # fmt: skip


def made_up_chat(random: np.random.Generator) -> list[dict[str, str]]:
    """Return a question on a product, and an answer after a short reasoning."""
    index = int(random.integers(len(_PRODUCTS)))
    product, aisle = _PRODUCTS[index], 1 + index * 5 % 12
    question = str(random.choice(_GREETINGS)) + str(random.choice(_QUESTIONS)).format(product)
    answer = f"<think>\n{product}: aisle {aisle}\n</think>\n\nYou find {product} in aisle {aisle}."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=448, special_tokens=[BEGIN, END, USER, ASSISTANT], initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.add_tokens(["<think>", "</think>"])
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, **names)


def make_model(tokenizer: Any) -> Qwen2ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        do_sample=True, temperature=0.6, top_p=0.95,
    )  # fmt: skip
    return model


_PRODUCTS = (
    "apples", "bread", "butter", "candles", "cheese", "coffee", "eggs", "flour", "honey", "jam", "lemons", "matches",
    "milk", "nuts", "olives", "onions", "paper", "pasta", "rice", "salt", "soap", "sugar", "tea", "vinegar",
)  # fmt: skip
_GREETINGS = ("", "Hello! ", "Hi. ", "Good morning. ", "Excuse me. ", "Thanks for your help. ", "One question. ")
_QUESTIONS = ("Where do I find {}?", "Where are the {}, please?", "Which aisle has {}?", "I am looking for {}.",
              "Do you sell {}?", "I need {}.", "In which aisle are {}?", "Can you show me {}?")  # fmt: skip


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    chats = list({json.dumps(made_up_chat(generator)): None for _ in range(20000)})
    generator.shuffle(chats)
    Path("data").mkdir(exist_ok=True)
    for name, part in {"train": slice(900), "validation": slice(900, 1000), "test": slice(1000, 1200)}.items():
        Path(f"data/{name}.jsonl").write_text("".join(f'{{"messages": {chat}}}\n' for chat in chats[part]))
    tokenizer = make_tokenizer([message["content"] for chat in chats[:900] for message in json.loads(chat)])
    tokenizer.save_pretrained("data/base")
    make_model(tokenizer).save_pretrained("data/base", max_shard_size="100KB")  # several files with an index
