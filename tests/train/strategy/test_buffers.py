from __future__ import annotations

import torch
from torch import nn

from train.strategy.buffers import Rewinding


def test_running_statistics_go_back_to_where_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    moment = Rewinding(model)
    for _ in range(2):
        model(torch.randn(8, 2))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        moment.note()
        model(torch.randn(8, 2))
        assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        moment.rewind()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name
