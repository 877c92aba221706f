"""Post-training of chat models: tokens and labels of conversations, log-probabilities of answers, the loss of DPO.

Labels are as in transformers: the id of a token that is learned, -100 for any other. Pack labels as the ids of their
texts, with `pack_texts(labels, length, pad=IGNORED).ids`: texts of equal lengths get the same places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.contract.errors import DataError

IGNORED = -100  # label of a token that is not learned
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Tokens: TypeAlias = "tuple[list[int], list[int]]"  # ids and labels


def chat_labels(tokenizer: Any, messages: Messages) -> Tokens:
    """Return a conversation's token ids, by the tokenizer's chat template, and labels for the assistant's answers.

    Answers are what the template has between `{% generation %}` and `{% endgeneration %}`. For a template without
    these, an answer is what its message adds to the prompt before it.
    """
    if _GENERATION.search(tokenizer.chat_template or ""):
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, is_answer = list(encoded["input_ids"]), encoded["assistant_masks"]
    else:
        ids = _encode(tokenizer, messages)
        is_answer = [0] * len(ids)
        for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
            start, end = _find_answer(tokenizer, messages[:index], messages[: index + 1], ids)
            is_answer[start:end] = [1] * (end - start)
    if not any(is_answer):
        raise DataError(f"a conversation of {len(messages)} messages has no answer of the assistant to learn from")
    return ids, [token if answer else IGNORED for token, answer in zip(ids, is_answer, strict=True)]


def completion_labels(tokenizer: Any, prompt: Messages, completion: Messages) -> Tokens:
    """Return the token ids of a prompt with its completion, both lists of messages, and labels for the completion."""
    messages = [*prompt, *completion]
    ids = _encode(tokenizer, messages)
    start, end = _find_answer(tokenizer, prompt, messages, ids)
    return ids, [IGNORED] * start + ids[start:end]


def _find_answer(tokenizer: Any, prompt: Messages, answered: Messages, ids: list[int]) -> tuple[int, int]:
    """Return where an answer begins and ends in the ids of its conversation."""
    before, through = _encode(tokenizer, prompt, add_generation_prompt=True), _encode(tokenizer, answered)
    if through[: len(before)] != before or ids[: len(through)] != through:
        raise DataError(
            f"the chat template writes the first {len(prompt)} messages differently when an answer follows, so the "
            "tokens of the answer are unknown; to fix it: mark the answers in the template with {% generation %}"
        )
    return len(before), len(through)


def _encode(tokenizer: Any, messages: Messages, **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label after the tokens before it, [batch, length - 1]; 0 where ignored."""
    predictions = logits[:, :-1].float().transpose(1, 2)
    return -functional.cross_entropy(predictions, labels[:, 1:], ignore_index=IGNORED, reduction="none")


def answer_log_probs(logits: Tensor, labels: Tensor, segments: Tensor, texts: int) -> Tensor:
    """Return the log-probability of the labels of each text of a packed row, [batch, texts]."""
    sums = logits.new_zeros(len(labels), texts + 1, dtype=torch.float32)  # column 0 is padding
    return sums.scatter_add(1, segments[:, 1:], token_log_probs(logits, labels))[:, 1:]


def dpo_loss(policy: Tensor, reference: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return the loss of DPO and the reward margin of each pair.

    `policy` and `reference` are the log-probabilities of the chosen and of the rejected answer, [pairs, 2], under the
    model and under the frozen reference. The chosen answer has the higher reward where the margin is above 0.
    """
    rewards = beta * (policy - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    return -functional.logsigmoid(margins), margins
