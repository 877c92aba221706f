"""The train step where `train.epochs` is 0: check the pretrained weights, and write them as the trained ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.contract.run import Run
from pipeline.contract.task import build_model, open_task
from pipeline.system.processes import Rank
from train.pretrained.load import open_recorded_weights
from train.process_group import ProcessGroup

_CPU = torch.device("cpu")


def take_weights(run: Run, root: Path) -> None:
    task = open_task(run, root)
    with open_recorded_weights(run, root, lambda: build_model(task, run), ProcessGroup(Rank(), _CPU), False) as create:
        model, materializer = create()
        assert materializer is not None  # the weights come from files
        materializer.materialize(model, _CPU)
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}  # tied ones twice
    path = run.partial("train") / "model.safetensors"
    save_file(weights, path, {"step": "0"})
    path.chmod(0o644)  # the next step may run as another user
    print(f"weights as given: {len(weights)} tensors, {sum(weight.numel() for weight in weights.values()):,} numbers")
