"""What is set once for a GPU, before training: precision, products in TF32, cuDNN's algorithms.

On a CPU these settings have no effect.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional

from pipeline.contract.settings.stages import Train

Kind: TypeAlias = Literal["fp32", "bf16", "fp16"]
Setting: TypeAlias = Literal["auto", "fp32", "bf16", "fp16"]

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def configure_accelerator(config: Train, device: torch.device) -> None:
    """Apply the settings of a GPU to this process."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision(config.matmul_precision)
        cudnn: Any = torch.backends.cudnn  # published without these types
        convolutions = "ieee" if config.matmul_precision == "highest" else "tf32"
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = convolutions
        cudnn.benchmark = not config.deterministic
        if config.deterministic:
            make_attention_deterministic()


def describe_accelerator(config: Train, device: torch.device) -> str:
    """Return the line of the log about a GPU."""
    products = {"highest": "fp32", "high": "TF32", "medium": "bf16"}[config.matmul_precision]
    precision = choose_precision(config.precision, device)
    return f"{torch.cuda.get_device_name(device)}: {precision}, products of fp32 numbers in {products}"


def choose_precision(setting: Setting, device: torch.device) -> Kind:
    """Return the precision to train in: `auto` is bf16 on a GPU with kernels for it, otherwise fp32."""
    if setting != "auto":
        return setting
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def make_attention_deterministic() -> None:
    """Let both passes of torch's attention kernels run in the mode in which torch refuses what is not deterministic.

    In the mode that only warns, which all other operations have, their backward pass adds in any order, and cuDNN's
    kernel, which has no other way, may be chosen. Compiled models call these kernels without this function.
    """
    attend = functional.scaled_dot_product_attention
    if hasattr(attend, "__wrapped__"):  # done already
        return

    @functools.wraps(attend)
    def attend_strictly(*arguments: Any, **options: Any) -> Tensor:
        if torch.compiler.is_compiling() or torch.get_deterministic_debug_mode() == 0:
            return attend(*arguments, **options)
        torch.set_deterministic_debug_mode("error")
        try:
            output = attend(*arguments, **options)
        finally:
            torch.set_deterministic_debug_mode("warn")
        if node := _attention_node(output):
            node.register_prehook(lambda _: torch.set_deterministic_debug_mode("error"))
            node.register_hook(lambda *_: torch.set_deterministic_debug_mode("warn"))
        return output

    functional.scaled_dot_product_attention = attend_strictly


_NODES_AFTER_ATTENTION = 3  # where the size of a head is padded, a slice follows


def _attention_node(output: Tensor) -> Node | None:
    """Return the node whose backward pass is that of a kernel; None for `math`, which is deterministic."""
    node = output.grad_fn
    for _ in range(_NODES_AFTER_ATTENTION):
        if node is None or "Attention" in node.name():
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None
