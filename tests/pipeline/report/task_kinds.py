"""Tasks that are not classifiers, evaluated without a model: `predict` returns imperfect answers."""

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
from pipeline.evaluate.__main__ import figures_body
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


class Weeks:
    """A forecast with quantiles; the baseline errs more at later horizons."""

    inputs, outputs, metric, quantiles = ("week",), ("forecast",), "pinball", (0.1, 0.5, 0.9)

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        future = 10 + np.sin(np.arange(14) / 2 + random.random((300, 1)) * 6) + random.normal(0, 0.3, (300, 14))
        return {"week": np.arange(300.0), "future": future.astype(np.float32)}

    def predict(self, batch: Batch) -> Tensor:
        return batch["future"][:, :, None] + torch.tensor([-0.5, 0.1, 0.4])

    def baseline(self) -> Any:
        return lambda batch: self.predict(batch) + torch.arange(14)[:, None] / 10

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"width": outputs[:, :, 2].mean(dim=1) - outputs[:, :, 0].mean(dim=1)}

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs[:, :, 1]

    def predicted_quantiles(self, outputs: Tensor) -> Tensor:
        return outputs

    def actual(self, batch: Batch) -> Tensor:
        return batch["future"]


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


class Gallery:
    """Samples are shown by texts with tags, pictures, and pictures with boxes."""

    inputs, outputs, metric = ("words",), ("tags",), "correct"
    text = "Yesterday Ada Lovelace met Charles Babbage of the Royal Society in London to discuss his engine"
    tags = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC")
    actual_tags = (0, 1, 2, 0, 1, 2, 0, 0, 3, 4, 0, 5, 0, 0, 0, 0)
    labels = ("car", "cyclist", "pedestrian")

    def data(self, split: str) -> dict[str, Any]:
        random = np.random.default_rng(0)
        target = np.tile(self.actual_tags, (60, 1))
        answer = np.where(random.random(target.shape) < 0.12, random.integers(0, 6, target.shape), target)
        y, x = np.mgrid[0:80, 0:100] / 80
        clean = np.stack([np.stack([np.sin((3 + i % 7) * x + i) * np.cos(y)] * 3) for i in range(60)])
        corners = [random.integers(4, 70, (60, 3, 2)), random.integers(75, 116, (60, 3, 2))]
        vector = random.normal(size=(60, 16))
        return {
            "words": np.tile(np.arange(16), (60, 1)),
            "tags": target,
            "answer": answer,
            "noisy": clean + random.normal(0, 0.4, clean.shape),
            "clean": clean,
            "picture": random.integers(30, 70, (60, 120, 160, 3)).astype(np.uint8),
            "boxes": np.concatenate(corners, axis=2),
            "series": np.sin(np.arange(120) / 9 + random.random((60, 1)) * 6),
            "question": vector + random.normal(0, 1.3, vector.shape),
            "vector": vector,
            "number": np.arange(60),
        }

    def predict(self, batch: Batch) -> Tensor:
        return batch["answer"]

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"correct": (outputs == batch["tags"]).double().mean(1)}

    def show(self, batch: Batch, outputs: Tensor) -> list[dict[str, Any]]:
        rows = [{name: column[i] for name, column in batch.items()} for i in range(len(outputs))]
        return [self._parts(row, answer) for row, answer in zip(rows, outputs, strict=True)]

    def _parts(self, row: Batch, answer: Tensor) -> dict[str, Any]:
        return {
            "answer": self._tagged(answer),
            "target": self._tagged(row["tags"]),
            "input": row["noisy"],
            "output": row["clean"],
            "found": Boxes(row["picture"], row["boxes"], self.labels, [0.98, 0.71, 0.42]),
            "true": Boxes(row["picture"], row["boxes"], self.labels),
        }

    def _tagged(self, row: Tensor) -> TaggedText:
        return TaggedText(self.text.split(), [self.tags[i] for i in row.tolist()])


class Series(Gallery):
    """Samples are shown by curves, a number, and embeddings of questions, searched among those of replies."""

    def _parts(self, row: Batch, answer: Tensor) -> dict[str, Any]:
        series, number = row["series"], int(row["number"])
        return {
            "past": series[:96],
            "forecast": series[-57:-33],
            "future": series[96:],
            "peak": series.max(),
            "question": Embedding(row["question"], f"How do I get help with case {number}?", among="reply"),
            "reply": Embedding(row["vector"], f"Help with case {number}"),
        }


KINDS = {kind.__name__.lower(): kind for kind in (Houses, Weeks, Search, Gallery, Series)}


def make_kind(runs: Path, name: str) -> Run:
    """A run whose evaluate step has the results of this task."""
    task: Any = KINDS[name]()
    run = make_run(
        runs, reached=STEPS.index("evaluate") + 1, config={"name": name, "task": "task.py:T", "codec": "codec.py:C"}
    )
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
