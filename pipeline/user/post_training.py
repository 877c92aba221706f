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

from pipeline.system.errors import DataError

IGNORED = -100  # label of a token that is not learned
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Tokens: TypeAlias = "tuple[list[int], list[int]]"  # ids and labels


def chat_labels(tokenizer: Any, messages: Messages) -> Tokens:
    """Return a conversation's token ids, by the tokenizer's chat template, and labels for the assistant's answers.

    Answers are what the template has between `{% generation %}` and `{% endgeneration %}`. For a template without
    these, an answer is what its message adds to the prompt before it; if the prompt for an answer ends with `<think>`,
    as that of DeepSeek-R1 does, only the last answer is learned (see `completion_labels`).
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"a conversation of {len(messages)} messages has no answer of the assistant to learn from")
    if _GENERATION.search(tokenizer.chat_template or ""):
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, is_answer = list(encoded["input_ids"]), encoded["assistant_masks"]
        return ids, [token if answer else IGNORED for token, answer in zip(ids, is_answer, strict=True)]
    if _opened_reasoning(_write(tokenizer, messages[: turns[-1]], add_generation_prompt=True)):
        return completion_labels(tokenizer, messages[: turns[-1]], [messages[turns[-1]]])
    ids = _encode(tokenizer, _write(tokenizer, messages))
    labels = [IGNORED] * len(ids)
    for turn in turns:
        prompt, answer = _split(tokenizer, messages[:turn], [messages[turn]])
        start, end = len(prompt), len(prompt) + len(answer)
        if ids[:end] != prompt + answer:
            raise _unknown_answer(turn)
        labels[start:end] = answer
    return ids, labels


def completion_labels(tokenizer: Any, prompt: Messages, completion: Messages) -> Tokens:
    """Return the token ids of a prompt with its completion, both lists of messages, and labels for the completion.

    If the prompt for an answer ends with `<think>`, the completion begins with its reasoning, which may be empty:
    `reasoning_content` of the message, or what its `content` has in `<think>…</think>`.
    """
    before, answer = _split(tokenizer, prompt, completion)
    return before + answer, [IGNORED] * len(before) + answer


def _split(tokenizer: Any, prompt: Messages, completion: Messages) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt for an answer, and those that the completion adds to it."""
    before, through = (_write(tokenizer, prompt, add_generation_prompt=True), _write(tokenizer, [*prompt, *completion]))
    opened = "" if through.startswith(before) else _opened_reasoning(before)
    start = before.removesuffix(opened)
    if not through.startswith(start):
        raise _unknown_answer(len(prompt))
    answer = through.removeprefix(start)
    if opened:
        answer = f"{_reasoning(completion[0])}\n</think>\n\n{answer.lstrip()}"
        return _encode(tokenizer, before), _encode(tokenizer, answer)
    tokens, both = _encode(tokenizer, before), _encode(tokenizer, through)
    if both[: len(tokens)] != tokens:  # a token reaches over the beginning of the answer
        raise _unknown_answer(len(prompt))
    return tokens, both[len(tokens) :]


def _opened_reasoning(prompt: str) -> str:
    """Return `<think>` and the line break after it if a prompt ends so."""
    found = re.search(r"<think>\s*$", prompt)
    return found[0] if found else ""


def _reasoning(message: Mapping[str, Any]) -> str:
    in_content = message["content"].rpartition("</think>")[0].partition("<think>")[2]
    return str(message.get("reasoning_content") or in_content).strip()


def _unknown_answer(messages: int) -> DataError:
    return DataError(
        f"the chat template writes the first {messages} messages differently when an answer follows, so the "
        "tokens of the answer are unknown; to fix it: mark the answers in the template with {% generation %}"
    )


def _write(tokenizer: Any, messages: Messages, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_log_probs(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label after the tokens before it, [batch, length - 1]; 0 where ignored.

    `outputs` are logits, or in training what a model of `log_probs_in_training` returns.
    """
    if outputs.ndim == 2:
        return outputs.where(labels[:, 1:] != IGNORED, 0)
    predictions = outputs[:, :-1].float().transpose(1, 2)
    return -functional.cross_entropy(predictions, labels[:, 1:], ignore_index=IGNORED, reduction="none")


def answer_log_probs(outputs: Tensor, labels: Tensor, segments: Tensor, texts: int) -> Tensor:
    """Return the log-probability of the labels of each text of a packed row, [batch, texts].

    `outputs` are those of `token_log_probs`.
    """
    sums = outputs.new_zeros(len(labels), texts + 1, dtype=torch.float32)  # column 0 is padding
    return sums.scatter_add(1, segments[:, 1:], token_log_probs(outputs, labels))[:, 1:]


def dpo_loss(policy: Tensor, reference: Tensor, beta: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return the loss of DPO and the reward margin of each pair.

    `policy` and `reference` are the log-probabilities of the chosen and of the rejected answer, [pairs, 2], under the
    model and under the frozen reference. The chosen answer has the higher reward where the margin is above 0.
    """
    rewards = beta * (policy - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    return -functional.logsigmoid(margins), margins
