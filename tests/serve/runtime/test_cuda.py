from __future__ import annotations

import logging
from pathlib import Path

import onnxruntime
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.processes import cuda_problem
from pipeline.service.process import send_request
from serve.runtime.session import CPU, Session

from ..conftest import Launcher

NO_CUDA = cuda_problem(onnxruntime.get_available_providers())


def test_onnxruntime_without_cuda_is_the_reported_reason() -> None:
    assert "onnxruntime-gpu has" in cuda_problem([CPU])


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
def test_fallback_is_logged_and_readable(
    bundle: Bundle, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="serve"):
        session = Session(bundle, "auto", 1)
    assert (session.provider, session.fallback) == (CPU, NO_CUDA)
    assert NO_CUDA in caplog.text
    assert capfd.readouterr().out == ""  # ONNX Runtime got no request for a provider it does not have


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_auto_runs_on_cuda(bundle: Bundle) -> None:
    assert (Session(bundle, "auto", 1).provider, NO_CUDA) == ("CUDAExecutionProvider", "")


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
def test_fallback_is_in_log_metadata_and_metrics(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=["--provider", "auto"])
    assert NO_CUDA in running.log
    _, _, metadata = send_request("127.0.0.1", running.port, "GET", "/v2/models/tiny")
    assert metadata["properties"]["provider"] == CPU
    assert metadata["properties"]["provider_fallback"] == NO_CUDA
    _, _, metrics = send_request("127.0.0.1", running.port, "GET", "/metrics")
    assert 'pipe_provider_fell_back{model="tiny",version="1"} 1.0' in metrics
    assert f'provider="{CPU}"' in metrics
