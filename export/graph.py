"""An ONNX graph as bisecting needs it: who makes each tensor of what, and parts of it that run alone.

Weights kept outside the file are never read here; ONNX Runtime maps them where the file lies.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from pipeline.spec.errors import StageError

CPU = ("CPUExecutionProvider",)
_PASSING = ("QuantizeLinear", "DequantizeLinear", "Cast", "Identity")  # another form of the same values


class Graph:
    """One file. Tensors inside the branches of an `If` belong to the node that holds them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = onnx.load(path, load_external_data=False)
        graph = self.model.graph
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.weights]
        self.outputs = [value.name for value in graph.output]
        self.nodes = list(graph.node)  # the format demands topological order
        self.maker = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in read_by(node):
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def moving(self) -> set[str]:
        """Tensors that depend on an input; the others are constants that a quantiser or optimiser may have cut up."""
        found = set(self.inputs)
        for node in self.nodes:
            if any(name in found for name in read_by(node)):
                found.update(node.output)
        return found

    def dequantised(self, name: str) -> str:
        """What all readers of a tensor see of it where it is quantised and dequantised on the way; else itself."""
        readers = self.readers.get(name, [])
        if name in self.outputs or len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
            return name
        after = self.readers.get(readers[0].output[0], [])
        return str(after[0].output[0]) if len(after) == 1 and after[0].op_type == "DequantizeLinear" else name

    def blamed(self, name: str, right: Container[str]) -> onnx.NodeProto:
        """The node that computed a wrong tensor, not one that changed its form after that."""
        node: onnx.NodeProto = self.nodes[self.maker[name]]
        while node.op_type in _PASSING and node.input[0] in self.maker and node.input[0] not in right:
            node = self.nodes[self.maker[node.input[0]]]
        return node

    def run(
        self, feed: Mapping[str, np.ndarray[Any, Any]], names: Sequence[str], providers: Sequence[str] = CPU
    ) -> dict[str, Any]:
        """These tensors, by a session of the part of the graph that makes them."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.path.parent.resolve())
        )
        part = self._part(names)
        own = {value.name: feed[value.name] for value in part.graph.input if value.name in feed}
        try:
            session = onnxruntime.InferenceSession(part.SerializeToString(), options, providers=list(providers))
            return dict(zip(names, session.run(list(names), own), strict=True))
        except Exception as error:  # ONNX Runtime raises a dozen types without a common base
            raise StageError(
                f"{self.path.name}: the part of the graph up to {', '.join(names)} does not run: "
                f"{' '.join(str(error).split())[:400]}"
            ) from error

    def _part(self, names: Sequence[str]) -> onnx.ModelProto:
        """Everything these tensors come from and nothing else, so that only weights they need are loaded."""
        wanted, nodes = set(names), []
        for node in reversed(self.nodes):
            if wanted.intersection(node.output):
                nodes.append(node)
                wanted.update(read_by(node))
        graph = self.model.graph
        part = onnx.ModelProto(ir_version=self.model.ir_version)
        part.opset_import.extend(self.model.opset_import)
        part.functions.extend(self.model.functions)
        part.graph.name = graph.name
        part.graph.node.extend(reversed(nodes))
        part.graph.input.extend(value for value in graph.input if value.name in wanted or value.name in self.inputs)
        part.graph.initializer.extend(tensor for name, tensor in self.weights.items() if name in wanted)
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)  # ONNX Runtime finds their types
        return part


def read_by(node: onnx.NodeProto) -> Iterable[str]:
    """Names a node reads, those that its branches take from outside among them."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        inner = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
        for graph in inner:
            own = {value.name for value in (*graph.input, *graph.initializer)}
            for child in graph.node:
                yield from (name for name in read_by(child) if name not in own)
                own.update(child.output)
