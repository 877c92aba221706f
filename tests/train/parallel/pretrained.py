"""An official checkpoint whose experts are cut before they are read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.contract.pretrained import open_pretrained
from train.optim import seed_step
from train.pretrained.load import PretrainedModel, load_from_files
from train.process_group import ProcessGroup
from train.state import Progress, local_shard
from train.trainer import Trainer

from ..distributed import trainer
from .mixture import SETTINGS, Language, single, store


class PretrainedRun(NamedTuple):
    initial: dict[str, Tensor]  # whole, before training
    trained: dict[str, Tensor]
    bytes_read: int  # from the files
    parameter_bytes: int  # in this process's memory


def train_pretrained(group: ProcessGroup, folder: Path) -> list[PretrainedRun]:
    """Train pretrained weights in one process, with split experts, and with everything sharded."""
    from ..pretrained.official import write_official

    if group.rank.first:
        write_official(folder / "official", "deepseek_v3")
    dist.barrier()
    ways: list[dict[str, object]] = [{}, {"expert_parallel": 2}, {"expert_parallel": 2, "strategy": "fsdp"}]
    return [_begin(group if settings else single(), folder, settings) for settings in ways]


def _begin(group: ProcessGroup, folder: Path, settings: dict[str, object]) -> PretrainedRun:
    built: list[PretrainedModel] = []
    official = open_pretrained(folder / "official")

    def build() -> PretrainedModel:
        built.append(load_from_files(partial(_build, folder / "official"), official, (), partial(seed_step, 0, -1, 0)))
        return built[0]

    made = trainer(group, Language(""), build=build, **{**SETTINGS, **settings})
    initial, bytes_read = _whole(made), built[0].materializer.read.bytes
    parameter_bytes = sum(local_shard(p).numel() * p.element_size() for p in made.strategy.model.parameters())
    # The single process of each rank has its own folder.
    place = folder / "-".join(["checkpoints", *settings, *([] if settings else [str(dist.get_rank())])])
    made.fit(Progress(), store(place, group), None)
    return PretrainedRun(initial, _whole(made), bytes_read, parameter_bytes)


def _build(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, use_cache=False))
    return model


def _whole(trained: Trainer) -> dict[str, Tensor]:
    state = trained.strategy.model.state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}
