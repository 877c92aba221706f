"""Small tasks of every kind: their data are files next to this one, and their models train in tenths of a second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import CLASSES, FACTOR, LONGEST, TAGS, WORDS  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Prompting

HERE = Path(__file__).parent
Batch = Mapping[str, Tensor]


class Kind(ABC):
    """The common part of all tasks: data in files, training to the minimum, and a baseline of half the data."""

    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("y",)
    steps = 40

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor: ...

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        with np.load(HERE / f"{split}.npz") as file:
            return dict(file)

    def fit(self, part: int = 1) -> nn.Module:
        """Train on every `part`-th sample."""
        torch.manual_seed(0)
        model = self.model()
        batch = {name: torch.from_numpy(column[::part]) for name, column in self.data("train").items()}
        optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=self.steps, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model(*[batch[name] for name in self.inputs]), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)
        return model.eval()

    def baseline(self) -> Callable[[Batch], Tensor]:
        model = self.fit(2)
        return lambda batch: model(*[batch[name] for name in self.inputs])

    def instances(self, batch: Batch) -> list[Any]:
        return [[float(value) for value in row] for row in (batch["x"].double() * FACTOR).tolist()]

    def example(self) -> list[Any]:
        test = {name: torch.from_numpy(column[:3]) for name, column in self.data("test").items()}
        return self.instances(test)


class Classify(Kind):
    outputs = ("scores",)
    classes = CLASSES

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 3))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == batch["label"]).float()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(dim=1)

    def actual(self, batch: Batch) -> Tensor:
        return batch["label"]

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def answer(self, prediction: Any) -> Any:
        return prediction["label"]


class Scaled(nn.Module):
    """A linear model that computes in standard units, and answers in its own."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.linear, self.unit = nn.Linear(12, 1), unit

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)[:, 0] * self.unit
        return y


class Regress(Kind):
    unit = 1.0
    directions = {"error": "lower"}  # noqa: RUF012 - as a user writes it

    def model(self) -> nn.Module:
        return Scaled(self.unit)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return functional.mse_loss(outputs / self.unit, batch["target"] / self.unit)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"error": (outputs - batch["target"]).abs()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: Batch) -> Tensor:
        return batch["target"]

    def slices(self, batch: Batch) -> dict[str, list[str]]:
        return {"first": ["high" if value > -0.7 else "low" for value in batch["x"][:, 0].tolist()]}

    def answer(self, prediction: Any) -> Any:
        return prediction["value"]


class Small(Regress):
    unit = 1e-5


class Large(Regress):
    unit = 1e6


class Rank(Kind):
    """Lists of eight items."""

    outputs = ("score",)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 1), nn.Flatten(0))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return functional.mse_loss(outputs, batch["relevance"].float())

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"closeness": -(outputs - batch["relevance"]).abs()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: Batch) -> Tensor:
        return batch["relevance"]

    def queries(self, batch: Batch) -> Tensor:
        return batch["query"]


class Tags(nn.Module):
    """Each word's tag depends on the word and on the one before it; padding does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 8)
        self.context = nn.Conv1d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, len(TAGS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.words(input_ids) * attention_mask[:, :, None].float()
        tags: Tensor = self.head(self.context(words.transpose(1, 2)).relu().transpose(1, 2))
        return tags


class Tag(Kind):
    inputs = ("input_ids", "attention_mask")
    outputs = ("tags",)
    axes = dict.fromkeys(inputs, ("batch", "sequence"))
    longest = {"sequence": LONGEST}  # noqa: RUF012

    def model(self) -> nn.Module:
        return Tags()

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        mask = batch["attention_mask"].bool()
        return functional.cross_entropy(outputs[mask], batch["tags"][mask])

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        mask = batch["attention_mask"]
        hits = (outputs.argmax(dim=2) == batch["tags"]) * mask
        return {"accuracy": hits.sum(dim=1) / mask.sum(dim=1)}

    def instances(self, batch: Batch) -> list[Any]:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        rows = zip(batch["input_ids"].tolist(), lengths, strict=True)
        return [[WORDS[index] for index in row[:length]] for row, length in rows]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.project(x), dim=1)


class Embed(Kind):
    outputs = ("embedding",)

    def model(self) -> nn.Module:
        return Unit()

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return -functional.cosine_similarity(outputs, batch["partner"]).mean()

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"cosine": functional.cosine_similarity(outputs, batch["partner"])}


class Causal(nn.Module):
    """The evaluated model: without a cache."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        size: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
        self.net: Any = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **size, **heads))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


class Talk(Kind):
    inputs = ("input_ids", "attention_mask")
    outputs = ("logits",)
    steps = 15

    def model(self) -> nn.Module:
        return Causal()

    def make_files(self, folder: Path) -> None:
        import json

        body = {"model": {"type": "BPE", "vocab": {word: index for index, word in enumerate(WORDS)}, "merges": []}}
        (folder / "tokenizer.json").write_text(json.dumps({**body, "added_tokens": []}))

    def use_files(self, folder: Path) -> None:
        pass

    def language_model(self, model: Any) -> nn.Module:
        net: nn.Module = model.net
        return net

    def prompting(self) -> Prompting:
        return Prompting(end=(0,), template="{{ messages[0].content }}", positions_limit=32)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return -self.metrics(outputs, batch)["log_likelihood"].mean()

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Score each word but the first; the text is not padded."""
        following = batch["input_ids"][:, 1:, None]
        return {"log_likelihood": outputs[:, :-1].log_softmax(dim=2).gather(2, following)[:, :, 0].mean(dim=1)}

    def baseline(self) -> Callable[[Batch], Tensor]:
        """Return how often a word followed another in the training data."""
        ids = torch.from_numpy(self.data("train")["input_ids"])
        counts = torch.full((len(WORDS), len(WORDS)), 0.1)
        counts.index_put_((ids[:, :-1].ravel(), ids[:, 1:].ravel()), torch.tensor(1.0), accumulate=True)
        return lambda batch: (counts / counts.sum(dim=1, keepdim=True)).log()[batch["input_ids"]]

    def instances(self, batch: Batch) -> list[Any]:
        return [" ".join(WORDS[index] for index in row) for row in batch["input_ids"].tolist()]
