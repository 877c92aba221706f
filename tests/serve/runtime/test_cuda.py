from __future__ import annotations

import logging
from pathlib import Path

import onnxruntime
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.processes import why_no_cuda
from pipeline.service.process import request
from serve.runtime.session import CPU, Session

from ..conftest import Launcher

NO_CUDA = why_no_cuda(onnxruntime.get_available_providers())


def test_an_onnxruntime_without_the_provider_is_named_as_the_reason() -> None:
    assert "onnxruntime-gpu has" in why_no_cuda([CPU])


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
def test_a_session_that_falls_back_says_why_in_its_log_and_to_whoever_asks(
    bundle: Bundle, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="serve"):
        session = Session(bundle, "auto", 1)
    assert (session.provider, session.fallback) == (CPU, NO_CUDA)
    assert NO_CUDA in caplog.text
    assert capfd.readouterr().out == ""  # ONNX Runtime itself was never asked for what it cannot do


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_where_cuda_works_auto_runs_on_it(bundle: Bundle) -> None:
    assert (Session(bundle, "auto", 1).provider, NO_CUDA) == ("CUDAExecutionProvider", "")


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
def test_a_service_that_falls_back_says_so_in_log_metadata_and_metric(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=["--provider", "auto"])
    assert NO_CUDA in running.log
    _, _, metadata = request("127.0.0.1", running.port, "GET", "/v2/models/tiny")
    assert metadata["properties"]["provider"] == CPU
    assert metadata["properties"]["provider_fallback"] == NO_CUDA
    _, _, metrics = request("127.0.0.1", running.port, "GET", "/metrics")
    assert 'pipe_provider_fell_back{model="tiny",version="1"} 1.0' in metrics
    assert f'provider="{CPU}"' in metrics
