"""Execution providers of a loaded model's nodes: finds nodes that ONNX Runtime did not run where requested."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.system.errors import ResourceError
from serve.runtime import bfloat16

_METADATA_ONLY = ("Shape", "Size")  # they read the size of a tensor, not its values
_INTEGERS = ("int64", "int32", "bool")
_MAX_SHAPE_ELEMENTS = 64  # a larger tensor is not taken for the axes of a shape
# Operators with which exporters compute shapes; accepted of nodes that did not run.
_OF_SHAPES = (*_METADATA_ONLY, "Constant", "Identity", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Cast")
_MAX_LISTED = 5  # nodes in a message


@dataclass(frozen=True)
class Node:
    """A node of the graph and its provider."""

    name: str
    op: str
    provider: str


@dataclass(frozen=True)
class Kernel:
    """A node that ran, with type and shape of its inputs and outputs."""

    node: Node
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@contextlib.contextmanager
def profile_folder() -> Iterator[Path]:
    """Create a temporary folder for the profile."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pipe-serve-")
    except OSError as error:
        raise ResourceError(
            f"providers of GPUs: a profile shows where nodes run, and needs a writable folder: {error}; "
            "to fix it: mount one at /tmp, or set TMPDIR"
        ) from error
    with folder as name:
        yield Path(name)


def enable_profiling(options: Any, folder: Path) -> None:
    """Set the session options that `profile_run` needs."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "placement")


def profile_run(session: Any, inputs: Mapping[str, Any]) -> tuple[list[Node], list[Kernel]]:
    """Run once and return all nodes of the graph and those that ran. Ends profiling."""
    try:
        if bfloat16.uses_bfloat16(session):
            bfloat16.run(session, [node.name for node in session.get_outputs()], inputs)
        else:
            session.run(None, dict(inputs))
    finally:
        profile = Path(session.end_profiling())
    return assigned_nodes(session), read_profile(profile)


def assigned_nodes(session: Any) -> list[Node]:
    return [
        Node(node.name, node.op_type, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def read_profile(path: Path) -> list[Kernel]:
    """Read the kernels from a profile of ONNX Runtime."""
    events = json.loads(path.read_text())
    return [_kernel(event) for event in events if "provider" in event.get("args", {})]


def misplaced_nodes(nodes: Iterable[Node], ran: Sequence[Kernel], *providers: str) -> list[Node]:
    """Return the nodes that none of these providers computes.

    Only the arithmetic of shapes may stay on the CPU, where ONNX Runtime needs its results to allocate memory, and only
    if the profile shows that no data went through it.
    """
    foreign = [kernel for kernel in ran if kernel.node.provider not in providers]
    wrong = {kernel.node: None for kernel in foreign if not _is_shape_arithmetic(kernel)}
    seen = {kernel.node.name for kernel in foreign} | {kernel.node.op for kernel in foreign}
    for node in nodes:  # in a branch that did not run, or removed by an optimization
        accepted = (node.name or node.op) in seen or node.op in _OF_SHAPES
        if node.provider not in providers and not accepted:
            wrong[node] = None
    return list(wrong)


def describe(nodes: Sequence[Node]) -> str:
    """Return a clause for messages; empty without nodes."""
    if not nodes:
        return ""
    listed = ", ".join(f"{node.name or 'unnamed'} ({node.op}, {node.provider})" for node in nodes[:_MAX_LISTED])
    more = f" and {len(nodes) - _MAX_LISTED} more" if len(nodes) > _MAX_LISTED else ""
    verb = "run" if len(nodes) > 1 else "runs"
    return f"{len(nodes)} of the model's nodes {verb} on another provider: {listed}{more}"


def _is_shape_arithmetic(kernel: Kernel) -> bool:
    if kernel.node.op in _METADATA_ONLY:
        return True
    return all(
        kind in _INTEGERS and len(shape) <= 1 and sum(shape) <= _MAX_SHAPE_ELEMENTS for kind, shape in kernel.tensors
    )


def _kernel(event: Mapping[str, Any]) -> Kernel:
    args = event["args"]
    sides = ("input_type_shape", "output_type_shape")
    tensors = [item for side in sides for tensor in args[side] for item in tensor.items()]
    node = Node(event["name"].removesuffix("_kernel_time"), args["op_name"], args["provider"])
    return Kernel(node, tuple((kind, tuple(shape)) for kind, shape in tensors))
