"""Where a file begins to be another model: the first node whose inputs are right and whose answer is not.

Cuts through the graph are compared, halving each time what is left between a cut that is right and a tensor that is
wrong: as many runs as the logarithm of the number of nodes, each with a few tensors beside the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from export.graph import CPU, Graph, read_by

Array = np.ndarray[Any, Any]
Values = Callable[[Sequence[str]], Mapping[str, Any]]  # the right ones, by name

# Operators that compute the same whatever a quantiser or an optimiser calls them.
_KINDS = {
    **dict.fromkeys(("Gemm", "MatMul", "FusedGemm", "FusedMatMul", "MatMulInteger", "QLinearMatMul"), "product"),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QGemm", "MatMulNBits"), "product"),
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger", "QLinearConv", "NhwcFusedConv"), "convolution"),
    **dict.fromkeys(("LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"), "layer norm"),
    **dict.fromkeys(("Softmax", "QLinearSoftmax"), "softmax"),
}
_LARGEST = float(np.finfo(np.float64).max)  # stands for infinity, which JSON does not have


@dataclass(frozen=True)
class FirstWrong:
    """The node to look at, of the file that is wrong."""

    node: str  # its name or, where it has none, that of what it makes
    op: str
    error: float  # largest absolute

    def __str__(self) -> str:
        return f"the first node that is wrong is `{self.node}` ({self.op}), off by {self.error:.3g}"


def first_wrong(
    reference_path: Path,
    variant_path: Path,
    feed: Mapping[str, Array],
    rtol: float,
    atol: float,
    providers: Sequence[str] = CPU,
) -> FirstWrong | None:
    """The node of `variant_path` where its error first exceeds the tolerance; None where no answer does.

    `providers` are those of the variant; the reference is computed on the CPU.
    """
    reference, variant = Graph(reference_path), Graph(variant_path)
    own = {name: _as(reference, name, array) for name, array in feed.items() if name in reference.inputs}
    judge = _Judge(variant, feed, lambda names: reference.run(own, names), rtol, atol, providers)
    return _search(judge, points_of(reference, variant))


def first_wrong_of(
    values: Mapping[str, Array], variant_path: Path, feed: Mapping[str, Array], rtol: float, atol: float
) -> FirstWrong | None:
    """The same against values that are known already, by the names the file gives them."""
    variant = Graph(variant_path)
    points = {name: name for name in variant.maker if name in values}
    judge = _Judge(variant, feed, lambda names: {name: values[name] for name in names}, rtol, atol, CPU)
    return _search(judge, points)


def points_of(reference: Graph, variant: Graph) -> dict[str, str]:
    """Tensors that can be compared: of the variant → of the reference, in the variant's order."""
    found = {variant.dequantised(name): name for name in variant.maker if name in reference.maker}
    found |= dict(_by_order(reference, variant, {name for pair in found.items() for name in pair}))
    kept = {name for name in found if name in variant.moving and found[name] in reference.moving}
    return {name: found[name] for name in sorted(kept, key=lambda name: variant.maker[name])}


def _by_order(reference: Graph, variant: Graph, matched: set[str]) -> Iterator[tuple[str, str]]:
    """The nth product of one graph is that of the other, where both have as many that kept no name."""
    sides: list[dict[str, list[str]]] = []
    for graph in (variant, reference):
        kinds: dict[str, list[str]] = {}
        for node in graph.nodes:
            name = graph.dequantised(node.output[0]) if node.output else ""
            if (kind := _KINDS.get(node.op_type)) and not matched & {name, node.output[0]} and name in graph.moving:
                kinds.setdefault(kind, []).append(name)
        sides.append(kinds)
    for kind in sides[0].keys() & sides[1].keys():
        pair = [side[kind] for side in sides]
        if len(pair[0]) == len(pair[1]):
            yield from zip(*pair, strict=True)


class _Judge:
    """Which of some tensors are wrong, and by how much."""

    def __init__(
        self,
        variant: Graph,
        feed: Mapping[str, Array],
        values: Values,
        rtol: float,
        atol: float,
        providers: Sequence[str],
    ) -> None:
        self.variant, self._values, self._rtol, self._atol = variant, values, rtol, atol
        self._feed = {name: _as(variant, name, array) for name, array in feed.items() if name in variant.inputs}
        self._providers = providers
        self._known: dict[str, float | None] = {}  # 0 is right; None cannot be compared

    def errors(self, points: Mapping[str, str], names: Sequence[str]) -> dict[str, float | None]:
        if asked := [name for name in names if name not in self._known]:
            expected = self._values([points[name] for name in asked])
            found = self.variant.run(self._feed, asked, self._providers)
            for name in asked:
                self._known[name] = error_of(expected[points[name]], found[name], self._rtol, self._atol)
        return {name: self._known[name] for name in names}


def _search(judge: _Judge, points: dict[str, str]) -> FirstWrong | None:
    graph = judge.variant
    errors = judge.errors(points, [name for name in graph.outputs if name in points])
    wrong = next((name for name, error in errors.items() if error != 0), None)  # an answer of another shape is wrong
    if wrong is None:
        return None
    right: set[str] = set()  # compared and found equal, or not comparable: searched no further
    while between := _between(graph, points, wrong, right):
        cut = _cut(graph, between, wrong)
        found = judge.errors(points, cut)
        bad = [name for name in cut if found[name]]
        if bad:
            wrong = bad[0]
        for name in cut:
            if found[name] is None:
                del points[name]  # nothing can be said of it
            elif not found[name]:
                right.add(name)
    error = judge.errors(points, [wrong])[wrong]
    node = graph.blamed(wrong, right)
    return FirstWrong(node.name or node.output[0], node.op_type, _LARGEST if error is None else error)


def _between(graph: Graph, points: Mapping[str, str], wrong: str, right: set[str]) -> list[str]:
    """Points that may still be the cause, in order: what `wrong` comes from, back to what is right."""
    ends = _ancestors(graph, wrong, right)
    return [name for name in points if name in ends and name not in right]


def _cut(graph: Graph, between: Sequence[str], wrong: str) -> list[str]:
    """The points of the earlier half that anything later reads: if they are right, the fault comes after them."""
    early = set(between[: (len(between) + 1) // 2])
    reached = _ancestors(graph, wrong, early) & early
    return [name for name in between if name in reached]


def _ancestors(graph: Graph, name: str, stops: set[str]) -> set[str]:
    """Everything a tensor comes from, not looking behind `stops`, which are among it where they are met."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        place = graph.maker.get(waiting.pop())
        if place is None:
            continue
        for before in read_by(graph.nodes[place]):
            if before not in found:
                found.add(before)
                if before not in stops:
                    waiting.append(before)
    return found


def error_of(expected: Any, found: Any, rtol: float, atol: float) -> float | None:
    """0 where equal within tolerance; None where nothing can be said, as of sequences and of quantised values."""
    if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray) or expected.shape != found.shape:
        return None
    if not all(array.dtype.kind in "fiub" for array in (expected, found)):
        return None
    if (expected.dtype.kind == "f") != (found.dtype.kind == "f") or not expected.size:
        return None
    left, right = expected.astype(np.float64), found.astype(np.float64)
    if np.isclose(right, left, rtol=rtol, atol=atol, equal_nan=True).all():
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
    return float(np.nan_to_num(distance, nan=_LARGEST, posinf=_LARGEST).max())


def _as(graph: Graph, name: str, array: Array) -> Array:
    """In the type the file takes: a variant may want halves where the reference wants floats."""
    kind = next(value.type.tensor_type.elem_type for value in graph.model.graph.input if value.name == name)
    return array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind)) if array.dtype.kind == "f" else array
