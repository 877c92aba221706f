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

from export.checks.cases import to_array
from export.conversion.names import input_names
from export.conversion.shapes import MODEL_ERRORS
from export.conversion.to_onnx import ExportResult
from export.conversion.trace import describe_module, find_python_length, module_name, source_location
from export.tolerance import absolute_tolerance
from pipeline.contract.codec import Array
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

_VALUE_PRESERVING = ("QuantizeLinear", "DequantizeLinear", "Cast", "Identity")  # they change the form, not the values


class Graph:
    """The graph of one file. Tensors inside the branches of an `If` belong to the `If` node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = onnx.load(path, load_external_data=False)
        graph = self.model.graph
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.weights]
        self.outputs = [value.name for value in graph.output]
        self.nodes = list(graph.node)  # the format demands topological order
        self.producer_index = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def consumers(self) -> dict[str, list[onnx.NodeProto]]:
        consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in input_names(node):
                consumers.setdefault(name, []).append(node)
        return consumers

    @cached_property
    def input_dependent(self) -> set[str]:
        """Return the tensors that depend on an input; quantizers and optimizers may split or merge the others."""
        dependent = set(self.inputs)
        for node in self.nodes:
            if any(name in dependent for name in input_names(node)):
                dependent.update(node.output)
        return dependent

    def name_after_dequantization(self, name: str) -> str:
        """Return the name of the dequantized tensor if all consumers read that, else the tensor's own name."""
        readers = self.consumers.get(name, [])
        if name in self.outputs or len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
            return name
        quantized = self.consumers.get(readers[0].output[0], [])
        is_dequantized = len(quantized) == 1 and quantized[0].op_type == "DequantizeLinear"
        return str(quantized[0].output[0]) if is_dequantized else name

    def responsible_node(self, name: str, right: Container[str]) -> onnx.NodeProto:
        """Return the node that computed a wrong tensor, not a later one that only changed its form."""
        node: onnx.NodeProto = self.nodes[self.producer_index[name]]
        while node.op_type in _VALUE_PRESERVING and node.input[0] in self.producer_index and node.input[0] not in right:
            node = self.nodes[self.producer_index[node.input[0]]]
        return node

    def run(self, feed: Mapping[str, np.ndarray[Any, Any]], names: Sequence[str]) -> dict[str, Any]:
        """Return these tensors, computed by a session of the subgraph that produces them."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        folder = str(self.path.parent.resolve())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        part = self._subgraph(names)
        inputs = {value.name: feed[value.name] for value in part.graph.input if value.name in feed}
        try:
            session = onnxruntime.InferenceSession(part.SerializeToString(), options, ["CPUExecutionProvider"])
            return dict(zip(names, session.run(list(names), inputs), strict=True))
        except Exception as error:  # ONNX Runtime raises a dozen types without a common base
            raise StageError(
                f"{self.path.name}: the part of the graph up to {', '.join(names)} does not run: "
                f"{' '.join(str(error).split())[:400]}"
            ) from error

    def _subgraph(self, names: Sequence[str]) -> onnx.ModelProto:
        """Return the nodes that these tensors depend on, so that only the weights they need are loaded."""
        names_needed, nodes = set(names), []
        for node in reversed(self.nodes):
            if names_needed.intersection(node.output):
                nodes.append(node)
                names_needed.update(input_names(node))
        graph = self.model.graph
        part = onnx.ModelProto(ir_version=self.model.ir_version)
        part.opset_import.extend(self.model.opset_import)
        part.functions.extend(self.model.functions)
        part.graph.name = graph.name
        part.graph.node.extend(reversed(nodes))
        names_needed.update(self.inputs)
        part.graph.input.extend(value for value in graph.input if value.name in names_needed)
        part.graph.initializer.extend(tensor for name, tensor in self.weights.items() if name in names_needed)
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)  # ONNX Runtime finds their types
        return part


Feed = Mapping[str, Array]
Values = Callable[[Sequence[str]], Mapping[str, Any]]  # the expected tensors, by name

# Operators that compute the same whatever a quantizer or an optimizer calls them.
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
    """The first node whose output is wrong."""

    node: str  # its name or, without one, that of its output
    op: str
    error: float  # largest absolute error

    def __str__(self) -> str:
        return f"the first node that is wrong is `{self.node}` ({self.op}), off by {self.error:.3g}"


def find_first_wrong(
    reference_path: Path, variant_path: Path, feed: Feed, rtol: float, atol: float
) -> FirstWrong | None:
    """Return the node of `variant_path` where the error first exceeds the tolerance; None if no output is wrong."""
    reference, variant = Graph(reference_path), Graph(variant_path)
    own = {name: _cast_input(reference, name, array) for name, array in feed.items() if name in reference.inputs}
    prober = _Prober(variant, feed, lambda names: reference.run(own, names), rtol, atol)
    return _search(prober, comparable_tensors(reference, variant))


def find_first_wrong_by_values(
    values: Mapping[str, Array], variant_path: Path, feed: Mapping[str, Array], rtol: float, atol: float
) -> FirstWrong | None:
    """Do the same with known values, by the names of the file's tensors."""
    variant = Graph(variant_path)
    points = {name: name for name in variant.producer_index if name in values}
    prober = _Prober(variant, feed, lambda names: {name: values[name] for name in names}, rtol, atol)
    return _search(prober, points)


def comparable_tensors(reference: Graph, variant: Graph) -> dict[str, str]:
    """Return the tensors that can be compared: variant → reference, in the variant's order."""
    shared = [name for name in variant.producer_index if name in reference.producer_index]
    pairs = {variant.name_after_dequantization(name): name for name in shared}
    pairs |= dict(_match_by_order(reference, variant, {name for pair in pairs.items() for name in pair}))
    dynamic = {name for name in pairs if name in variant.input_dependent and pairs[name] in reference.input_dependent}
    return {name: pairs[name] for name in sorted(dynamic, key=lambda name: variant.producer_index[name])}


def _match_by_order(reference: Graph, variant: Graph, matched: set[str]) -> Iterator[tuple[str, str]]:
    """Match unnamed operators of a kind by their order, if both graphs have the same number of them."""
    sides: list[dict[str, list[str]]] = []
    for graph in (variant, reference):
        kinds: dict[str, list[str]] = {}
        for node in graph.nodes:
            kind = _KINDS.get(node.op_type)
            name = graph.name_after_dequantization(node.output[0]) if node.output else ""
            if kind and not matched & {name, node.output[0]} and name in graph.input_dependent:
                kinds.setdefault(kind, []).append(name)
        sides.append(kinds)
    for kind in sides[0].keys() & sides[1].keys():
        pair = [side[kind] for side in sides]
        if len(pair[0]) == len(pair[1]):
            yield from zip(*pair, strict=True)


class _Prober:
    """Computes which tensors are wrong, and by how much."""

    def __init__(self, variant: Graph, feed: Feed, values: Values, rtol: float, atol: float) -> None:
        self.variant, self._values, self._rtol, self._atol = variant, values, rtol, atol
        self._feed = {name: _cast_input(variant, name, array) for name, array in feed.items() if name in variant.inputs}
        self._known: dict[str, float | None] = {}  # 0 is right; None cannot be compared

    def errors(self, points: Mapping[str, str], names: Sequence[str]) -> dict[str, float | None]:
        if missing := [name for name in names if name not in self._known]:
            expected = self._values([points[name] for name in missing])
            actual = self.variant.run(self._feed, missing)
            for name in missing:
                self._known[name] = tensor_error(expected[points[name]], actual[name], self._rtol, self._atol)
        return {name: self._known[name] for name in names}


def _search(prober: _Prober, points: dict[str, str]) -> FirstWrong | None:
    graph = prober.variant
    errors = prober.errors(points, [name for name in graph.outputs if name in points])
    wrong = next((name for name, error in errors.items() if error != 0), None)  # also an output of another shape
    if wrong is None:
        return None
    right: set[str] = set()  # compared and found equal, or not comparable: searched no further
    while suspects := _suspects(graph, points, wrong, right):
        cut = _middle_cut(graph, suspects, wrong)
        cut_errors = prober.errors(points, cut)
        wrong = next((name for name in cut if cut_errors[name]), wrong)
        for name in cut:
            if cut_errors[name] is None:
                del points[name]  # it cannot be compared
            elif not cut_errors[name]:
                right.add(name)
    error = prober.errors(points, [wrong])[wrong]
    node = graph.responsible_node(wrong, right)
    return FirstWrong(node.name or node.output[0], node.op_type, _LARGEST if error is None else error)


def _suspects(graph: Graph, points: Mapping[str, str], wrong: str, right: set[str]) -> list[str]:
    """Return the points that may be the cause, in order: those between `wrong` and the tensors that are right."""
    ancestors = _ancestors(graph, wrong, right)
    return [name for name in points if name in ancestors and name not in right]


def _middle_cut(graph: Graph, suspects: Sequence[str], wrong: str) -> list[str]:
    """Return the points of the earlier half that later ones read: if they are right, the fault comes after them."""
    early = set(suspects[: (len(suspects) + 1) // 2])
    reached = _ancestors(graph, wrong, early) & early
    return [name for name in suspects if name in reached]


def _ancestors(graph: Graph, name: str, stops: set[str]) -> set[str]:
    """Return all tensors that a tensor depends on, up to and including those in `stops`."""
    ancestors: set[str] = set()
    pending = [name]
    while pending:
        index = graph.producer_index.get(pending.pop())
        if index is None:
            continue
        for parent in input_names(graph.nodes[index]):
            if parent not in ancestors:
                ancestors.add(parent)
                if parent not in stops:
                    pending.append(parent)
    return ancestors


def tensor_error(expected: Any, actual: Any, rtol: float, atol: float) -> float | None:
    """Return 0 if equal within tolerance, None if not comparable, as sequences and quantized values are not."""
    if not isinstance(expected, np.ndarray) or not isinstance(actual, np.ndarray) or expected.shape != actual.shape:
        return None
    if not all(array.dtype.kind in "fiub" for array in (expected, actual)):
        return None
    if (expected.dtype.kind == "f") != (actual.dtype.kind == "f") or not expected.size:
        return None
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    if np.isclose(right, left, rtol=rtol, atol=atol, equal_nan=True).all():
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
    return float(np.nan_to_num(distance, nan=_LARGEST, posinf=_LARGEST).max())


def _cast_input(graph: Graph, name: str, array: Array) -> Array:
    """Cast an array to the type of the input: a variant may take fp16 where the reference takes fp32."""
    kind = next(value.type.tensor_type.elem_type for value in graph.model.graph.input if value.name == name)
    return array.astype(onnx.helper.tensor_dtype_to_np_dtype(kind)) if array.dtype.kind == "f" else array


@dataclass(frozen=True)
class Step:
    """One operator of the trace, and its output."""

    node: Node
    value: Array


def explain_difference(written: ExportResult, path: Path, feeds: Iterable[Feed], config: Export) -> str:
    """Explain the first difference that a feed shows; empty if none does, or if torch kept no trace."""
    for feed in feeds if written.program is not None else ():
        try:
            explanation = _explain_for_feed(written, path, feed, config)
        except (*MODEL_ERRORS, AssertionError, StageError) as error:  # a shape that torch or the file itself refuses
            print(f"where the file is wrong is not looked for at {_shapes(feed)}: {' '.join(str(error).split())[:160]}")
            continue
        if explanation:
            return explanation
    return _compared_length(written)


def _explain_for_feed(written: ExportResult, path: Path, feed: Feed, config: Export) -> str:
    steps = record_steps(written, feed)
    values = {name: step.value for name, step in steps.items()}
    atol = absolute_tolerance(config, [values[name] for name in written.source.outputs if name in values])
    wrong = find_first_wrong_by_values(values, path, feed, config.rtol, atol)
    if wrong is None:
        return _explain_trace(written, steps, feed, config.rtol, atol)
    wrong_node = next(node for node in Graph(path).nodes if wrong.node in (node.name, *node.output))
    step = next((steps[name] for name in wrong_node.output if name in steps), None)
    return f"{wrong}" + (f", of {describe_module(step.node)}{source_location(step.node)}" if step else "")


@torch.no_grad()
def record_steps(written: ExportResult, feed: Feed) -> dict[str, Step]:
    """Run the trace and return each step by the name of the file's tensor; outputs by their declared names."""
    assert written.program is not None
    recorder = _Recorder(written.program.module())
    recorder.run(*written.source.nest(feed))
    output = next(node for node in written.program.graph.nodes if node.op == "output")
    names = [node.name for node in output.args[0] if isinstance(node, Node)]
    outputs = zip(names, written.source.outputs, strict=False)
    steps = {written.renamed.get(name, name): step for name, step in recorder.steps.items()}
    return steps | {declared: recorder.steps[name] for name, declared in outputs if name in recorder.steps}


class _Recorder(Interpreter):
    """Records the output of every step; guards on sizes are skipped, since other sizes are what is searched."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.steps: dict[str, Step] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and "guards" in str(n.target):
            return None
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "call_function":
            self.steps[n.name] = Step(n, to_array(value).copy())
        return value


def _explain_trace(written: ExportResult, steps: Mapping[str, Step], feed: Feed, rtol: float, atol: float) -> str:
    """Explain where the trace differs from the model, for a file that equals the trace."""
    expected = _module_outputs(written, feed)
    traced = _traced_outputs(steps)
    untraced: list[str] = []  # modules after the last right one that have no step in the trace
    for name, value in expected.items():
        error = tensor_error(value, traced[name].value, rtol, atol) if name in traced else None
        if error is None:
            untraced.append(name)
        elif error == 0:
            untraced = []
        else:
            module = module_name(untraced[0] if untraced else name)
            return (
                "the file is what torch traced, but the trace is not the model: it answers otherwise in "
                f"{f'`{module}`' if module else 'the model itself'}, off by {error:.3g}, so that python code goes "
                "another way while it is traced; " + _compared_length(written)
            ).removesuffix("; ")
    return ""


def _compared_length(written: ExportResult) -> str:
    line = find_python_length(written.source)
    return f"the model compares a length in python{line}; write it with torch.where" if line else ""


@torch.no_grad()
def _module_outputs(written: ExportResult, feed: Feed) -> dict[str, Array]:
    """Return the output of every module that is called once and returns one tensor, in the order of completion."""
    outputs: dict[str, list[Any]] = {}

    def record(name: str) -> Any:
        return lambda _module, _arguments, output: outputs.setdefault(name, []).append(_single_tensor(output))

    module: nn.Module = written.source.module
    hooks = [child.register_forward_hook(record(name)) for name, child in module.named_modules()]
    try:
        module(*written.source.nest(feed))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: calls[0] for name, calls in outputs.items() if len(calls) == 1 and calls[0] is not None}


def _traced_outputs(steps: Mapping[str, Step]) -> dict[str, Step]:
    """Return the last step of each module, which computes its output."""
    last_steps: dict[str, Step] = {}
    for step in steps.values():
        for entry in (step.node.meta.get("nn_module_stack") or {}).values():
            last_steps[entry[0]] = step
    return last_steps


def _single_tensor(answer: Any) -> Array | None:
    answer = answer[0] if isinstance(answer, tuple) and len(answer) == 1 else answer
    return to_array(answer).copy() if isinstance(answer, Tensor) else None


def _shapes(feed: Feed) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
