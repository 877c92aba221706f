from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.contract.settings.stages import Train
from train.device.accelerator import choose_precision, configure_accelerator, describe_accelerator
from train.optim import Precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CUDNN: Any = torch.backends.cudnn  # published without all of its types
WARN, ERROR = 1, 2  # of torch's mode
FLAGS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def state() -> dict[str, Any]:
    """Return what the settings of a GPU change in torch."""
    kernels = {name: getattr(torch.backends.cuda, f"{name}_enabled")() for name in FLAGS}
    return {
        "products": torch.get_float32_matmul_precision(),
        "convolutions": CUDNN.conv.fp32_precision,
        "recurrences": CUDNN.rnn.fp32_precision,
        "benchmark": CUDNN.benchmark,
        **kernels,
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = state()
    yield
    torch.set_float32_matmul_precision(before["products"])
    CUDNN.conv.fp32_precision = before["convolutions"]
    CUDNN.rnn.fp32_precision = before["recurrences"]
    CUDNN.benchmark = before["benchmark"]
    for name in FLAGS:
        getattr(torch.backends.cuda, f"enable_{name}")(before[name])


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return torch's own function, which is there again after the test."""
    attend = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    return attend


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with bf16 whose tensors are on the CPU."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))


def test_auto_precision_is_bf16_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    supported = {"native": True}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported["native"])
    assert choose_precision("auto", GPU) == "bf16"
    supported["native"] = False
    assert choose_precision("auto", GPU) == "fp32"
    assert choose_precision("fp16", GPU) == "fp16"
    assert Precision("auto", CPU).kind == "fp32"
    assert Precision("auto", CPU).type is None


def test_no_setting_is_changed_on_a_cpu() -> None:
    before = state()
    configure_accelerator(Train(matmul_precision="medium", deterministic=False), CPU)
    assert state() == before


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("setting", "convolutions"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_matmul_precision_is_set_for_products_and_convolutions(setting: Any, convolutions: str) -> None:
    configure_accelerator(Train(matmul_precision=setting), GPU)
    assert state()["products"] == setting
    assert (state()["convolutions"], state()["recurrences"]) == (convolutions, convolutions)


@pytest.mark.usefixtures("gpu")
def test_cudnn_benchmark_is_on_only_without_deterministic() -> None:
    for settings, expected in ((Train(), False), (Train(deterministic=False), True)):
        configure_accelerator(settings, GPU)
        assert CUDNN.benchmark is expected


@pytest.fixture
def debug_mode() -> Iterator[None]:
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.usefixtures("gpu", "debug_mode")
def test_both_passes_of_attention_refuse_nondeterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: dict[str, int] = {}
    attend = functional.scaled_dot_product_attention

    def spy(*arguments: Any, **options: Any) -> Tensor:
        modes["forward"] = torch.get_deterministic_debug_mode()
        return attend(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    configure_accelerator(Train(), GPU)
    configure_accelerator(Train(), GPU)  # once is enough
    x = torch.rand(1, 2, 4, 8, requires_grad=True)
    y = functional.scaled_dot_product_attention(x, x, x)
    assert torch.get_deterministic_debug_mode() == WARN
    assert y.grad_fn is not None
    assert "Attention" in y.grad_fn.name()
    y.grad_fn.register_prehook(lambda _: modes.update(backward=torch.get_deterministic_debug_mode()))
    (y[..., 1:] * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert modes == {"forward": ERROR, "backward": ERROR}
    assert torch.get_deterministic_debug_mode() == WARN
    assert x.grad is not None
    expected = torch.autograd.grad((attend(x, x, x)[..., 1:] * 2).sum(), x)[0]
    assert torch.equal(x.grad, expected)


@pytest.mark.usefixtures("gpu")
def test_attention_is_unchanged_without_deterministic(attention: Any) -> None:
    configure_accelerator(Train(deterministic=False), GPU)
    assert functional.scaled_dot_product_attention is attention


@pytest.mark.usefixtures("gpu")
def test_log_line_names_the_chosen_precision() -> None:
    assert describe_accelerator(Train(), GPU) == "NVIDIA H100 80GB HBM3: bf16, products of fp32 numbers in TF32"
    settings = Train(precision="fp32", matmul_precision="highest")
    assert describe_accelerator(settings, GPU).endswith(": fp32, products of fp32 numbers in fp32")
