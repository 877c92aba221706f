"""Tasks that are no classifiers, evaluated without a model: `predict` has the answers of an imperfect one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pipeline import Boxes, Embedding, TaggedText
from pipeline.contract.data import Samples
from pipeline.contract.run import STEPS, Run
from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.figures import figures_body
from pipeline.evaluate.results import Results, metrics_body
from pipeline.evaluate.worst_samples import worst_body
from pipeline.statistics.metrics import lower_is_better
from pipeline.statistics.scores import actual_columns, score_batch
from pipeline.system.files import write_json

from .example_runs import change, make_run

Batch = dict[str, Tensor]


class Houses:
    """A regressor: rows of a table."""

    inputs, outputs, metric = ("features",), ("price",), "mae"
    directions: ClassVar = {"relative_error": "lower"}
    districts = ("harbour", "centre", "hills")

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        columns = {"rooms": random.integers(1, 9, 700), "area": random.gamma(9, 12, 700).round(1)}
        columns |= {"built": random.integers(1890, 2024, 700), "district": random.integers(0, 3, 700)}
        price = 2.4 * columns["area"] + 31 * columns["rooms"] + 40 * columns["district"] + random.normal(0, 25, 700)
        features = np.stack([(c - c.mean()) / c.std() for c in columns.values()], axis=1).astype(np.float32)
        return {"features": features, "price": price.round(2), **columns}

    def predict(self, batch: Batch) -> Tensor:
        return 0.8 * batch["price"] + 60 + 12 * batch["features"][:, 2]

    def baseline(self) -> Any:
        return lambda batch: torch.full_like(batch["price"], 360.0)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"relative_error": ((outputs - batch["price"]) / batch["price"]).abs()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: Batch) -> Tensor:
        return batch["price"]

    def show(self, batch: Batch, outputs: Tensor) -> list[dict[str, Any]]:
        names = ("rooms", "area", "built")
        rows = zip(*(batch[name].tolist() for name in names), batch["district"].tolist(), strict=True)
        return [{"house": dict(zip((*names, "district"), (*r[:3], self.districts[r[3]]), strict=True))} for r in rows]


class Search:
    """A ranker."""

    inputs, outputs, metric = ("match",), ("score",), "ndcg"

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        relevance = (random.random(1200) < 0.2) * random.integers(1, 4, 1200)
        match = (relevance + random.normal(0, 1.2, 1200)).astype(np.float32)
        return {"match": match, "relevance": relevance, "query": np.repeat(np.arange(100) + 4000, 12)}

    def predict(self, batch: Batch) -> Tensor:
        return batch["match"]

    def baseline(self) -> Any:
        return lambda batch: batch["match"].sin()

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"closeness": -(outputs - batch["relevance"]).abs()}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: Batch) -> Tensor:
        return batch["relevance"].double()

    def queries(self, batch: Batch) -> Tensor:
        return batch["query"]


class Denoiser:
    """Image to image."""

    inputs, outputs, metric = ("noisy",), ("clean",), "psnr"

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        y, x = np.mgrid[0:80, 0:100] / 80
        waves = [np.sin((3 + i % 7) * x + i) * np.cos((2 + i % 5) * y) for i in range(40)]
        clean = np.stack([np.stack([w, w**2, -w]) for w in waves]).astype(np.float32)
        return {"noisy": clean + random.normal(0, 0.4, clean.shape).astype(np.float32), "target": clean}

    def predict(self, batch: Batch) -> Tensor:
        return torch.nn.functional.avg_pool2d(batch["noisy"], 5, stride=1, padding=2)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"psnr": -10 * torch.log10((outputs - batch["target"]).square().mean((1, 2, 3)))}

    def show(self, batch: Batch, outputs: Tensor) -> list[dict[str, Any]]:
        rows = zip(batch["noisy"], outputs, batch["target"], strict=True)
        return [{"input": a, "answer": b, "target": c} for a, b, c in rows]


class Tagger:
    """A text with tags."""

    inputs, outputs, metric = ("ids",), ("tags",), "correct"
    text = "Yesterday Ada Lovelace met Charles Babbage of the Royal Society in London to discuss his engine"
    tags = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC")
    actual_tags = (0, 1, 2, 0, 1, 2, 0, 0, 3, 4, 0, 5, 0, 0, 0, 0)

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        target = np.tile(self.actual_tags, (60, 1))
        answer = np.where(random.random(target.shape) < 0.12, random.integers(0, 6, target.shape), target)
        return {"ids": np.tile(np.arange(16), (60, 1)), "tags": target, "answer": answer}

    def predict(self, batch: Batch) -> Tensor:
        return batch["answer"]

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"correct": (outputs == batch["tags"]).double().mean(1)}

    def show(self, batch: Batch, outputs: Tensor) -> list[dict[str, Any]]:
        def tagged(row: Tensor) -> TaggedText:
            return TaggedText(self.text.split(), [self.tags[i] for i in row.tolist()])

        return [{"answer": tagged(a), "target": tagged(b)} for a, b in zip(outputs, batch["tags"], strict=True)]


class Embedder:
    """Embeddings of questions, searched among those of answers."""

    inputs, outputs, metric = ("question",), ("vector", "answer"), "similarity"
    topics = ("resetting a password", "a delayed parcel", "an invoice", "cancelling a subscription", "opening hours")

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        topic = np.arange(200) % 40
        answer = random.normal(size=(40, 16))[topic]
        question = answer + random.normal(0, 1.3, (200, 16))
        return {"question": question, "answer": answer, "topic": topic}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {"vector": batch["question"], "answer": batch["answer"]}

    def metrics(self, outputs: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        return {"similarity": torch.cosine_similarity(outputs["vector"], outputs["answer"])}

    def show(self, batch: Batch, outputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        names = [f"{self.topics[i % 5]}, case {i // 5}" for i in batch["topic"].tolist()]
        return [
            {
                "question": Embedding(vector, f"How do I get help with {name}?", among="answer"),
                "answer": Embedding(answer, f"Help with {name}"),
            }
            for name, vector, answer in zip(names, outputs["vector"], outputs["answer"], strict=True)
        ]


class Detector:
    """Pictures with boxes."""

    inputs, outputs, metric = ("picture",), ("boxes",), "overlap"
    labels = ("car", "cyclist", "pedestrian")

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        boxes = np.concatenate([random.integers(4, 70, (30, 3, 2)), random.integers(75, 116, (30, 3, 2))], axis=2)
        pictures = random.integers(30, 70, (30, 120, 160, 3)).astype(np.uint8)
        for picture, rows in zip(pictures, boxes, strict=True):
            for place, (left, top, right, bottom) in enumerate(rows):
                picture[top:bottom, left:right, place] += 110
        return {"picture": pictures, "boxes": boxes, "answer": boxes + random.normal(0, 6, boxes.shape)}

    def predict(self, batch: Batch) -> Tensor:
        return batch["answer"]

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"overlap": 1 - (outputs - batch["boxes"]).abs().mean((1, 2)) / 60}

    def show(self, batch: Batch, outputs: Tensor) -> list[dict[str, Any]]:
        return [
            {
                "answer": Boxes(picture, found, self.labels, [0.98, 0.71, 0.42]),
                "target": Boxes(picture, target, self.labels),
            }
            for picture, found, target in zip(batch["picture"], outputs, batch["boxes"], strict=True)
        ]


class Forecast:
    """Curves."""

    inputs, outputs, metric = ("past",), ("future",), "error"
    directions: ClassVar = {"error": "lower"}

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        time = np.arange(120) / 9 + random.random((50, 1)) * 6
        series = np.sin(time) * random.random((50, 1)) * 40 + random.normal(0, 3, (50, 120))
        return {"past": series[:, :96], "future": series[:, 96:]}

    def predict(self, batch: Batch) -> Tensor:
        return batch["past"][:, -57:-33]

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"error": (outputs - batch["future"]).abs().mean(1)}

    def show(self, batch: Batch, outputs: Tensor) -> list[dict[str, Any]]:
        rows = zip(batch["past"], outputs, batch["future"], strict=True)
        return [{"past": a, "forecast": b, "future": c, "peak": c.max()} for a, b, c in rows]


KINDS = {kind.__name__.lower(): kind for kind in (Houses, Search, Denoiser, Tagger, Embedder, Detector, Forecast)}


def make_kind(runs: Path, name: str) -> Run:
    """A run whose evaluate step has the results of this task."""
    task: Any = KINDS[name]()
    run = make_run(runs, reached=len(STEPS) - 3, config={"name": name, "task": "task.py:T", "codec": "codec.py:C"})
    samples = Samples("test", task.data("test"))
    batch = samples.batch(range(len(samples)))
    columns = {f"candidate.{key}": value for key, value in score_batch(task, task.predict, batch).items()}
    kind: Any = "task" if hasattr(task, "baseline") else None
    if kind:
        columns |= {f"baseline.{key}": value for key, value in score_batch(task, task.baseline(), batch).items()}
    columns |= actual_columns(task, batch, len(samples))
    results = Results(columns, kind, None, None, lower_is_better(task))
    config, folder = Evaluate(metric=task.metric), run.output("evaluate")
    metrics = metrics_body(config, results, "t" * 64)
    write_json(folder / "metrics.json", metrics)
    write_json(folder / "worst.json", worst_body(run, task, samples, results, task.metric, task.predict))
    if figures := figures_body(columns, None):
        write_json(folder / "figures.json", figures)
    value = metrics["candidate"][task.metric]
    verdict = {"metric": task.metric, "rules": [], "mcnemar": None, "summary": f"{task.metric} {value:.4g}"}
    change(folder / "verdict.json", samples=results.samples, difference=None, baseline=None, **verdict)
    return run
