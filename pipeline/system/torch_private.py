"""The private names of torch that `pipe` needs, each with the reason; no other file has one.

pyproject.toml allows the minor versions of torch for which tests/train/test_torch_private.py passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch._ops import OpOverload as OpOverload  # the targets of nodes in an exported graph
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # documented under this name only
from torch.autograd import Variable
from torch.fx.experimental.sym_node import SymNode as SymNode  # a size while it is traced
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # documented under this name only
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._python_dispatch import return_and_correct_aliasing as return_and_correct_aliasing  # likewise

# One kernel for a list of tensors, as torch's own optimizers have it; public functions start a kernel for each.
foreach_add_ = torch._foreach_add_
foreach_sub_ = torch._foreach_sub_
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_
foreach_norm = torch._foreach_norm
# torch.optim.AdamW(fused=True) groups its tensors by device and type again at every step.
fused_adamw_ = torch._fused_adamw_

# The product of mixtures of experts; torch's counter of operations does not know it.
grouped_mm = torch.ops.aten._grouped_mm

# The base of all batch norms: SyncBatchNorm, and those of other libraries, have no public one.
BatchNormBase = _BatchNorm

# A tensor subclass without memory, which computes in `__torch_dispatch__`; no public function creates one.
make_wrapper_subclass = Tensor._make_wrapper_subclass
# The `__torch_function__` of a subclass whose operations may return plain tensors.
disabled_torch_function = torch._C._disabled_torch_function_impl

# What fake tensors raise when code reads their values, or selects elements by them.
VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)

# Nested containers in the order in which torch.export and its checkpoints see them.
TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_unflatten = _pytree.tree_unflatten


def flight_recorder_dumps() -> Iterator[str]:
    """Return the recorders of collectives as JSON: NCCL has one of its own. torch writes them to files only."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if dump := getattr(_distributed_c10d, name, None):
            yield dump(True, False)


def disable_dispatch_modes() -> AbstractContextManager[object]:
    """Compute with real tensors within a trace, as torch's own code does for constants."""
    context: AbstractContextManager[object] = _disable_current_modes()
    return context


def default_store() -> Any:
    """Return the store of the default process group; a second rendezvous would need another port."""
    return dist.distributed_c10d._get_default_store()


def is_profiling() -> bool:
    """Return whether torch's profiler records this thread, so that nothing is recorded in vain."""
    return bool(torch._C._autograd._profiler_enabled())


def in_backward() -> bool:
    """Return whether the autograd engine runs this code, as for activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when the running backward pass ends, as DDP does; hooks of tensors run before it."""
    Variable._execution_engine.queue_callback(callback)


def hide_worker_info() -> None:
    """Let a data set in a worker process not see that it is in one, so that it does not divide itself."""
    from torch.utils.data._utils import worker

    worker._worker_info = None


def cpp_compilers() -> list[str]:
    """Return the C++ compilers that torch.compile tries."""
    from torch._inductor import config  # slow to import

    return [name for name in config.cpp.cxx if name]


def mark_dynamic(tensor: Tensor, axes: int | list[int]) -> None:
    """Let torch.compile expect other sizes of these axes, if there may be any. Documented under this name only."""
    torch._dynamo.maybe_mark_dynamic(tensor, axes)


def apply_to_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Replace parameters and buffers as `Module.to` does, but by a choice of our own."""
    changed: nn.Module = model._apply(change)  # type: ignore[no-untyped-call]
    return changed


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and type among the arguments of `Tensor.to`, which has many forms."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def local_box(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this process's part of a distributed tensor, before there is one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local_shape), tuple(offset)


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def operator_schema(operator: OpOverload) -> Any:
    """Return the name and arguments of an operator in an exported graph."""
    return operator._schema


def decompositions() -> dict[Any, Any]:
    """Return the decompositions that torch.export applies; public functions return copies of it."""
    from torch._decomp import decomposition_table

    return decomposition_table


def forget_dispatch(operator: Any) -> None:
    """Let an operator look up its Python kernels again after they were changed."""
    operator._dispatch_cache.clear()


def sizes_without_special_cases() -> AbstractContextManager[None]:
    """Trace sizes of 0 and 1 like any others, as torch.onnx does."""
    context: AbstractContextManager[None] = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return context
