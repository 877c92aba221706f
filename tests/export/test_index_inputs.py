"""Inputs that index an axis, as the edges of a graph do: no case makes torch itself fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.checks.service_sizes import ServedSizes
from export.checks.verify import write_and_compare
from export.kinds import open_exporter
from export.subject import Subject
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export

from .conftest import COUNT, Small

SIZES = {"train": (15, 30), "validation": (13, 26), "test": (9, 21)}  # nodes and edges of the largest graph


class GraphNet(nn.Module):
    """Adds the features of the nodes at both ends of each edge, in each graph of a padded batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, edges: Tensor, real: Tensor) -> Tensor:
        hidden = torch.relu(self.body(nodes)) * real[..., None]
        source, target = edges[..., :1].expand(-1, -1, 8), edges[..., 1:].expand(-1, -1, 8)
        hidden = hidden + torch.zeros_like(hidden).scatter_add(1, target, torch.gather(hidden, 1, source))
        answer: Tensor = self.head(hidden.sum(1) / real.sum(1, keepdim=True).clamp(min=1))
        return answer


class FlatGraphNet(GraphNet):
    """Makes one graph of all graphs in the batch, whose edges index its nodes."""

    def forward(self, nodes: Tensor, edges: Tensor, real: Tensor) -> Tensor:
        rows, count = nodes.shape[:2]
        hidden = torch.relu(self.body(nodes)).reshape(rows * count, 8)
        source, target = (edges + (torch.arange(rows) * count)[:, None, None]).reshape(-1, 2).unbind(1)
        hidden = hidden.index_add(0, target, hidden[source]).reshape(rows, count, 8) * real[..., None]
        answer: Tensor = self.head(hidden.sum(1) / real.sum(1, keepdim=True).clamp(min=1))
        return answer


def graphs(split: str) -> dict[str, np.ndarray[Any, Any]]:
    generator, (nodes, edges) = np.random.default_rng(len(split)), SIZES[split]
    sizes = generator.integers(2, nodes + 1, COUNT)
    real = (np.arange(nodes) < sizes[:, None]).astype(np.int64)
    features = generator.normal(size=(COUNT, nodes, 8)).astype(np.float32) * real[..., None].astype(np.float32)
    return {"nodes": features, "edges": generator.integers(0, sizes[:, None, None], (COUNT, edges, 2)), "real": real}


@dataclass
class Graphs(Small):
    inputs: tuple[str, ...] = ("nodes", "edges", "real")
    axes: dict[str, tuple[str | int, ...]] = field(
        default_factory=lambda: {
            "nodes": ("batch", "nodes", 8),
            "edges": ("batch", "edges", 2),
            "real": ("batch", "nodes"),
        }
    )
    longest: dict[str, int] = field(default_factory=lambda: {"nodes": 40, "edges": 90})

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        return graphs(split)


@pytest.mark.parametrize("net", [GraphNet(), FlatGraphNet()], ids=["padded", "flat"])
def test_edges_stay_valid_where_nodes_are_cut_and_values_are_drawn(net: nn.Module, tmp_path: Path) -> None:
    task: Any = Graphs(net.eval(), {})
    test, path = open_split(task, "test"), tmp_path / "model.onnx"
    report = write_and_compare(open_exporter(Subject(task, net, test, Export(), path, ServedSizes(4, 8))))
    report.require(Export())
    assert report.attempts.failures == [] and report.attempts.count > 12
    assert {row["worst"].partition(" at ")[2] for row in report.shapes} >= {
        "nodes 1, edges 1, padding: none",
        "nodes 2, edges 2, padding: none",
    }
    assert {row["inputs"] for row in report.coverage} >= {"train samples", "random inputs of whole ranges"}
