"""`python -m benchmarks.serve.bulk`: `pipe predict` of a table, beside a bare loop over ONNX Runtime.

Both read the same Parquet file in batches of the same size, with the same number of processes, and write Parquet. The
loop has no codec, no checks, no order between its processes and no parts to continue with; in the case `codec` it calls
the codec's `decode` and `encode`. Seconds are those of a whole command, from its start to its end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pyarrow as pa
from onnx import TensorProto, helper
from pyarrow import parquet

from benchmarks.serve.nets import Net
from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json

CASES = ("tensors", "codec")
COLUMNS = [f"c{number:02d}" for number in range(30)]
BATCH_ROWS, GROUP_ROWS = 1024, 1 << 17
_POLL_SECONDS = 0.02
_CODEC = """import numpy as np

NAMES = tuple(f"c{number:02d}" for number in range(30))


class TableCodec:
    def decode(self, instances):
        return {"x": np.array([[row[name] for name in NAMES] for row in instances], np.float32)}

    def encode(self, outputs):
        return [{"score": score} for score in outputs["y"][:, 0].tolist()]
"""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.bulk", description="rows per second of a table")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=len(psutil.Process().cpu_affinity()))
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--bare", nargs=3, metavar=("BUNDLE", "INPUT", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.bare:
        bundle, source, output = map(Path, options.bare)
        bare_loop(bundle, source, output, options.processes)
        return 0
    with tempfile.TemporaryDirectory() as name:
        source = write_table(Path(name) / "rows.parquet", options.rows)
        for case in options.case or CASES:
            measure(write_bundle(Path(name) / case, case), case, source, options)
    return 0


def measure(bundle: Path, case: str, source: Path, options: argparse.Namespace) -> None:
    output, processes = source.with_name(f"{case}.parquet"), ["--processes", str(options.processes)]
    commands = {
        "pipe": [sys.executable, "-m", "pipeline", "predict", "--bundle", str(bundle), "--input", str(source),
                 "--output", str(output), "--overwrite", "-o", "json", *processes],
        "bare": [sys.executable, "-m", "benchmarks.serve.bulk", *processes, "--bare", str(bundle), str(source),
                 str(output.with_suffix(".bare"))],
    }  # fmt: skip
    totals: dict[str, list[float]] = {name: [] for name in commands}
    loops: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            started_at = time.perf_counter()
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            totals[name].append(time.perf_counter() - started_at)
            loops[name].append(json.loads(done.stdout)["rows_per_second"])
    for name, command in commands.items():
        seconds, speed = statistics.median(totals[name]), statistics.median(loops[name])
        print(f"{case:<8} {name}: {seconds:5.2f} s, {options.rows / seconds:>9,.0f} rows/s; without start and end "
              f"{speed:>9,.0f} rows/s; {peak_memory(command) >> 20} MiB")  # fmt: skip
    rounds = zip(totals["bare"], totals["pipe"], strict=True)
    ratios = zip(loops["pipe"], loops["bare"], strict=True)
    print(f"{case:<8} pipe/bare: {statistics.median(bare / pipe for bare, pipe in rounds):.2f}, without start and end "
          f"{statistics.median(pipe / bare for pipe, bare in ratios):.2f}")  # fmt: skip


def peak_memory(command: Sequence[str]) -> int:
    """Return the most resident memory of a command and its processes; pages that they share count for each."""
    process, most = psutil.Popen(command, stdout=subprocess.DEVNULL), 0
    while process.poll() is None:
        total = 0
        for each in (process, *process.children(recursive=True)):
            try:
                total += each.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        most = max(most, total)
        time.sleep(_POLL_SECONDS)
    return most


def write_table(path: Path, rows: int) -> Path:
    rng = np.random.default_rng(0)
    schema = pa.schema([(name, pa.float32()) for name in COLUMNS])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, GROUP_ROWS):
            count = min(GROUP_ROWS, rows - start)
            writer.write_table(pa.table({name: rng.random(count, np.float32) for name in COLUMNS}))
    return path


def write_bundle(folder: Path, case: str) -> Path:
    """Write a net of three layers, with one input for each column, or one for the codec's rows."""
    folder.mkdir()
    net, names = Net(), COLUMNS if case == "tensors" else ["x"]
    first = net.add("Concat", *names, axis=1) if case == "tensors" else "x"
    hidden = net.add("Relu", net.dense(first, 30, 64))
    last = net.dense(net.add("Relu", net.dense(hidden, 64, 32)), 32, 1)
    net.nodes.append(helper.make_node("Identity", [last], ["y"]))
    sizes = {**{name: 30 // len(names) for name in names}, "y": 1}
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in sizes.items()]
    graph = helper.make_graph(net.nodes, "table", values[:-1], values[-1:], net.weights)
    opset = helper.make_opsetid("", 20)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), folder / "model.onnx")
    inputs = tuple(TensorSpec(name=name, datatype="FP32", shape=("batch", 30 // len(names))) for name in names)
    signature = Signature(
        inputs=inputs,
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", 1)),),
        codec="TableCodec" if case == "codec" else "",
        limits=Limits(max_batch_size=BATCH_ROWS),
        runtime=Runtime(provider="cpu", threads=1),
    )
    write_json(folder / "signature.json", signature.model_dump())
    rows = np.random.default_rng(1).random((2, 30), np.float32)
    given = {name: rows[:, [i]] for i, name in enumerate(names)} if case == "tensors" else {"x": rows}
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    y = session.run(None, given)[0]
    (folder / "codec.py").write_text(_CODEC)
    instances = [dict(zip(COLUMNS, row, strict=True)) for row in rows.tolist()] if case == "codec" else []
    predictions = [{"score": score} for score in y[:, 0].tolist()] if case == "codec" else []
    Golden(given, {"y": y}, instances, predictions, rtol=1e-3, atol=1e-4).write(folder)
    (folder / "card.md").write_text("# table\n")
    digest = digest_file(folder / "model.onnx")
    write_manifest(folder, "table", "pass", Ancestors(code="a", data="b", checkpoint="c", verdict="d", onnx=digest))
    return folder


def bare_loop(bundle: Path, source: Path, output: Path, processes: int) -> None:
    """Let each process compute a share of the row groups, and write it to a file of its own."""
    output.mkdir(exist_ok=True)
    metadata = parquet.read_metadata(source)
    shares = [list(range(metadata.num_row_groups))[first::processes] for first in range(processes)]
    tasks = [(bundle, source, output / f"{i}.parquet", share) for i, share in enumerate(shares)]
    if processes == 1:
        spans = [compute_share(*tasks[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            spans = pool.starmap(compute_share, tasks)
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    print(json.dumps({"rows_per_second": metadata.num_rows / seconds}))


def compute_share(bundle: Path, source: Path, output: Path, groups: list[int]) -> tuple[float, float]:
    """Return when the loop began and ended."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(bundle / "model.onnx", options, providers=["CPUExecutionProvider"])
    codec = _codec(bundle) if len(session.get_inputs()) == 1 else None
    started_at = time.monotonic()
    writer, tables = None, []
    with parquet.ParquetFile(source) as file:
        for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False):
            if codec is None:
                inputs = {name: batch[name].to_numpy()[:, None] for name in COLUMNS}
                answer = {"y": session.run(None, inputs)[0][:, 0]}
            else:
                outputs = session.run(None, codec.decode(batch.to_pylist()))
                predictions = codec.encode({"y": outputs[0]})
                answer = {"score": [prediction["score"] for prediction in predictions]}
            tables.append(pa.table(answer))
            if len(tables) == 16:
                writer = writer or parquet.ParquetWriter(output, tables[0].schema)
                writer.write_table(pa.concat_tables(tables))
                tables = []
    if tables:
        writer = writer or parquet.ParquetWriter(output, tables[0].schema)
        writer.write_table(pa.concat_tables(tables))
    if writer is not None:
        writer.close()
    return started_at, time.monotonic()


def _codec(bundle: Path) -> Any:
    spec = importlib.util.spec_from_file_location("table_codec", bundle / "codec.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TableCodec()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
