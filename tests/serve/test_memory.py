"""The memory of a service, against which the pods of a Deployment are sized."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k8s.objects.serving import default_memory
from pipeline.contract.bundle import open_bundle
from tests.serve.llm import tiny
from tests.serve.special_models import deep

WIDTH, LAYERS = 1024, 48  # 192 MiB
LOAD = """
import sys
from pathlib import Path
import numpy as np
import serve.__main__
from pipeline.contract.bundle import open_bundle
from serve.runtime.loading import load_predictor
language_model = load_predictor(open_bundle(Path(sys.argv[1])), None, None).language_model
if language_model is not None:
    graph, past = language_model.graph, np.zeros((1, 2, 60_000, 8), np.float32)
    cache = graph.filled_cache(np.zeros(1, np.int64), [past] * len(graph.layers))
    graph.run(cache, np.zeros((1, graph.affordable_width(1, cache.past, 512)), np.int64))
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.long
def test_a_pod_has_the_memory_that_loading_takes(external: bool, tmp_path: Path) -> None:
    bundle = deep(tmp_path / "bundle", [np.eye(WIDTH, dtype=np.float32)] * LAYERS, beside=external)
    assert 0 < peak_memory(bundle) < rendered_memory(bundle)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pod_has_the_memory_that_a_long_prompt_takes(tmp_path: Path) -> None:
    bundle = tiny.build(tmp_path / "bundle", positions=65_536, max_cache_bytes=16 << 20)
    assert 0 < peak_memory(bundle) < rendered_memory(bundle)


def rendered_memory(bundle: Path) -> int:
    return int(default_memory(open_bundle(bundle)).removesuffix("Mi")) << 20


def peak_memory(bundle: Path) -> int:
    status = subprocess.run([sys.executable, "-c", LOAD, str(bundle)], capture_output=True, text=True, check=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.stdout)
    assert peak is not None
    return int(peak[1]) << 10
