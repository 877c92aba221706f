from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline import read_token_shards, write_token_shards
from pipeline.contract.data import Samples, fill_rows
from pipeline.system.errors import DataError
from pipeline.user.readers import READ_FILES, write_read_files

TEXTS = [[7, 8, 9], [], [1], [2, 3, 4, 5, 6, 10, 11, 12, 13], [14, 15], [16] * 5]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("highest", [16, 70_000])
def test_rows_hold_the_texts_as_packing_lays_them_out(highest: int) -> None:
    texts = [[highest if token == 16 else token for token in text] for text in TEXTS]
    write_token_shards("tokens", texts, shard_tokens=12)  # shards of 13 and 7 tokens
    expected = fill_rows(
        [[[7, 8, 9], [1], [2]], [[3, 4, 5, 6, 10]], [[11, 12, 13]], [[14, 15], [highest] * 3], [[highest] * 2]],
        length=5,
        pad=0,
    )
    rows = Samples("train", read_token_shards("tokens", 5)).batch(range(5))
    assert np.array_equal(rows["input_ids"], expected.ids)
    assert np.array_equal(rows["attention_mask"], expected.segments)
    assert np.array_equal(rows["position_ids"], expected.positions)
    stored = np.load("tokens/00000.tokens.npy", mmap_mode="r")
    assert stored.dtype == np.uint16
    assert np.load("tokens/00001.tokens.npy").dtype == (np.uint16 if highest == 16 else np.uint32)


def test_any_row_can_be_read_alone_and_in_another_process() -> None:
    write_token_shards("tokens", TEXTS)
    rows = pickle.loads(pickle.dumps(read_token_shards("tokens", 4)))
    assert len(rows) == len(list(rows)) == 5
    assert rows[3]["input_ids"].tolist() == [13, 14, 15, 16]
    assert rows[3]["attention_mask"].tolist() == [1, 2, 2, 3]
    with pytest.raises(IndexError):
        rows[5]


def test_prepare_records_the_files(tmp_path: Path) -> None:
    write_token_shards("tokens", TEXTS)
    read_token_shards("tokens", 4)
    write_read_files(tmp_path, tmp_path)
    assert "tokens/00000.tokens.npy" in (tmp_path / READ_FILES).read_text()


def test_interrupted_folder_is_refused_and_can_be_written_again() -> None:
    def interrupted() -> Iterator[list[int]]:
        yield [1] * 10
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_shards("tokens", interrupted(), shard_tokens=5)
    with pytest.raises(DataError, match="it may have been interrupted"):
        read_token_shards("tokens", 4)
    write_token_shards("tokens", TEXTS)
    with pytest.raises(DataError, match="has tokens already"):
        write_token_shards("tokens", TEXTS)


def test_folder_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens to write"):
        write_token_shards("tokens", [[], []])
