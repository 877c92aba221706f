"""Labels of conversations, log-probabilities of packed answers, and the loss of DPO."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline import (
    IGNORED,
    DataError,
    answer_log_probs,
    chat_labels,
    completion_labels,
    dpo_loss,
    fill_rows,
    mask_between_texts,
    token_log_probs,
)

WORDS = (
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "hello",
    "again",
    "yes",
    "no",
    "maybe",
    "<think>",
    "</think>",
)
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|> {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }} <|end|>{% endgeneration %} "
    "{% else %}{{ message.content }} <|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
REASONING = (  # as that of DeepSeek-R1: it opens the reasoning of an answer, and leaves it out of past answers
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content.split('</think>')[-1].strip() }} <|end|> "
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> <think>\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes maybe"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "no"},
]


def tokenizer(template: str) -> Any:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", chat_template=template)


def words(tokens: list[int]) -> str:
    return " ".join("-" if token == IGNORED else WORDS[token] for token in tokens)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_labels_are_the_answers_of_the_assistant(template: str) -> None:
    ids, labels = chat_labels(tokenizer(template), CHAT)
    assert words(ids) == (
        "<|user|> hello <|end|> <|assistant|> yes maybe <|end|> <|user|> again <|end|> <|assistant|> no <|end|>"
    )
    assert words(labels) == "- - - - yes maybe <|end|> - - - - no <|end|>"


def test_labels_of_a_completion_leave_out_earlier_answers() -> None:
    ids, labels = completion_labels(tokenizer(MARKED), CHAT[:3], CHAT[3:])
    assert ids == chat_labels(tokenizer(MARKED), CHAT)[0]
    assert words(labels) == "- - - - - - - - - - - no <|end|>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"content": "no"}, "</think> no <|end|>"),
        ({"content": "<think>\nmaybe yes\n</think>\n\nno"}, "maybe yes </think> no <|end|>"),
        ({"content": "no", "reasoning_content": "maybe yes"}, "maybe yes </think> no <|end|>"),
    ],
)
def test_an_answer_is_learned_after_the_reasoning_that_its_prompt_opens(answer: dict[str, str], expected: str) -> None:
    chat = [*CHAT[:3], {"role": "assistant", **answer}]
    prompt = "<|user|> hello <|end|> <|assistant|> yes maybe <|end|> <|user|> again <|end|> <|assistant|> <think>"
    for ids, labels in (
        chat_labels(tokenizer(REASONING), chat),
        completion_labels(tokenizer(REASONING), chat[:3], chat[3:]),
    ):
        assert words(ids) == f"{prompt} {expected}"
        assert words(labels) == f"{'- ' * len(prompt.split())}{expected}"


def test_a_conversation_without_an_answer_is_refused() -> None:
    for template in (PLAIN, MARKED):
        with pytest.raises(DataError, match="a conversation of 1 messages has no answer of the assistant"):
            chat_labels(tokenizer(template), CHAT[:1])


def test_a_template_that_rewrites_the_prompt_must_mark_answers() -> None:
    rewriting = PLAIN.replace("{{ message.content }}", "{{ message.content if loop.last else 'maybe' }}")
    with pytest.raises(DataError, match="mark the answers in the template"):
        chat_labels(tokenizer(rewriting), CHAT)
    with pytest.raises(DataError, match="mark the answers in the template"):
        completion_labels(tokenizer(rewriting), CHAT[:3], CHAT[3:])


@torch.no_grad()
def test_log_probabilities_of_a_packed_pair_are_those_of_each_answer_alone() -> None:
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2, max_position_embeddings=32)).eval()
    pair = [chat_labels(tokenizer(MARKED), CHAT), completion_labels(tokenizer(MARKED), CHAT[:1], CHAT[1:2])]
    expected = [alone(model, *tokens) for tokens in pair]
    rows = fill_rows([[ids for ids, _ in pair]], 24, pad=0)
    labels = torch.from_numpy(fill_rows([[labels for _, labels in pair]], 24, pad=IGNORED).ids)
    ids, segments, positions = map(torch.from_numpy, (rows.ids, rows.segments, rows.positions))
    logits = mask_between_texts(model)(ids, segments, positions).logits
    torch.testing.assert_close(answer_log_probs(logits, labels, segments, 2), torch.tensor([expected]))
    torch.testing.assert_close(token_log_probs(logits, labels).sum(), torch.tensor(sum(expected)))


def alone(model: Any, ids: list[int], labels: list[int]) -> float:
    probabilities: Tensor = model(torch.tensor([ids])).logits[0].log_softmax(dim=1)
    return sum(float(probabilities[index - 1, label]) for index, label in enumerate(labels) if label != IGNORED)


def test_dpo_prefers_what_rises_above_the_reference() -> None:
    policy, reference = torch.tensor([[-3.0, -5.0], [-4.0, -4.0]]), torch.tensor([[-4.0, -4.0], [-4.0, -4.0]])
    losses, margins = dpo_loss(policy, reference, beta=0.5)
    assert margins.tolist() == [1.0, 0.0]
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)])


def test_a_pair_longer_than_its_row_is_refused() -> None:
    with pytest.raises(DataError, match="2 texts of 7 tokens are longer than a row of 6"):
        fill_rows([[[1, 2], [3]], [[1, 2, 3], [4, 5, 6, 7]]], 6, pad=0)
