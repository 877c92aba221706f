from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.contract.samples import Label, Sample, SampleFolder, label_table, sample_table
from pipeline.system.errors import ConfigError


@pytest.mark.parametrize("is_url", [False, True], ids=["folder", "URL"])
def test_files_are_listed_in_the_order_of_time_read_and_deleted(tmp_path: Path, is_url: bool) -> None:
    folder = SampleFolder(f"memory://{tmp_path}/live" if is_url else str(tmp_path / "live"))
    assert folder.sizes("labels") == {}
    sizes = [folder.write("labels", label_table([Label(name, 1.0, "3" * 10**i)])) for i, name in enumerate("ab")]
    found = folder.sizes("labels")
    assert list(found.values()) == sizes
    tables = [folder.read(name) for name in found]
    assert [table["id"].to_pylist() for table in tables if table is not None] == [["a"], ["b"]]
    first = next(iter(found))
    assert folder.remove(first)
    assert not folder.remove(first)
    assert folder.read(first) is None
    assert folder.sizes("samples") == {}


def test_samples_of_different_shapes_share_a_table_in_the_order_of_time() -> None:
    def sample(name: str, time: float, size: int) -> Sample:
        return Sample(name, time, "b", 0.1, [0, 1], 2, {"x": np.full((2, size), time)}, {"y": np.zeros(2)})

    table = sample_table([sample("late", 2.0, 3), sample("early", 1.0, 1), sample("latest", 3.0, 3)])
    assert table["id"].to_pylist() == ["early"] * 2 + ["late"] * 2 + ["latest"] * 2
    assert table["row"].to_pylist() == [0, 1] * 3
    assert table["input.x"].to_pylist() == [[1.0]] * 2 + [[2.0] * 3] * 2 + [[3.0] * 3] * 2


def test_url_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"serve.sample_to=nosuch://x: Protocol not known: nosuch"):
        SampleFolder("nosuch://x")
