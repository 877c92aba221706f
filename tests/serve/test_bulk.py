"""Predictions of whole files: the service's answers, in order, whatever interrupts the run or shares it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import psutil
import pyarrow as pa
import pytest
from onnx import TensorProto, helper
from pyarrow import csv, parquet

from pipeline.contract.bundle import open_bundle
from pipeline.contract.golden import Golden
from pipeline.contract.signature import TensorSpec
from pipeline.service import bulk
from pipeline.service.bulk import Request, Work, predict
from pipeline.system.errors import ConfigError, DataError, Interrupted, StageError
from tests.serve.bundles import LIMITS, build, signature, write
from tests.serve.identity_models import build as build_identity
from tests.serve.special_models import mixing, padded
from tests.serve.test_media_types import CODEC as GREY_CODEC

ROOT = Path(__file__).resolve().parents[2]
ROWS_CODEC = """
import os
import numpy as np
from pipeline.system.errors import InvalidPayload

class Rows:
    def decode(self, instances):
        for row in instances:
            if row["kind"] not in ("a", "b"):
                raise InvalidPayload(f"kind: {row['kind']!r} is neither a nor b")
            if row["count"] == 666:
                os._exit(3)
        numbers = [[row["size"], row["count"]] for row in instances]
        return {"x": np.array([[np.nan if v is None else v for v in row] for row in numbers], np.float32)}

    def encode(self, outputs):
        return [{"size": float(size), "is_large": bool(count > 5)} for size, count in outputs["y"]]
"""
# size, kind and count of each row; the answer has the size and whether the count is above 5
TABLE = pa.table({"size": [0.1, None, float("nan"), 2.5], "kind": ["a", "b", "a", "b"], "count": [1, 2, 7, 8]})
ANSWERS = [(0.10000000149011612, False), (None, False), (None, True), (2.5, True)]


@pytest.fixture(scope="module")
def rows_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose instances are mappings, with missing numbers."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "rows", [x], [y])
    specs = [TensorSpec(name=name, datatype="FP32", shape=("batch", 2), allows_missing=name == "x") for name in "xy"]
    values = np.array([[1.5, 3], [np.nan, 9]], np.float32)
    instances: list[Any] = [{"size": 1.5, "kind": "a", "count": 3}, {"size": None, "kind": "b", "count": 9}]
    predictions = [{"size": 1.5, "is_large": False}, {"size": None, "is_large": True}]
    golden = Golden({"x": values}, {"y": values}, instances, predictions, rtol=0, atol=0)
    path = tmp_path_factory.mktemp("rows") / "bundle"
    return write(path, graph, signature(specs[:1], specs[1:], "Rows", LIMITS), golden, ROWS_CODEC)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part be one batch, which has 16 rows here."""
    for name in ("_PART_BATCHES", "_SMALL_PART_BATCHES", "_PART_ROWS"):
        monkeypatch.setattr(bulk, name, 1)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that this process computes."""
    numbers: list[int] = []
    compute = Work.compute

    def record(self: Work, predictor: Any, index: int, rows: Any) -> int:
        numbers.append(index)
        return compute(self, predictor, index, rows)

    monkeypatch.setattr(Work, "compute", record)
    return numbers


def pictures(count: int) -> list[Any]:
    grey: list[Any] = np.random.default_rng(1).integers(0, 17, (count, 8, 8)).tolist()
    return grey


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def run(bundle: Path, source: Path, output: Path, **options: Any) -> dict[str, Any]:
    return predict(Request(open_bundle(bundle), source, output, **{"processes": 1, **options}))


def sizes(path: Path) -> list[tuple[Any, Any]]:
    table = {".csv": csv.read_csv, ".parquet": parquet.read_table}[path.suffix](path)
    numbers = [None if value is None or value != value else value for value in table["size"].to_pylist()]
    return list(zip(numbers, table["is_large"].to_pylist(), strict=True))


def test_answers_are_those_of_the_service_bit_for_bit(
    client: httpx.Client, bundle_path: Path, tmp_path: Path, small_parts: None
) -> None:
    rows = pictures(41)
    source = write_lines(tmp_path / "in.jsonl", rows)
    result = run(bundle_path, source, tmp_path / "out.jsonl")
    digest = open_bundle(bundle_path).digest
    assert {**result, "seconds": 0, "rows_per_second": 0} == {
        "rows": 41, "rows_per_second": 0, "output": str(tmp_path / "out.jsonl"), "seconds": 0,
        "bundle": digest,
    }  # fmt: skip
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    for start in range(0, 41, 16):
        answer = client.post("/v1/models/tiny:predict", json={"instances": rows[start : start + 16]})
        assert answer.content == b'{"predictions":[' + b",".join(lines[start : start + 16]) + b"]}"
    assert not (tmp_path / "out.jsonl.parts").exists()

    parquet.write_table(pa.table({"picture": rows}), tmp_path / "in.parquet", row_group_size=7)
    run(bundle_path, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == [orjson.loads(line) for line in lines]


def test_order_is_that_of_the_input_with_several_processes(
    bundle_path: Path, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, computed: list[int]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", pictures(400))
    run(bundle_path, source, tmp_path / "one.jsonl")
    computed.clear()
    monkeypatch.setattr(bulk, "_ALONE_SECONDS", 0)
    run(bundle_path, source, tmp_path / "two.jsonl", processes=2)
    assert 0 not in computed, "another process computed it"
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_tables_are_instances_by_column(rows_path: Path, tmp_path: Path, output: str) -> None:
    parquet.write_table(TABLE, tmp_path / "in.parquet")
    run(rows_path, tmp_path / "in.parquet", tmp_path / output)
    assert sizes(tmp_path / output) == ANSWERS
    (tmp_path / "in.csv").write_text('size,kind,count\n0.1,a,1\n,b,2\n,"a",7\n2.5,b,8\n')
    run(rows_path, tmp_path / "in.csv", tmp_path / output, overwrite=True)
    assert sizes(tmp_path / output) == ANSWERS


def test_missing_number_is_null_in_lines(rows_path: Path, tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "in.parquet")
    run(rows_path, tmp_path / "in.parquet", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["size"], line["is_large"]) for line in lines] == ANSWERS


def test_files_of_a_folder_are_instances(tmp_path: Path, picture: list[list[int]]) -> None:
    bundle = build(
        tmp_path / "bundle", "GreyCodec", GREY_CODEC, [{"image": picture}], lambda logits: [int(logits[0].argmax())]
    )
    (tmp_path / "in" / "more").mkdir(parents=True)
    names = ["a.grey", "b.grey", "more/c.grey"]
    files = [b"GREY" + bytes(range(seed, seed + 64)) for seed in range(3)]
    for name, content in zip(names, files, strict=True):
        (tmp_path / "in" / name).write_bytes(content)
    run(bundle, tmp_path / "in", tmp_path / "out.csv")
    lines = [{"b64": base64.b64encode(content).decode()} for content in files]
    run(bundle, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    expected = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert csv.read_csv(tmp_path / "out.csv").to_pydict() == {"file": names, "prediction": expected}
    with pytest.raises(ConfigError, match=r"out\.csv: is in the folder of the inputs"):
        run(bundle, tmp_path / "in", tmp_path / "in" / "out.csv")
    (tmp_path / "in" / "b.grey").write_bytes(b"GREY")
    with pytest.raises(DataError, match=r"in: b\.grey: instances: each must be a file of GREY and 64 bytes"):
        run(bundle, tmp_path / "in", tmp_path / "out.parquet")


def test_columns_with_the_names_of_inputs_are_tensors(tmp_path: Path) -> None:
    specs: Any = {"x": ("FP32", ["batch", 3]), "n": ("INT32", ["batch", 1]), "t": ("BYTES", ["batch"])}
    bundle = build_identity(tmp_path / "bundle", specs, missing={"x"})
    rows: dict[str, list[Any]] = {"x": [[1.5, None, 2.0], [0.5, 3.0, 0.1]], "n": [3, -4], "t": ["é", ""]}
    parquet.write_table(pa.table(rows), tmp_path / "in.parquet")
    run(bundle, tmp_path / "in.parquet", tmp_path / "out.jsonl")
    lines = [{name: values[row] for name, values in rows.items()} for row in range(2)]
    expected = '{"x_out":[1.5,null,2.0],"n_out":[3],"t_out":"é"}\n{"x_out":[0.5,3.0,0.1],"n_out":[-4],"t_out":""}\n'
    assert (tmp_path / "out.jsonl").read_text() == expected
    run(bundle, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", overwrite=True)
    assert (tmp_path / "out.jsonl").read_text() == expected
    run(bundle, tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet")["n_out"].to_pylist() == [[3], [-4]]
    lines[1]["n"] = 1 << 40
    with pytest.raises(DataError, match=r"row 2: n: data holds a number outside the range of INT32"):
        run(bundle, write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", overwrite=True)


def test_table_of_numbers_loads_no_pandas(tmp_path: Path) -> None:
    """It would take a quarter of a second of each process."""
    bundle = build_identity(tmp_path / "bundle", {"x": ("FP32", ["batch", 1])})
    parquet.write_table(pa.table({"x": [0.5, 1.5]}), tmp_path / "in.parquet")
    words = ("predict", "--bundle", bundle, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out.parquet")
    record = "import sys; sys.addaudithook(lambda event, args: event == 'import' and print(args[0], file=sys.stderr))"
    command = [sys.executable, "-c", record + PROGRAM, *map(str, words)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stderr.split()
    assert "pyarrow" in printed and "pandas" not in printed
    assert parquet.read_table(tmp_path / "out.parquet")["x_out"].to_pylist() == [[0.5], [1.5]]


def test_rows_of_different_lengths_are_tensors(tmp_path: Path) -> None:
    bundle = build_identity(tmp_path / "bundle", {"x": ("INT64", ["batch", "length"])})
    rows = [{"x": list(range(length))} for length in (1, 3, 2, 3)]
    run(bundle, write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet")
    assert parquet.read_table(tmp_path / "out.parquet")["x_out"].to_pylist() == [row["x"] for row in rows]


def test_models_that_mix_rows_get_one_at_a_time(tmp_path: Path) -> None:
    bundle = mixing(tmp_path / "bundle")
    run(bundle, write_lines(tmp_path / "in.jsonl", [{"x": [1.0]}, {"x": [5.0]}]), tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == '{"y":[0.0]}\n' * 2


def test_one_column_is_the_instance_of_a_model_for_texts(tmp_path: Path) -> None:
    bundle = padded(tmp_path / "bundle")
    (tmp_path / "in.csv").write_text('text\nab\n"c"\n')
    run(bundle, tmp_path / "in.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == '"prediction"\n"bc"\n"d"\n'
    (tmp_path / "in.csv").write_text("text,id\nab,1\n")
    with pytest.raises(ConfigError, match=r'has the columns text, id, and an instance is one value, as "ab"'):
        run(bundle, tmp_path / "in.csv", tmp_path / "other.csv")


def refusable(path: Path, count: int = 40) -> Path:
    """Write rows of which the 3rd and the 20th are refused."""
    rows = [{"size": 1.0, "kind": "c" if row in (2, 19) else "a", "count": row} for row in range(count)]
    return write_lines(path, rows)


def test_refused_row_stops_with_its_number(rows_path: Path, tmp_path: Path, small_parts: None) -> None:
    source = refusable(tmp_path / "in.jsonl")
    with pytest.raises(DataError, match=r"in\.jsonl: row 3: kind: 'c' is neither a nor b$"):
        run(rows_path, source, tmp_path / "out.jsonl")
    source.write_text('{"size": 1, "kind": "a", "count": 1}\n{"size": 1\n')
    with pytest.raises(DataError, match=r"row 2: body: not valid JSON"):
        run(rows_path, source, tmp_path / "out.csv")
    source.write_text('{"size": 1, "kind": "a"}\n')
    with pytest.raises(DataError, match=r"row 1: instances: the model's codec cannot decode them \(KeyError: 'count'"):
        run(rows_path, source, tmp_path / "out.parquet")


def test_refused_tensor_stops_with_its_row(tmp_path: Path) -> None:
    bundle = build_identity(tmp_path / "bundle", {"x": ("FP32", ["batch", 2])})
    rows = {"x": [[1.0, 2.0], [None, 1.0], [3.0, 4.0]]}
    parquet.write_table(pa.table(rows), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"row 2: .* holds null or NaN, but the model was trained without missing"):
        run(bundle, tmp_path / "in.parquet", tmp_path / "out.parquet")


def test_shards_compute_their_parts_and_the_last_one_joins(
    bundle_path: Path, tmp_path: Path, small_parts: None, computed: list[int]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", pictures(100))
    run(bundle_path, source, tmp_path / "whole.jsonl")
    computed.clear()
    first = run(bundle_path, source, tmp_path / "out.jsonl", shard=(2, 2))
    assert (first["rows"], first["output"], computed) == (48, None, [1, 3, 5])
    last = run(bundle_path, source, tmp_path / "out.jsonl", shard=(1, 2))
    assert (last["rows"], last["output"]) == (100, str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()

    computed.clear()
    again = run(bundle_path, source, tmp_path / "out.jsonl", shard=(2, 2))  # its pod was replaced after the end
    assert ({**again, "seconds": last["seconds"]}, computed) == (last, [])
    write_lines(source, pictures(101))
    with pytest.raises(ConfigError, match=r"out\.jsonl: exists; to fix it: name another file, or add --overwrite"):
        run(bundle_path, source, tmp_path / "out.jsonl", shard=(2, 2))
    assert run(bundle_path, source, tmp_path / "out.jsonl", shard=(2, 2), overwrite=True)["output"] is None


def test_two_shards_that_join_at_once_give_one_output(
    bundle_path: Path, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", pictures(40))
    run(bundle_path, source, tmp_path / "whole.jsonl")
    run(bundle_path, source, tmp_path / "out.jsonl", shard=(2, 2))
    write_joined, results = bulk._write_joined, list[dict[str, Any]]()

    def join_twice(*arguments: Any) -> None:
        write_joined(*arguments)
        if not results:
            results.append({})
            results.append(run(bundle_path, source, tmp_path / "out.jsonl", shard=(2, 2)))

    monkeypatch.setattr(bulk, "_write_joined", join_twice)
    results.append(run(bundle_path, source, tmp_path / "out.jsonl", shard=(1, 2)))
    assert [result["output"] for result in results[1:]] == [str(tmp_path / "out.jsonl")] * 2
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl", "out.jsonl.job.json", "whole.jsonl"}


PROGRAM = """
import sys
from pipeline.service import bulk
from pipeline.cli import main
bulk._PART_BATCHES = bulk._SMALL_PART_BATCHES = bulk._PART_ROWS = 1
bulk._ALONE_SECONDS = 0
main()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `pipe predict` with small parts."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, "predict", *words]
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def gated(tmp_path: Path, picture: list[list[int]]) -> Path:
    """Write 5 parts of rows, the last of which waits for the file `gate`."""
    rows: list[Any] = [{"image": picture} for _ in range(5 * 16)]
    rows[-1]["gate"] = str(tmp_path / "gate")
    return write_lines(tmp_path / "in.jsonl", rows)


def finished_parts(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("out.jsonl.parts/[0-9]*"))


@pytest.mark.parametrize(("processes", "number"), [("2", signal.SIGKILL), ("2", signal.SIGTERM)])
def test_interrupted_run_continues_with_the_missing_parts(
    tmp_path: Path,
    tricky_path: Path,
    picture: list[list[int]],
    start: Callable[..., subprocess.Popen[str]],
    small_parts: None,
    computed: list[int],
    processes: str,
    number: signal.Signals,
) -> None:
    source, output = gated(tmp_path, picture), tmp_path / "out.jsonl"
    words = ["--bundle", str(tricky_path), "--input", str(source), "--output", str(output), "--processes", processes]
    process = start(*words)
    wait_until(lambda: len(finished_parts(tmp_path)) >= 3, process)
    parts = finished_parts(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert len(workers) == int(processes) - 1
    assert psutil.wait_procs(workers, 300)[1] == [], "no process is left"
    if number == signal.SIGTERM:
        assert process.returncode == 143
        assert "out.jsonl: interrupted; the finished parts are in " in stderr
    there = finished_parts(tmp_path)
    assert {*parts} <= {*there}
    (tmp_path / "gate").touch()
    assert run(tricky_path, source, output)["rows"] == 80
    assert [f"{index:08d}.parquet" for index in computed] == [
        name for name in (f"{index:08d}.parquet" for index in range(5)) if name not in there
    ]
    assert len(output.read_text().splitlines()) == 80


def test_parts_of_another_bundle_or_input_are_refused(
    bundle_path: Path, other_path: Path, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", pictures(40)), tmp_path / "out.jsonl"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Work, "compute", interrupt)
        with pytest.raises(Interrupted, match=r"out\.jsonl: interrupted; .* the same command continues"):
            run(bundle_path, source, output)
    with pytest.raises(ConfigError, match=r"parts of bundle \w+, not \w+; to fix it: remove .*parts"):
        run(other_path, source, output)
    write_lines(source, pictures(41))
    with pytest.raises(ConfigError, match=r"parts of input bytes \d+, not \d+"):
        run(bundle_path, source, output)


def test_worker_that_ends_is_reported(
    rows_path: Path, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"size": 1.0, "kind": "a", "count": 666}] * 16 + [{"size": 1.0, "kind": "a", "count": 1}] * 16
    source = write_lines(tmp_path / "in.jsonl", rows)
    monkeypatch.setattr(bulk, "_ALONE_SECONDS", 0)
    with pytest.raises(StageError, match=r"a worker process exited with status 3; to fix it: run the same command"):
        run(rows_path, source, tmp_path / "out.jsonl", processes=2)
    write_lines(source, [{"size": 1.0, "kind": "c", "count": 1}, *rows[16:]])
    with pytest.raises(DataError, match=r"row 1: kind: 'c' is neither"):
        run(rows_path, source, tmp_path / "out.csv", processes=2)


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        ("in.jsonl", "out.txt", r"out\.txt: name an output that ends in \.parquet, \.jsonl, \.csv"),
        ("in.jsonl", "in.jsonl", r"in\.jsonl: exists; to fix it: name another file, or add --overwrite"),
        ("in.jsonl", "no/out.csv", r"no: no such folder; to fix it: create it"),
        ("in.txt", "out.csv", r"in\.txt: is no \.parquet, \.csv or \.jsonl file, and no folder of files"),
        ("no.csv", "out.csv", r"no\.csv: no such file or folder"),
        ("dates.parquet", "out.csv", r"column day is date32\[day\], which JSON lacks"),
        ("broken.parquet", "out.csv", r"broken\.parquet: cannot be read: .*; to fix it: write the file again"),
        ("broken.csv", "out.csv", r"broken\.csv: cannot be read: CSV parse error"),
        ("folder", "out.csv", r"folder: the bundle's codec has no media_types"),
        ("in.jsonl", "out.csv", r"the predictions fit in no such table: .*; to fix it: write \.jsonl"),
    ],
)
def test_mistake_is_one_sentence(bundle_path: Path, tmp_path: Path, source: str, output: str, message: str) -> None:
    write_lines(tmp_path / "in.jsonl", pictures(2))
    (tmp_path / "in.txt").touch()
    (tmp_path / "folder").mkdir()
    parquet.write_table(pa.table({"day": pa.array([1], pa.date32())}), tmp_path / "dates.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "broken.csv").write_text("a\n1\n2,3\n")
    with pytest.raises((ConfigError, DataError), match=message):
        run(bundle_path, tmp_path / source, tmp_path / output)


def test_language_models_are_for_the_service(bundle_path: Path, tmp_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    generating = replace(bundle, signature=bundle.signature.model_copy(update={"generation": object()}))
    with pytest.raises(ConfigError, match=r"generates texts; to fix it: use its service"):
        predict(Request(generating, tmp_path, tmp_path / "out.jsonl"))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_input_without_rows_gives_an_output_without_rows(bundle_path: Path, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in.jsonl").touch()
    assert run(bundle_path, tmp_path / "in.jsonl", tmp_path / f"out.{suffix}")["rows"] == 0
    assert (tmp_path / f"out.{suffix}").is_file()
