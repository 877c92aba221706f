from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.train import __main__ as bench
from benchmarks.train import deepseek
from benchmarks.train.bare import padded
from benchmarks.train.deepseek import DeepSeek, Padded
from benchmarks.train.gate import Finished, Gate
from benchmarks.train.packed import Layout, line, row_of, text
from benchmarks.train.race import Course, Lap
from benchmarks.train.workloads import workload
from pipeline.contract.data import forward, open_split
from pipeline.system.processes import Rank


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    draw = np.random.default_rng(0)
    found = [draw.integers(1, 64, size).tolist() for size in (3, 9, 5, 12, 2, 7)]
    monkeypatch.setattr(deepseek, "pieces", lambda: found)
    monkeypatch.setattr(deepseek, "LENGTH", 16)
    monkeypatch.setattr(deepseek, "_ROWS", 16)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setattr(deepseek, "_SIZE", {**deepseek._SIZE, **small, "vocab_size": 64})
    return found


def test_speed_is_compared_in_tokens_without_padding() -> None:
    """Packed batches have twice the tokens of padded ones and take up to half as long again."""
    course = Course("deepseek", processes=1, threads=1, lap=10, warm_laps=0, laps=2)
    heat = {"padded": [Lap(2.0, 1.0), Lap(4.0, 1.0)], "ours": [Lap(3.0, 1.0), Lap(5.0, 1.0)]}
    layout = Layout(useful={"ours": 200.0, "padded": 100.0}, padding={"ours": 0.01, "padded": 0.4})
    row = row_of(course, [heat], layout)
    assert (row.low, row.high, row.median) == (1.333, 1.6, 1.467)
    assert (row.tokens_per_second, row.padded_tokens_per_second) == (500, 333)
    assert line(row).split()[1:4] == ["1", "1.0%", "40.0%"]
    assert text({"rows": [vars(row)]}).count("\n") == 1


def test_both_layouts_have_the_same_texts(texts: list[list[int]]) -> None:
    for task in (DeepSeek(), Padded()):
        rows = task.rows()
        assert sorted(rows.ids[rows.segments != 0].tolist()) == sorted(token for text in texts for token in text)
    assert deepseek.useful_tokens(DeepSeek()) == pytest.approx(4 * 38 / 3)
    assert deepseek.useful_tokens(Padded()) == pytest.approx(4 * 38 / 6)
    assert deepseek.padding() == pytest.approx(0.4, abs=0.1)


@pytest.mark.usefixtures("texts")
@torch.no_grad()
def test_loss_of_a_text_is_the_same_packed_and_padded() -> None:
    """Otherwise different work would be compared; columns of padding are dropped too."""
    torch.manual_seed(0)
    task, other = DeepSeek(), Padded()
    model, trimmed = task.model().eval(), other.model().eval()
    trimmed.get_submodule("model").load_state_dict(model.state_dict())
    batch = open_split(other, "train").batch([0, 2])
    losses = [one.loss(forward(net, one, batch), batch).item() for one, net in ((task, model), (other, trimmed))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert forward(trimmed, other, batch).shape[1] == 5  # type: ignore[union-attr]


@pytest.mark.usefixtures("texts")
def test_the_bare_loop_trains_a_row_for_each_text(tmp_path: Path) -> None:
    class Once(Gate):
        left = 1

        def __call__(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Finished

    with pytest.raises(Finished):
        padded(replace(workload("deepseek"), lap=1), Rank(), Once(), tmp_path)
    assert (tmp_path / "log.txt").read_text().startswith("0 ")


def test_table_without_a_language_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--model", "deepseek", "--table", "link"])
    assert "--model goes with the tables loops, packing, gpu, not with link" in capsys.readouterr().err
