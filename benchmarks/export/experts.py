"""One mixture of experts of DeepSeek-V3, exported in one form and run on one thread: time and memory."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

FORMS = {"batched_mm": "weights gathered for each token", "grouped_mm": "loop over the experts that are hit"}
ACTIVE = 4
TOKENS = (1, 512)
REPEATS = {1: 200, 512: 12}


@dataclass(frozen=True)
class Cost:
    form: str
    experts: int
    milliseconds: dict[str, float]  # of processor time, by tokens: the least of all repeats
    memory_mb: float  # what running added to what loading took
    largest_error: float


def measure(form: str, experts: int, hidden: int) -> Cost:
    with TemporaryDirectory() as folder:
        session, expected = _export(form, experts, hidden, Path(folder) / "model.onnx")
        memory_before = _peak_memory_kb()
        generator, times, worst = np.random.default_rng(0), {}, 0.0
        for tokens in TOKENS:
            inputs = generator.normal(size=(1, tokens, hidden)).astype(np.float32)
            run = partial(session.run, None, {"x": inputs})
            outputs = run()[0]
            times[str(tokens)] = 1e3 * _min_seconds(run, REPEATS[tokens])
            if tokens == 1:  # torch's own memory must not hide that of the rest
                worst = float(np.abs(outputs - expected(inputs)).max())
        memory_after = _peak_memory_kb()
    return Cost(form, experts, times, (memory_after - memory_before) / 1024, worst)


def _peak_memory_kb() -> int:
    """Return the peak of this process; `getrusage` counts that of the process that started it as well."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _export(form: str, experts: int, hidden: int, path: Path) -> tuple[Any, Callable[[Any], Any]]:
    import onnxruntime
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    from export.conversion.to_onnx import translations

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "moe_intermediate_size": hidden // 2, "num_experts_per_tok": ACTIVE}
    config = DeepseekV3Config(**sizes, n_routed_experts=experts, n_shared_experts=1, n_group=1, topk_group=1)
    config._experts_implementation = form
    block = DeepseekV3MoE(config).eval()
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=hidden**-0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own internals
        program = torch.onnx.export(
            block,
            (torch.randn(2, 3, hidden),),
            dynamo=True,
            verbose=False,
            input_names=["x"],
            dynamic_shapes=({0: "batch", 1: "sequence"},),
            opset_version=20,
            custom_translation_table=translations(),
        )
    assert program is not None
    program.save(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session, lambda inputs: block(torch.from_numpy(inputs)).detach().numpy()


def _min_seconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return min(times)


def table(costs: Sequence[Cost]) -> str:
    head = ["experts", "form", *(f"ms, {tokens} token{'s' * (tokens > 1)}" for tokens in TOKENS), "memory of a run, MB"]
    lines = [
        [
            str(cost.experts),
            f"`{cost.form}`: {FORMS[cost.form]}",
            *(f"{cost.milliseconds[str(tokens)]:.3f}" for tokens in TOKENS),
            f"{cost.memory_mb:.0f}",
        ]
        for cost in costs
    ]
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
