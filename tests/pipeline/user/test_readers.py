from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import read_dataset, read_images, read_jsonl, read_shards, read_table
from pipeline.contract.data import Samples, fingerprint
from pipeline.system.errors import DataError, missing_extra
from pipeline.user.readers import changed_read_files, find_files, write_read_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, in which steps run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.user.readers._patterns", {})
    return tmp_path


def test_csv_files_are_columns_of_arrays(folder: Path) -> None:
    (folder / "a.csv").write_text("size,count,name,known\n1.5,3,x,true\n,4,y,false\n")
    (folder / "b.csv").write_text("size,count,name,known\n2,5,z,true\n")
    table = read_table("*.csv")
    np.testing.assert_array_equal(table["size"], [1.5, np.nan, 2])
    assert table["count"].tolist() == [3, 4, 5]
    assert table["name"].tolist() == ["x", "y", "z"]
    assert table["known"].tolist() == [True, False, True]
    assert list(read_table("a.csv", columns=["count", "size"])) == ["count", "size"]
    torch.as_tensor(table["count"])


def test_a_table_with_tabs_is_read_by_its_ending(folder: Path) -> None:
    (folder / "a.tsv").write_text("a\tb\n1\t2,5\n")
    assert read_table("a.tsv")["b"].tolist() == ["2,5"]


def test_parquet_columns_keep_their_types_and_shapes(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        "x": pyarrow.array([1.0, 2.0], pyarrow.float32()),
        "vector": pyarrow.array([[1, 2, 3], [4, 5, 6]]),
        "ragged": pyarrow.array([[1], [2, 3]]),
        "kind": pyarrow.array(["a", "b"]).dictionary_encode(),
        "known": pyarrow.array([True, None]),
    }
    parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    table = read_table("a.parquet")
    assert (table["x"].dtype, table["vector"].shape) == (np.float32, (2, 3))
    assert [row.tolist() for row in table["ragged"]] == [[1], [2, 3]]
    assert table["kind"].tolist() == ["a", "b"]
    np.testing.assert_array_equal(table["known"], [1, np.nan])
    assert Samples("train", {"x": table["x"], "vector": table["vector"]}).batch([1])["vector"].tolist() == [[4, 5, 6]]


@pytest.mark.parametrize(
    ("path", "columns", "message"),
    [
        ("none.csv", None, "none.csv: no such file in "),
        ("a.csv", ["y"], r"a.csv: has no column y \(its columns: x\)"),
        ("a.xls", None, r"a.xls: read_table reads .csv, .tsv and .parquet files"),
        ("bad.csv", None, "bad.csv: cannot be read as a table"),
        ("bad.parquet", None, "bad.parquet: cannot be read as a table"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_sentence(
    folder: Path, path: str, columns: list[str] | None, message: str
) -> None:
    (folder / "a.csv").write_text("x\n1\n")
    (folder / "a.xls").write_text("")
    (folder / "bad.csv").write_text("x,y\n1\n")
    (folder / "bad.parquet").write_text("no table")
    with pytest.raises(DataError, match=rf"^{message}"):
        read_table(path, columns)


def picture(color: tuple[int, int, int], width: int = 3) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 2), color).save(file, "png")
    return file.getvalue()


def test_a_folder_of_pictures_has_a_class_per_folder(folder: Path) -> None:
    for name, color in (("dog/1.png", (255, 0, 0)), ("cat/2.png", (0, 255, 0)), ("cat/deep/1.png", (0, 0, 0))):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).write_bytes(picture(color))
    (folder / "images/cat/notes.txt").write_text("")
    images = read_images("images")
    assert (images.classes, images.labels) == (("cat", "dog"), [0, 0, 1])
    batch = Samples("train", images).batch([0, 1, 2])
    assert (batch["image"].shape, batch["image"].dtype) == ((3, 3, 2, 3), torch.float32)
    assert batch["image"][:, :, 0, 0].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    grey = read_images("images", transform=lambda image: np.asarray(image.resize((1, 1))), mode="L")
    assert grey[2]["image"].tolist() == [[76]]
    (folder / "images/cat/2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"images/cat/2.png: cannot be read as a picture"):
        images[0]
    with pytest.raises(DataError, match=r"^images/dog: has no pictures in folders of classes"):
        read_images("images/dog")


def test_json_lines_are_parsed_when_used(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "é", "label": 1}\n\n{"text": "b", "label": 0}')
    (folder / "b.jsonl").write_text('[1]\n{"text": \n')
    rows = read_jsonl("a.jsonl")
    assert [rows[i] for i in range(len(rows))] == [{"text": "é", "label": 1}, {"text": "b", "label": 0}]
    samples = Samples("train", read_jsonl("a.jsonl", lambda row: {"x": len(row["text"]), "y": row["label"]}))
    assert samples.batch([1, 0])["y"].tolist() == [0, 1]
    for index, message in ((2, "b.jsonl, byte 0: must be a JSON object, not list"), (3, "b.jsonl, byte 4: not a line")):
        with pytest.raises(DataError, match=f"^{message}"):
            read_jsonl("*.jsonl")[index]


def test_a_dataset_of_hugging_face_is_read_from_disk(folder: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    datasets.DatasetDict({"train": rows}).save_to_disk("saved")
    batch = Samples("train", read_dataset("saved", "train")).batch([1, 0])
    assert (batch["x"].tolist(), batch["label"].tolist()) == ([[3, 4], [1, 2]], [1, 0])
    changed = read_dataset("saved", "train", lambda row: {"x": row["x"][:1]})
    assert Samples("train", changed).batch([0, 1])["x"].tolist() == [[1], [3]]
    with pytest.raises(DataError, match="saved: has the splits train; name one"):
        read_dataset("saved", "test")


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, parts in samples.items():
            for ending, data in parts.items():
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def numbered(numbers: range) -> dict[str, dict[str, bytes]]:
    return {f"part/{i:03}": {"cls": str(i).encode(), "json": json.dumps({"x": i / 2}).encode()} for i in numbers}


def small(sample: dict[str, Any]) -> dict[str, Any]:
    assert sample["__key__"] == f"part/{sample['cls']:03}"
    return {"x": sample["json"]["x"], "label": sample["cls"]}


def labels(samples: Samples, indices: range, epoch: int = 0) -> list[int]:
    found: list[int] = samples.batch(indices, epoch)["label"].tolist()
    return found


def test_shards_are_a_stream_in_the_order_of_their_names(folder: Path) -> None:
    for number, part in enumerate((range(4), range(4, 5), range(5, 9))):
        write_shard(folder / f"train-{number}.tar", numbered(part))
    samples = Samples("train", read_shards("train-*.tar", small))
    assert (len(samples), samples.is_stream) == (9, True)
    assert [labels(samples, range(i, i + 3)) for i in (0, 3, 6)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert labels(samples, range(7, 9)) == [7, 8]


def test_shuffled_shards_have_another_order_in_each_epoch(folder: Path) -> None:
    for number in range(3):
        write_shard(folder / f"train-{number}.tar", numbered(range(5 * number, 5 * number + 5)))
    samples = Samples("train", read_shards("train-*.tar", small, shuffle=True))
    epochs = [labels(samples, range(15), epoch) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(15))] * 2
    assert epochs[0] != epochs[1]
    assert len({epoch[0] // 5 for epoch in epochs} | {epoch[5] // 5 for epoch in epochs}) > 1
    again = Samples("train", read_shards("train-*.tar", small, shuffle=True))
    assert labels(again, range(9, 15), epoch=1) == epochs[1][9:]


def test_files_in_a_shard_are_decoded_by_their_ending(folder: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    parts = {"npy": array.getvalue(), "txt": b"a", "seg.png": picture((0, 0, 255)), "bin": b"\x01"}
    write_shard(folder / "a.tar", {"1": parts})
    (sample,) = (load() for load in read_shards("a.tar"))
    assert (sample["npy"].tolist(), sample["txt"], sample["bin"]) == ([0, 1, 2], "a", b"\x01")
    assert sample["seg.png"][:, 0, 0].tolist() == [0, 0, 1]
    assert "__key__" not in sample


def test_a_shard_that_cannot_be_read_is_one_sentence(folder: Path) -> None:
    write_shard(folder / "twice.tar", {"1": {"cls": b"1"}, "./1": {}} | {"2": {"cls": b"x"}})
    (folder / "torn.tar").write_bytes(b"no tar file" * 99)
    with tarfile.open(folder / "twin.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("1.cls"))
    for name, message in (("torn", "torn.tar: not a tar file"), ("twin", "twin.tar: has two files 1.cls")):
        with pytest.raises(DataError, match=message):
            list(read_shards(f"{name}.tar"))
    with pytest.raises(DataError, match=r"twice.tar: 2.cls: cannot be decoded"):
        [load() for load in read_shards("twice.tar")]


def test_a_missing_package_is_named_with_its_extra() -> None:
    error = missing_extra(ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow"))
    assert str(error) == "the module `pyarrow` is not installed; to fix it: pip install 'pipe-road[data]'"


def test_files_that_were_read_are_noticed_when_they_change(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "data").mkdir()
    for name in ("a", "b"):
        (folder / "data" / f"{name}.jsonl").write_text('{"x": 1}\n')
    write_read_files(folder, folder / "out")
    assert not list((folder / "out").iterdir())
    read_jsonl("data/*.jsonl")
    write_read_files(folder, folder / "out")
    assert changed_read_files(folder, folder / "out") == []
    os.utime(folder / "data/a.jsonl", ns=(1, 1))  # copied, with the same content
    assert changed_read_files(folder, folder / "out") == []
    (folder / "data/a.jsonl").write_text('{"x": 2}\n')
    (folder / "data/b.jsonl").unlink()
    (folder / "data/c.jsonl").write_text("")
    assert changed_read_files(folder, folder / "out") == ["data/a.jsonl", "data/b.jsonl", "data/c.jsonl"]
    for path in (folder / "data").iterdir():
        path.unlink()
    assert changed_read_files(folder, folder / "out") == []  # the data are on another machine


def test_a_large_file_counts_as_changed_by_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.user.readers._MAX_HASHED_BYTES", 1)
    (folder / "a.jsonl").write_text('{"x": 1}\n')
    read_jsonl("a.jsonl")
    write_read_files(folder, folder)
    assert changed_read_files(folder, folder) == []
    os.utime(folder / "a.jsonl", ns=(1, 1))
    assert changed_read_files(folder, folder) == ["a.jsonl"]


def test_absolute_patterns_are_found(folder: Path) -> None:
    (folder / "a.csv").write_text("x\n1\n")
    assert find_files(f"{folder}/*.csv") == [folder / "a.csv"]


def test_a_fingerprint_is_that_of_columns(folder: Path) -> None:
    write_shard(folder / "a.tar", numbered(range(6)))
    columns = {"x": np.arange(6) / 2, "label": np.arange(6)}
    assert fingerprint(Samples("train", read_shards("a.tar", small))) == fingerprint(Samples("train", columns))
