"""torch's transformer layers: their inference fast path is off, and a mask whose values are read is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.checks.verify import write_and_compare
from export.conversion.to_onnx import export_input
from export.conversion.trace import inspect
from pipeline.contract.data import forward, open_split
from pipeline.system.errors import StageError

from .conftest import Exporter
from .recurrent import KINDS, LETTERS, Tags

WIDTH = 8


class Encoder(nn.Module):
    """Reads the length of the batch in Python, so that only the bytecode of `forward` can be traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.embed, self.head = nn.Embedding(LETTERS, WIDTH), nn.Linear(WIDTH, KINDS)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        start = torch.zeros(len(letters), 1, WIDTH)
        hidden = self.encoder(self.embed(letters) + start, src_key_padding_mask=real == 0)
        tags: Tensor = self.head(hidden)
        return tags


class Decoder(Encoder):
    """A decoder with a causal mask; `hints` say that it is one."""

    def __init__(self, **hints: bool) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True)
        self.decoder, self.hints = nn.TransformerDecoder(layer, 1), hints

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        values, padding = self.embed(letters), real == 0
        mask = nn.Transformer.generate_square_subsequent_mask(letters.shape[1])
        hidden = self.decoder(values, values, tgt_mask=mask, memory_key_padding_mask=padding, **self.hints)
        tags: Tensor = self.head(hidden)
        return tags


class CausalEncoder(Encoder):
    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        mask = torch.ones(letters.shape[1], letters.shape[1], dtype=torch.bool).triu(1)
        tags: Tensor = self.head(self.encoder(self.embed(letters), mask=mask))
        return tags


class Both(Encoder):
    """`nn.Transformer` with a causal mask for one of its halves."""

    def __init__(self, half: str) -> None:
        super().__init__()
        self.both, self.masked = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True), half

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        values, mask = self.embed(letters), nn.Transformer.generate_square_subsequent_mask(letters.shape[1])
        tags: Tensor = self.head(self.both(values, values, **{f"{self.masked}_mask": mask}))
        return tags


@pytest.mark.parametrize("net", [Encoder(), pytest.param(Decoder(tgt_is_causal=True), marks=pytest.mark.long)])
def test_transformer_with_masks_is_exported_as_it_was_evaluated(net: nn.Module, exported: Exporter) -> None:
    made = exported(Tags(net))
    torch.backends.mha.set_fastpath_enabled(True)
    report = write_and_compare(made.kind)
    report.require(made.config)
    assert torch.backends.mha.get_fastpath_enabled()


def test_evaluation_computes_padded_positions_as_the_file_does() -> None:
    task: Any = Tags(net := Encoder().eval())
    batch = open_split(task, "test").batch(range(4))
    with torch.inference_mode():
        outputs: Any = forward(net, task, batch)
    padded = outputs[batch["real"] == 0].numpy()
    assert np.ptp(padded, axis=0).all(), "the fast path has zeros there, for which the head returns its bias"


def test_failure_of_a_model_leaves_the_fast_path_on() -> None:
    task: Any = Tags(net := Encoder().eval())
    with pytest.raises(AssertionError, match="key_padded_mask"):
        forward(net, task, {"letters": torch.zeros(2, 3, dtype=torch.int64), "real": torch.zeros(2, 4)})
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("net", "argument"),
    [
        (Decoder(), "tgt_is_causal"),
        pytest.param(CausalEncoder(), "is_causal", marks=pytest.mark.long),
        (Both("src"), "src_is_causal"),
        pytest.param(Both("tgt"), "tgt_is_causal", marks=pytest.mark.long),
    ],
)
def test_examined_mask_is_named_with_its_argument(
    net: nn.Module, argument: str, capfd: pytest.CaptureFixture[str]
) -> None:
    task: Any = Tags(net)
    with pytest.raises(StageError) as caught:
        inspect(export_input(net.eval(), task, open_split(task, "test").batch(range(3))))
    sentence = str(caught.value)
    assert "examines the values of a mask to find out whether it is causal (test_transformer_layers.py line" in sentence
    assert f"; give it {argument}=True if the mask is causal, and {argument}=False otherwise" in sentence
    capfd.readouterr()  # torch prints the graph up to the branch
