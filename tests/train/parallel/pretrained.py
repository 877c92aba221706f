"""An official checkpoint whose experts are cut before they are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.pretrained import open_pretrained
from train.optim import seed_step
from train.parallel.gradients import local
from train.pretrained.load import Beginning, from_files
from train.process_group import Group
from train.state import Progress
from train.trainer import Trainer

from .mixture import WORDS, Words, single, store


class Begun(NamedTuple):
    began: dict[str, Tensor]  # whole, as at the beginning
    trained: dict[str, Tensor]
    asked: int  # bytes of the files
    kept: int  # of parameters in this process's memory


def begun_in_parts(group: Group, folder: Path) -> list[Begun]:
    """By one process, with experts in two places, and with everything cut in two."""
    from ..pretrained.official import write_official

    if group.rank.first:
        write_official(folder / "official", "deepseek_v3")
    dist.barrier()
    ways: list[dict[str, object]] = [{}, {"expert": 2}, {"expert": 2, "parallel": "fsdp"}]
    return [_begin(group if words else single(), folder, words) for words in ways]


def _begin(group: Group, folder: Path, words: dict[str, object]) -> Begun:
    made: list[Beginning] = []
    official = open_pretrained(folder / "official")

    def begin() -> Beginning:
        made.append(from_files(partial(_build, folder / "official"), official, (), partial(seed_step, 0, -1, 0)))
        return made[0]

    task = Words("")
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": {**WORDS, "device": "cpu", **words}}
    splits = [Samples(name, task.data(name)) for name in ("train", "validation")]
    config = parse_config(values, source="test")
    trainer = Trainer(task, config, group, splits[0], splits[1], 7, begin)  # type: ignore[arg-type]
    began, asked = _whole(trainer), made[0].filling.bytes_read
    kept = sum(local(p).numel() * p.element_size() for p in trainer.strategy.model.parameters())
    # A folder of its own for the single process of each rank.
    place = folder / "-".join(["checkpoints", *words, *([] if words else [str(dist.get_rank())])])
    trainer.fit(Progress(), store(place, group), None)
    return Begun(began, _whole(trainer), asked, kept)


def _build(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, use_cache=False))
    return model


def _whole(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.strategy.model.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}
