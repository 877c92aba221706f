from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.train import on_gpu
from benchmarks.train.gpu import (
    BEST,
    RESNET_ROWS,
    TABLES,
    Row,
    goal,
    gpu,
    heading,
    line,
    measure,
    read_result,
    row_with,
    text,
)
from benchmarks.train.large import NETS, ForeachAdamW, Gpt2, HiddenInTraining, Large, ResNet, resnet, sequences
from benchmarks.train.transformer import Transformer
from pipeline.contract.config import parse_config
from pipeline.contract.task import Task
from pipeline.system.errors import StageError

CPU = {**BEST, "device": "cpu", "compile": False}


@pytest.mark.gpu
@pytest.mark.parametrize("net", TABLES)
def test_a_net_trains_on_every_gpu_and_its_speed_is_reported(net: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    result = gpu(quick=True, net=net)
    print(text(result))
    rows, counts = result["rows"], sorted({1, torch.cuda.device_count()})
    expected = [(name, n, row.title) for name, rows in TABLES[net].items() for n in counts for row in rows[:2]]
    assert [(row["net"], row["gpus"], row["title"]) for row in rows] == expected
    assert not [row["failed"] for row in rows if "failed" in row]
    assert all(row["per_second"] > 0 and (row["mfu"] is None or 0 < row["mfu"] < 1) for row in rows)
    assert all(row["memory_gb"] > 0 for row in rows)


def test_without_a_gpu_the_table_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert text(gpu(quick=True)) == "GPT-2 124M on a GPU skipped: torch sees no CUDA device"
    assert "4 of 32 experts on a GPU skipped: torch sees no CUDA device" in text(gpu(quick=True, net="deepseek"))


@pytest.mark.parametrize("row", [row for table in TABLES.values() for rows in table.values() for row in rows])
def test_each_row_has_valid_settings_and_a_net(row: Row) -> None:
    settings = {**BEST, **row.train}
    parsed = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": settings}, source="test").train
    assert {name: getattr(parsed, name) for name in settings} == settings
    assert not row.net or row.net in NETS


class Small(Gpt2):
    vocabulary = 50

    def model(self) -> nn.Module:
        self._model = HiddenInTraining(vocabulary=50, width=16, heads=2, depth=1, length=1024)
        return self._model


class SmallForeach(ForeachAdamW, Small):
    pass


class SmallResNet(ResNet):
    def model(self) -> nn.Module:
        return nn.Sequential(*resnet(((4, 1), (8, 1)), classes=1000))


@pytest.mark.parametrize("task", [Small, SmallForeach, SmallResNet])
@pytest.mark.long
def test_a_process_measures_each_kind_of_net(monkeypatch: pytest.MonkeyPatch, task: type[Task]) -> None:
    monkeypatch.setitem(NETS, "small", Large("a small net", task, lambda memory: 2, "things", 10))
    monkeypatch.setattr(on_gpu, "LAP", 1)
    row = {**on_gpu.main("small", 1, {**CPU, "recompute": "blocks"}), "net": "small", "gpus": 1, "title": "all"}
    assert (row["batch_size"], row["mfu"]) == (2, None)
    assert 0 < row["memory_gb"] < 10
    assert heading(row).startswith("a small net on 1 x CPU: things/s")
    assert float(line(row, row).split()[1].replace(",", "")) == pytest.approx(row["per_second"], abs=1)


@pytest.mark.long
def test_a_process_that_fails_writes_its_reason() -> None:
    """A real process, which rejects an unknown setting before it needs a GPU."""
    row = measure("gpt2", row_with(device="cpu", no_such_setting=1), gpus=1, steps=1)
    assert row["failed"].startswith("ConfigError: the bench: unknown setting `train.no_such_setting`")
    assert "failed: ConfigError" in line(row, row)


def test_a_reason_is_one_line() -> None:
    assert on_gpu.reason(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")) == "out of memory"
    assert on_gpu.reason(RuntimeError("no kernel\nCUDA_LAUNCH_BLOCKING")) == "RuntimeError: no kernel"
    with pytest.raises(StageError, match=r"^out of memory$"):
        read_result('{"failed": "out of memory"}\n', "Traceback\n=====", 1)
    with pytest.raises(StageError, match="exit status -9: b / c / d"):
        read_result("", "a\nb\nc\nd\n", -9)


def measured(title: str, per_second: float, **others: Any) -> dict[str, Any]:
    row = {"net": "gpt2", "gpus": 1, "title": title, "precision": "bf16", "device": "NVIDIA H200", "capability": 9}
    return {**row, "per_second": per_second, "mfu": 0.415, "memory_gb": 20.04, **others}


def test_row_has_its_ratio_to_the_first_and_the_goal_a_verdict() -> None:
    rows = [measured("best", 400_000), measured("compile: false", 3e5, mfu=None), measured("x", 5e5, precision="fp32")]
    assert line(rows[0], rows[0]).split() == ["best", "400,000", "1.000", "41.5%", "20.0", "GiB"]
    assert line(rows[1], rows[0]).split()[2:] == ["300,000", "0.750", "–", "20.0", "GiB"]
    assert line(rows[1], {"failed": "no compiler"}).split()[3] == "–"
    assert goal(rows).endswith("(llm.c published 463,000): missed with 400,000 (best)")
    assert goal([*rows, measured("compile: blocks", 465_000)]).endswith("met with 465,000 (compile: blocks)")
    assert goal([measured("best", 1e6, capability=10)]).endswith("not measured, this is no Hopper GPU")
    assert goal([measured("best", 1e6, gpus=8)]).endswith("not measured")


def test_each_net_and_number_of_gpus_is_a_table() -> None:
    rows = [measured(title, 10, gpus=gpus, net=net) for net in TABLES["gpt2"] for gpus in (1, 8) for title in "ab"]
    tables = text({"rows": json.loads(json.dumps(rows)), "skipped": ""}).split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [3, 3, 3, 3, 1]
    assert "ResNet-50 on 8 x NVIDIA H200: samples/s" in tables[3]
    assert {row.train["compile"] for row in RESNET_ROWS} == {True, False}


def test_batch_size_follows_from_memory() -> None:
    assert [sequences(gigabytes << 30) for gigabytes in (140, 48, 24, 8)] == [32, 16, 8, 4]


def test_chunked_loss_equals_that_of_the_logits() -> None:
    task, tokens = Small(), torch.randint(50, (3, 1025))
    model, batch = task.model(), {"x": tokens[:, :-1], "target": tokens[:, 1:]}
    assert model(batch["x"]).shape == (3, 1024, 16)
    in_chunks = task.loss(model(batch["x"]), batch)
    whole = task.loss(model.eval()(batch["x"]), batch)
    torch.testing.assert_close(in_chunks, whole)


def test_net_with_whole_logits_has_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.train.large._DEPTH", 1)
    whole, chunked = (NETS[name].make() for name in ("gpt2_whole_logits", "gpt2"))
    with torch.device("meta"):
        models = [whole.model(), chunked.model()]
        logits = models[0](torch.zeros(1, 1024, dtype=torch.long))
    assert isinstance(models[0], Transformer)
    assert logits.shape == (1, 1024, 50304)
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in models]
    assert shapes[0] == shapes[1]


def test_the_residual_net_is_resnet_50() -> None:
    with torch.device("meta"):
        model = ResNet().model()
        assert model(torch.zeros(2, 3, 56, 56)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032  # as torchvision's
