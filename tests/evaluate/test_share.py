from __future__ import annotations

import pytest

from evaluate.share import device_of, share_of
from pipeline.spec.errors import ConfigError
from pipeline.spec.rank import Rank


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 360])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_hold_every_sample_exactly_once_and_in_order(samples: int, world_size: int) -> None:
    shares = [share_of(Rank(rank, rank, world_size), samples, batch_size=4) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(samples))


def test_a_share_starts_where_a_batch_starts_so_that_batches_do_not_depend_on_the_world_size() -> None:
    for world_size in range(1, 6):
        starts = [share_of(Rank(rank, rank, world_size), 30, batch_size=8).start for rank in range(world_size)]
        assert all(start % 8 == 0 or start == 30 for start in starts)


def test_a_wanted_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert device_of("auto", Rank()).type == "cpu"
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        device_of("cuda", Rank())


def test_several_processes_take_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [device_of("auto", Rank(i, i, 3)).index for i in range(3)] == [0, 1, 0]
    assert device_of("cpu", Rank()).type == "cpu"
