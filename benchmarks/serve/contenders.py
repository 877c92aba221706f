"""Who is measured: how each is started, which wire formats it speaks, and where it listens for them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serve.environment import python_of

V1, JSON, BINARY, GRPC = "V1 JSON", "V2 JSON", "V2 binary", "gRPC"
_INFER = "/v2/models/net/infer"
_RPC = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Contender:
    """`paths`: the URL path of each wire format. `peer`: the name of its environment; empty for this one."""

    name: str
    paths: Mapping[str, str]
    script: str = ""  # a module under benchmarks.serve.servers; `python -m serve` when empty
    peer: str = ""
    base: str = field(default=sys.executable)  # the interpreter its environment is made of
    workers: int = 1  # processes
    options: Sequence[str] = ()  # of `python -m serve`

    def argv(self, bundle: Path, http_port: int, grpc_port: int, threads: int) -> list[str]:
        """Return the command; raise ResourceError if the contender cannot be installed."""
        if not self.script:
            ports = ["--port", str(http_port), "--grpc-port", str(grpc_port)]
            return [sys.executable, "-m", "serve", str(bundle), *ports, "--workers", str(self.workers), *self.options]
        python = str(python_of(self.peer, self.base)) if self.peer else sys.executable
        arguments = [str(bundle / "model.onnx"), str(http_port), str(grpc_port), str(threads), str(self.workers)]
        return [python, "-m", f"benchmarks.serve.servers.{self.script}", *arguments]


_SAMPLES = ("--sample-to", str(Path(tempfile.gettempdir(), "samples")), "--sample-max-bytes", str(1 << 28))
CONTENDERS: Sequence[Contender] = (
    Contender("ours", {V1: "/v1/models/net:predict", JSON: _INFER, BINARY: _INFER, GRPC: _RPC}),
    Contender("ours x 2", {JSON: _INFER, BINARY: _INFER, GRPC: _RPC}, workers=2),
    Contender("ours, 1 % sampled", {JSON: _INFER, BINARY: _INFER}, options=("--sample", "0.01", *_SAMPLES)),
    Contender("ours, all sampled", {JSON: _INFER, BINARY: _INFER}, options=("--sample", "1", *_SAMPLES)),
    Contender("kserve", {JSON: _INFER, BINARY: _INFER, GRPC: _RPC}, "plain_kserve"),
    Contender("granian", {JSON: "/"}, "granian_bare", "granian"),
    Contender("granian x 2", {JSON: "/"}, "granian_bare", "granian", workers=2),
    Contender("triton", {JSON: _INFER, BINARY: _INFER, GRPC: _RPC}, "triton_peer", "triton", "/usr/bin/python3.11"),
    Contender("mlserver", {JSON: _INFER, GRPC: _RPC}, "mlserver_peer", "mlserver"),
    Contender("bentoml", {JSON: "/predict"}, "bentoml_peer", "bentoml"),
    Contender("litserve", {JSON: "/predict"}, "litserve_peer", "litserve"),
    Contender("ray", {JSON: "/"}, "ray_peer", "ray"),
)
