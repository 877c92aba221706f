"""Where the nodes of a loaded model run: what ONNX Runtime gave to another provider than the one asked for."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import ResourceError
from serve.runtime import bfloat16

_METADATA_ONLY = ("Shape", "Size")  # they read how large a tensor is, never what it holds
_INTEGERS = ("int64", "int32", "bool")
_MOST_AXES = 64  # elements of what may pass for the axes of a shape
# What exporters compute shapes with: believed of a node that did not run.
_SHAPE_ARITHMETIC = (
    "Shape",
    "Size",
    "Constant",
    "Identity",
    "Gather",
    "Slice",
    "Concat",
    "Squeeze",
    "Unsqueeze",
    "Cast",
)
_NAMED = 5  # nodes in one sentence


@dataclass(frozen=True)
class Node:
    """Of the graph, and the provider it was given to."""

    name: str
    op: str
    provider: str


@dataclass(frozen=True)
class Kernel:
    """A node that ran: the type and shape of all it read and wrote."""

    node: Node
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the profile, for a moment."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pipe-serve-")
    except OSError as error:
        raise ResourceError(
            f"provider cuda: where nodes run is proven with a profile, which needs a writable folder: {error}; "
            "mount one at /tmp, or name one with TMPDIR"
        ) from error
    with folder as name:
        yield Path(name)


def watch(options: Any, folder: Path) -> None:
    """Session options under which `observe` can tell."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "placement")


def observe(session: Any, inputs: Mapping[str, Any]) -> tuple[list[Node], list[Kernel]]:
    """Every node of the graph, and those that one run passes through; profiling ends with it."""
    try:
        if bfloat16.concerns(session):
            bfloat16.run(session, [node.name for node in session.get_outputs()], inputs)
        else:
            session.run(None, dict(inputs))
    finally:
        profile = Path(session.end_profiling())
    return assigned(session), profiled(profile)


def assigned(session: Any) -> list[Node]:
    return [
        Node(node.name, node.op_type, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def profiled(path: Path) -> list[Kernel]:
    """The kernels in a profile that ONNX Runtime wrote."""
    events = json.loads(path.read_text())
    return [_kernel(event) for event in events if "provider" in event.get("args", {})]


def elsewhere(nodes: Iterable[Node], ran: Sequence[Kernel], wanted: str) -> list[Node]:
    """Nodes that another provider than the wanted one computes.

    ONNX Runtime leaves the arithmetic of shapes to the CPU on purpose: its results are needed there, to allocate
    memory. That alone is allowed, and only where the run has shown that no data went through it.
    """
    foreign = [kernel for kernel in ran if kernel.node.provider != wanted]
    wrong = {kernel.node: None for kernel in foreign if not _is_shape_arithmetic(kernel)}
    seen = {kernel.node.name for kernel in foreign} | {kernel.node.op for kernel in foreign}
    for node in nodes:  # those of a branch that was not taken, or that an optimization took away
        known = (node.name or node.op) in seen or node.op in _SHAPE_ARITHMETIC
        if node.provider != wanted and not known:
            wrong[node] = None
    return list(wrong)


def told(nodes: Sequence[Node]) -> str:
    """One clause for people; nothing when there are no such nodes."""
    if not nodes:
        return ""
    named = ", ".join(f"{node.name or 'unnamed'} ({node.op}, {node.provider})" for node in nodes[:_NAMED])
    more = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    verb = "run" if len(nodes) > 1 else "runs"
    return f"{len(nodes)} of the model's nodes {verb} on another provider: {named}{more}"


def _is_shape_arithmetic(kernel: Kernel) -> bool:
    if kernel.node.op in _METADATA_ONLY:
        return True
    return all(kind in _INTEGERS and len(shape) <= 1 and sum(shape) <= _MOST_AXES for kind, shape in kernel.tensors)


def _kernel(event: Mapping[str, Any]) -> Kernel:
    args = event["args"]
    tensors = [item for side in ("input_type_shape", "output_type_shape") for one in args[side] for item in one.items()]
    node = Node(event["name"].removesuffix("_kernel_time"), args["op_name"], args["provider"])
    return Kernel(node, tuple((kind, tuple(shape)) for kind, shape in tensors))
