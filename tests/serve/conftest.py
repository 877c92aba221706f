"""Small sealed bundles, and the real service as a process on free ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.spec.bundle import Ancestors, Bundle, open_bundle, write_manifest
from pipeline.spec.digest import digest_file
from pipeline.spec.files import write_json
from pipeline.spec.golden import Golden
from pipeline.spec.signature import Limits, Runtime, Signature, TensorSpec
from tests.serve.doubling import model, pool  # noqa: F401  # fixtures

ROOT = Path(__file__).resolve().parents[2]
TOO_BRIGHT = 100  # a value from which on the model itself fails
LIMITS = Limits(max_batch_size=16, max_body_bytes=100_000)

# Waits for a file or fails when the instance asks for it, so that a test decides when and where.
TRICKY = """
import time
from pathlib import Path
import numpy as np

class TrickyCodec:
    def decode(self, instances):
        for one in instances:
            while "gate" in one and not Path(one["gate"]).exists():
                time.sleep(0.005)
            if one.get("fail") == "decode":
                raise KeyError("a secret of the server")
        self.fail = any(one.get("fail") == "encode" for one in instances)
        return {"image": np.array([[one["image"]] for one in instances], np.float32)}

    def encode(self, outputs):
        if self.fail:
            raise RuntimeError("a secret of the server")
        return [int(row.argmax()) for row in outputs["logits"]]
"""


def _model(path: Path) -> None:
    """logits = flatten(image) @ weight, with weights nobody would guess; fails on a value beyond TOO_BRIGHT."""
    weight = np.random.default_rng(7).normal(size=(64, 10)).astype(np.float32)
    zeros = np.zeros(TOO_BRIGHT, np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["product"]),
            helper.make_node("ReduceMax", ["flat"], ["brightest"], keepdims=0),
            helper.make_node("Cast", ["brightest"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["zeros", "index"], ["zero"]),
            helper.make_node("Add", ["product", "zero"], ["logits"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(zeros, "zeros")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def _signature(codec: str) -> Signature:
    return Signature(
        inputs=(TensorSpec(name="image", datatype="FP32", shape=("batch", 1, 8, 8)),),
        outputs=(TensorSpec(name="logits", datatype="FP32", shape=("batch", 10)),),
        codec=codec,
        limits=LIMITS,
        runtime=Runtime(provider="cpu", threads=1),
    )


def _golden(path: Path, instances: list[Any], predictions: Callable[[Any], list[Any]]) -> None:
    image = np.random.default_rng(3).random((2, 1, 8, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])
    pictures = np.array([one["image"] if isinstance(one, dict) else one for one in instances], np.float32)[:, None]
    Golden(
        inputs={"image": image},
        outputs={"logits": session.run(None, {"image": image})[0]},
        instances=instances,
        predictions=predictions(
            session.run(None, {"image": pictures / (1 if isinstance(instances[0], dict) else 16)})[0]
        ),
        rtol=1e-3,
        atol=1e-4,
    ).write(path)


def _digits(logits: Any) -> list[Any]:
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = scores / scores.sum(axis=1, keepdims=True)
    return [
        {"digit": int(row.argmax()), "probability": float(row.max()), "probabilities": row.tolist()} for row in shares
    ]


def _seal(path: Path) -> str:
    (path / "manifest.json").unlink(missing_ok=True)
    onnx_digest = digest_file(path / "model.onnx")
    ancestors = Ancestors(code="c", data="d", checkpoint="k", verdict="v", onnx=onnx_digest)
    return write_manifest(path, "tiny", "pass", ancestors)


def _build(path: Path, codec: str, source: str, instances: list[Any], predictions: Callable[[Any], list[Any]]) -> Path:
    path.mkdir(parents=True)
    _model(path / "model.onnx")
    (path / "codec.py").write_text(source)
    (path / "card.md").write_text("# tiny\n")
    write_json(path / "signature.json", _signature(codec).model_dump())
    _golden(path, instances, predictions)
    _seal(path)
    return path


@pytest.fixture(scope="session")
def picture() -> list[list[int]]:
    grey: list[list[int]] = np.random.default_rng(5).integers(0, 17, (8, 8)).tolist()
    return grey


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory, picture: list[list[int]]) -> Path:
    """A sealed bundle with the codec of the digits example."""
    source = (ROOT / "examples/digits/codec.py").read_text()
    return _build(tmp_path_factory.mktemp("digits") / "bundle", "DigitsCodec", source, [picture, picture], _digits)


@pytest.fixture(scope="session")
def tricky_path(tmp_path_factory: pytest.TempPathFactory, picture: list[list[int]]) -> Path:
    """A sealed bundle whose codec waits or fails on request."""
    return _build(
        tmp_path_factory.mktemp("tricky") / "bundle",
        "TrickyCodec",
        TRICKY,
        [{"image": picture}],
        lambda logits: [int(row.argmax()) for row in logits],
    )


@pytest.fixture(scope="session")
def bundle(bundle_path: Path) -> Bundle:
    return open_bundle(bundle_path)


@pytest.fixture
def own_bundle(bundle_path: Path, tmp_path: Path) -> Path:
    """A copy a test may spoil."""
    return Path(shutil.copytree(bundle_path, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def seal() -> Callable[[Path], str]:
    """Seal a changed bundle again, as somebody would who wants it believed."""
    return _seal


@dataclass
class Running:
    """A service process, and what it has said."""

    process: subprocess.Popen[str]
    port: int
    grpc_port: int
    standby_port: int | None
    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_for(self, text: str, seconds: float = 30) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: text in self.log, seconds):
                raise AssertionError(f"the service never said {text!r}:\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(40)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    return _free_ports


class Launcher:
    """Starts services and ends those a test leaves behind."""

    def __init__(self) -> None:
        self._started: list[tuple[Running, threading.Thread]] = []

    def __call__(
        self,
        bundle: Path,
        *,
        port: int = 0,
        grpc_port: int = 0,
        standby: bool = False,
        ready: bool = True,
        options: Sequence[str] = (),
    ) -> Running:
        free = _free_ports(3)
        port, grpc_port = port or free[0], grpc_port or free[1]
        standby_port = free[2] if standby else None
        argv = [sys.executable, "-m", "serve", str(bundle), "--port", str(port), "--grpc-port", str(grpc_port)]
        argv += ["--log-format", "text", *options]
        argv += ["--standby", str(standby_port)] if standby_port else []
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env)
        running = Running(process, port, grpc_port, standby_port)
        listener = threading.Thread(target=running.listen, daemon=True)
        listener.start()
        self._started.append((running, listener))
        if ready:
            running.wait_for("standby url=" if standby else "ready url=")
        return running

    def close(self) -> None:
        for running, listener in self._started:
            if running.process.poll() is None:
                running.process.kill()
            running.process.wait()
            listener.join()
            assert running.process.stderr is not None
            running.process.stderr.close()


@pytest.fixture
def start() -> Iterator[Launcher]:
    with contextlib.closing(Launcher()) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def server(bundle_path: Path) -> Iterator[Running]:
    """One service of the digits bundle, shared by the tests of a module."""
    with contextlib.closing(Launcher()) as launcher:
        yield launcher(bundle_path)


@pytest.fixture(scope="module")
def tricky_server(tricky_path: Path) -> Iterator[Running]:
    with contextlib.closing(Launcher()) as launcher:
        yield launcher(tricky_path)


@pytest.fixture(scope="module")
def module_launcher() -> Iterator[Launcher]:
    """For services that the tests of a module share."""
    with contextlib.closing(Launcher()) as launcher:
        yield launcher
