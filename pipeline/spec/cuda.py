"""Whether ONNX Runtime can use CUDA here, asked of the driver itself, so that no session has to fail to find out."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
from collections.abc import Sequence

import onnxruntime

log = logging.getLogger(__name__)


def why_no_cuda(available: Sequence[str]) -> str:
    """One clause when CUDA cannot work, nothing when it should."""
    if "CUDAExecutionProvider" not in available:
        return "the installed onnxruntime has no CUDA provider (onnxruntime-gpu has)"
    if reason := _why_no_device():
        return reason
    _preload()
    return ""


def _why_no_device() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no NVIDIA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver answers error {code}"
    return "" if count.value else "the NVIDIA driver sees no device"


def _preload() -> None:
    """Load the CUDA libraries that stand in site-packages; what ONNX Runtime prints about it belongs in the log."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        onnxruntime.preload_dlls()
    for line in said.getvalue().splitlines():
        log.info("preload: %s", line)
