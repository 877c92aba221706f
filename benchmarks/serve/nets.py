"""The nets that are served, with random weights: what they answer does not matter here, what they cost does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET, _IR = 20, 10
_HEADS = 4


class Net:
    """Nodes and weights as they are added; every method gives the name of what it made."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._rng = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any) -> str:
        name = f"weight{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *shape: int) -> str:
        """Add a weight, scaled so that activations keep their size from layer to layer."""
        fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        return self.constant(self._rng.normal(0, (2 / fan_in) ** 0.5, shape).astype(np.float32))

    def dense(self, x: str, wide: int, out: int) -> str:
        return self.add("Add", self.add("MatMul", x, self.weight(wide, out)), self.constant(np.zeros(out, np.float32)))

    def conv(self, x: str, channels: int, out: int, size: int, stride: int) -> str:
        """Add a convolution with the bias that a folded batch normalization leaves."""
        bias = self.constant(np.zeros(out, np.float32))
        pad = [size // 2] * 4
        return self.add("Conv", x, self.weight(out, channels, size, size), bias, strides=[stride] * 2, pads=pad)

    def norm(self, x: str, wide: int) -> str:
        scale, shift = self.constant(np.ones(wide, np.float32)), self.constant(np.zeros(wide, np.float32))
        return self.add("LayerNormalization", x, scale, shift, axis=-1)

    def save(self, path: Path, last: str, source: Any, classes: int) -> None:
        self.nodes.append(helper.make_node("Identity", [last], ["logits"]))
        answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])
        graph = helper.make_graph(self.nodes, "net", [source], [answer], self.weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR), path)


def digits(path: Path) -> None:
    """Write two layers on an 8x8 image: so little work that the service itself is measured."""
    net = Net()
    hidden = net.add("Relu", net.dense(net.add("Flatten", "x"), 64, 128))
    source = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])
    net.save(path, net.dense(hidden, 128, 10), source, 10)


def conv(path: Path) -> None:
    """Write ResNet-18 for 3x64x64 images."""
    net = Net()
    x = net.add("Relu", net.conv("x", 3, 64, 7, 2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for out in (64, 64, 128, 128, 256, 256, 512, 512):
        stride = 1 if out == channels else 2
        shortcut = x if out == channels else net.conv(x, channels, out, 1, stride)
        hidden = net.add("Relu", net.conv(x, channels, out, 3, stride))
        x, channels = net.add("Relu", net.add("Add", net.conv(hidden, out, out, 3, 1), shortcut)), out
    pooled = net.add("Flatten", net.add("GlobalAveragePool", x))
    source = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 64, 64])
    net.save(path, net.dense(pooled, 512, 1000), source, 1000)


def text(path: Path, *, tokens: int = 64, wide: int = 256, layers: int = 4) -> None:
    """Write a transformer encoder of 4 layers that classifies 64 tokens."""
    net = Net()
    x = net.add("Gather", net.weight(8192, wide), "x")
    x = net.add("Add", x, net.weight(tokens, wide))
    for _ in range(layers):
        x = net.add("Add", x, _attention(net, net.norm(x, wide), tokens, wide))
        inner = net.add("Gelu", net.dense(net.norm(x, wide), wide, 4 * wide))
        x = net.add("Add", x, net.dense(inner, 4 * wide, wide))
    pooled = net.add("ReduceMean", net.norm(x, wide), net.constant(np.array([1])), keepdims=0)
    source = helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", tokens])
    net.save(path, net.dense(pooled, wide, 2), source, 2)


def _attention(net: Net, x: str, tokens: int, wide: int) -> str:
    shape = net.constant(np.array([-1, tokens, _HEADS, wide // _HEADS]))

    def heads(perm: list[int]) -> str:
        return net.add("Transpose", net.add("Reshape", net.dense(x, wide, wide), shape), perm=perm)

    query, key, value = heads([0, 2, 1, 3]), heads([0, 2, 3, 1]), heads([0, 2, 1, 3])
    scale = net.constant(np.float32((wide // _HEADS) ** -0.5))
    scores = net.add("Softmax", net.add("Mul", net.add("MatMul", query, key), scale), axis=-1)
    mixed = net.add("Transpose", net.add("MatMul", scores, value), perm=[0, 2, 1, 3])
    return net.dense(net.add("Reshape", mixed, net.constant(np.array([-1, tokens, wide]))), wide, wide)
