"""Find where an ONNX file begins to differ from the model, and say why.

The search bisects the graph: it compares cuts between a right cut and a wrong tensor, so it needs about as many runs as
the logarithm of the number of nodes. The exporter keeps the names of torch's own trace, so the trace, run step by step,
gives the expected value of each tensor and the module it comes from.

`Graph` is the ONNX graph as the search needs it: producers, inputs, and parts that run alone. Weights stored outside
the file are not read here; ONNX Runtime maps them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from export.to_onnx import Written
from export.trace import inner, owner, place
from pipeline.contract.errors import StageError
from pipeline.contract.settings.stages import Export

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
    prober = _Prober(variant, feed, lambda names: reference.run(own, names), rtol, atol, providers)
    return _search(prober, points_of(reference, variant))


def first_wrong_of(
    values: Mapping[str, Array], variant_path: Path, feed: Mapping[str, Array], rtol: float, atol: float
) -> FirstWrong | None:
    """The same against values that are known already, by the names the file gives them."""
    variant = Graph(variant_path)
    points = {name: name for name in variant.maker if name in values}
    prober = _Prober(variant, feed, lambda names: {name: values[name] for name in names}, rtol, atol, CPU)
    return _search(prober, points)


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


class _Prober:
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
        if missing := [name for name in names if name not in self._known]:
            expected = self._values([points[name] for name in missing])
            found = self.variant.run(self._feed, missing, self._providers)
            for name in missing:
                self._known[name] = error_of(expected[points[name]], found[name], self._rtol, self._atol)
        return {name: self._known[name] for name in names}


def _search(prober: _Prober, points: dict[str, str]) -> FirstWrong | None:
    graph = prober.variant
    errors = prober.errors(points, [name for name in graph.outputs if name in points])
    wrong = next((name for name, error in errors.items() if error != 0), None)  # an answer of another shape is wrong
    if wrong is None:
        return None
    right: set[str] = set()  # compared and found equal, or not comparable: searched no further
    while between := _between(graph, points, wrong, right):
        cut = _cut(graph, between, wrong)
        found = prober.errors(points, cut)
        bad = [name for name in cut if found[name]]
        if bad:
            wrong = bad[0]
        for name in cut:
            if found[name] is None:
                del points[name]  # it cannot be compared
            elif not found[name]:
                right.add(name)
    error = prober.errors(points, [wrong])[wrong]
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
    """Return 0 if equal within tolerance, None if not comparable, as sequences and quantized values are not."""
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


Feed = Mapping[str, Array]


@dataclass(frozen=True)
class Step:
    """One operator of the trace, and what it answered."""

    node: Node
    value: Array

    @property
    def where(self) -> str:
        return f"{owner(self.node)}{place(self.node)}"


def explain_difference(written: Written, path: Path, feeds: Iterable[Feed], config: Export) -> str:
    """One clause, of the first feed that shows a fault; nothing where none does, or where torch kept no trace."""
    if written.program is None:
        return written.limits
    for feed in feeds:
        try:
            found = _of_feed(written, path, feed, config)
        except (RuntimeError, AssertionError, StageError) as error:  # a shape that torch or the file itself refuses
            print(f"where the file is wrong is not looked for at {_shapes(feed)}: {' '.join(str(error).split())[:160]}")
            continue
        if found:
            return "; ".join(filter(None, (found, written.limits)))
    return written.limits


def _of_feed(written: Written, path: Path, feed: Feed, config: Export) -> str:
    steps = steps_of(written, feed)
    found = first_wrong_of({name: step.value for name, step in steps.items()}, path, feed, config.rtol, config.atol)
    if found is None:
        return _of_trace(written, steps, feed, config)
    graph = Graph(path)
    node = next(one for one in graph.nodes if found.node in (one.name, *one.output))
    made = next((steps[name] for name in node.output if name in steps), None)
    return f"{found}" + (f", of {made.where}" if made else "")


@torch.no_grad()
def steps_of(written: Written, feed: Feed) -> dict[str, Step]:
    """By the names of the file's tensors; outputs by those they were given."""
    assert written.program is not None
    recorder = _Recorder(written.program.module())
    recorder.run(*_arguments(written, feed))
    last = next(node for node in written.program.graph.nodes if node.op == "output")
    names = [node.name for node in last.args[0] if isinstance(node, Node)]
    renamed = dict(zip(names, written.traced.outputs, strict=False))
    found = dict(recorder.steps)
    return found | {given: found[name] for name, given in renamed.items() if name in found}


class _Recorder(Interpreter):
    """Keeps what every step answered; sizes that torch would guard are what this run is about, and are let through."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.steps: dict[str, Step] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and "guards" in str(n.target):
            return None
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "call_function":
            self.steps[n.name] = Step(n, _array(value))
        return value


def _of_trace(written: Written, steps: Mapping[str, Step], feed: Feed, config: Export) -> str:
    """The file is the trace; is the trace the model?"""
    expected = _answers(written, feed)
    traced = _traced_answers(steps)
    untold: list[str] = []  # modules since the last right one of which the trace has no step, as if they did nothing
    for name, value in expected.items():
        error = error_of(value, traced[name].value, config.rtol, config.atol) if name in traced else None
        if error is None:
            untold.append(name)
        elif error == 0:
            untold = []
        else:
            where = inner(untold[0] if untold else name)
            return (
                "the file is what torch traced, but the trace is not the model: it answers otherwise in "
                f"{f'`{where}`' if where else 'the model itself'}, off by {error:.3g}, so that python code goes "
                "another way while it is traced"
            )
    return ""


@torch.no_grad()
def _answers(written: Written, feed: Feed) -> dict[str, Array]:
    """Of every module that is called once and answers one tensor, in the order in which they are done."""
    found: dict[str, list[Any]] = {}

    def keep(name: str) -> Any:
        return lambda _module, _given, answer: found.setdefault(name, []).append(_single(answer))

    module: nn.Module = written.traced.module
    hooks = [part.register_forward_hook(keep(name)) for name, part in module.named_modules()]
    try:
        module(*_arguments(written, feed))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: each[0] for name, each in found.items() if len(each) == 1 and each[0] is not None}


def _traced_answers(steps: Mapping[str, Step]) -> dict[str, Step]:
    """The last step of each module is its answer."""
    found: dict[str, Step] = {}
    for step in steps.values():
        for entry in (step.node.meta.get("nn_module_stack") or {}).values():
            found[entry[0]] = step
    return found


def _single(answer: Any) -> Array | None:
    answer = answer[0] if isinstance(answer, tuple) and len(answer) == 1 else answer
    return _array(answer) if isinstance(answer, Tensor) else None


def _arguments(written: Written, feed: Feed) -> tuple[Any, ...]:
    """The feed, nested as the module takes it; a copy, so that nothing is written into it."""
    tensors = [torch.from_numpy(np.array(feed[name])) for name in written.traced.inputs]
    spec = pytree.tree_flatten(written.traced.arguments)[1]
    found: tuple[Any, ...] = pytree.tree_unflatten(tensors, spec)
    return found


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach()
    found: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().copy()
    return found


def _shapes(feed: Feed) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
