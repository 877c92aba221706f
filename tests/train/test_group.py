from __future__ import annotations

import pytest
import torch

from pipeline.spec.errors import ConfigError
from pipeline.spec.rank import Rank
from train.group import Group, choose_device, lost_contact


def test_asking_for_a_gpu_that_is_not_there_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"train\.device=cuda, but torch sees no CUDA device"):
        choose_device("cuda", Rank())


def test_without_a_gpu_auto_takes_the_cpu_and_with_one_the_wish_for_a_cpu_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", Rank()).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("cpu", Rank()).type == "cpu"


def test_a_process_alone_needs_no_collectives() -> None:
    group = Group(Rank(), torch.device("cpu"))
    assert group.total([1.0, 2.5]) == [1.0, 2.5]
    assert group.gather("x") == ["x"]
    assert group.share(7) == 7


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL timeout"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("gloo"), False),
    ],
)
def test_a_lost_neighbour_is_told_from_a_bug(error: Exception, lost: bool) -> None:
    assert lost_contact(error) is lost
