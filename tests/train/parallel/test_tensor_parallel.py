"""Layers are split over processes without code of the user, and refused if that would change their results."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from pipeline.system.errors import ConfigError
from train.optim import seed_torch
from train.parallel.blocks import recompute_blocks
from train.parallel.pipeline_split import TemporaryWeights
from train.parallel.tensor_parallel import find_pairs, split_layers
from train.process_group import ProcessGroup
from train.state import local_shard

from ..conftest import Project, equal, weights
from ..distributed import run_distributed
from .conftest import assert_close, resumed, script, trained
from .transformer import Attention, Block, Llama, Tiny


def linear(**shapes: tuple[int, int]) -> nn.Module:
    module = nn.Module()
    for name, (inputs, outputs) in shapes.items():
        module.add_module(name, nn.Linear(inputs, outputs))
    return module


def test_attention_and_mlp_are_found_by_their_names() -> None:
    pairs = find_pairs(Llama(), 2)
    assert [pair.owner for pair in pairs] == [f"layers.{i}.{part}" for i in range(3) for part in ("attention", "mlp")]
    assert pairs[0].columns == tuple(f"layers.0.attention.{name}_proj" for name in "qkv")
    assert pairs[1].row == "layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("layers", "columns", "row"),
    [
        ({"wq": (8, 8), "wk": (8, 4), "wv": (8, 4), "wo": (8, 8)}, {"wq", "wk", "wv"}, "wo"),
        ({"query": (8, 8), "key": (8, 8), "value": (8, 8), "dense": (8, 8)}, {"query", "key", "value"}, "dense"),
        ({"w1": (8, 6), "w2": (6, 8), "w3": (8, 6)}, {"w1", "w3"}, "w2"),
        ({"c_fc": (8, 32), "c_proj": (32, 8)}, {"c_fc"}, "c_proj"),
        ({"linear1": (8, 32), "linear2": (32, 8)}, {"linear1"}, "linear2"),
    ],
)
def test_names_of_other_models_are_known(layers: dict[str, tuple[int, int]], columns: set[str], row: str) -> None:
    (pair,) = find_pairs(linear(**layers), 2)
    assert (set(pair.columns), pair.row) == (columns, row)


def test_sequence_of_linear_layers_is_split_in_pairs() -> None:
    row = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Tanh())))
    assert [(pair.columns, pair.row) for pair in find_pairs(row, 2)] == [(("0",), "2"), (("4",), "6")]


def test_norm_between_linear_layers_prevents_splitting() -> None:
    """It would normalize only a part of the channels."""
    with pytest.raises(ConfigError, match="no pair of linear layers"):
        find_pairs(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), 2)


def single_kv_head() -> nn.Module:
    attention = Attention()
    attention.n_kv_heads = 1
    return attention


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.TransformerEncoderLayer(8, 2), "self_attn cannot be split: nn.MultiheadAttention"),
        (linear(c_attn=(8, 24), c_proj=(8, 8)), "c_attn cannot be split: it has several matrices in one"),
        (
            nn.ModuleDict({"mine": single_kv_head()}),
            "mine cannot be split: 2 processes cannot share its 1 heads (n_kv_heads)",
        ),
        (linear(fc1=(8, 7), fc2=(7, 8)), "fc1 cannot be split: 2 processes cannot share its 7 outputs"),
        (nn.Conv1d(3, 4, 5), "no pair of linear layers"),
    ],
)
def test_error_names_the_layer_that_cannot_be_split(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message) + r".*write parallelize\(model, mesh\) in the task"):
        find_pairs(model, 2)


def latent(heads: int) -> nn.Module:
    module = linear(
        q_a_proj=(8, 6),
        q_b_proj=(6, heads * 5),
        kv_a_proj_with_mqa=(8, 6),
        kv_b_proj=(4, heads * 6),
        o_proj=(heads * 3, 8),
    )
    module.kv_lora_rank, module.num_heads = 4, heads  # type: ignore[assignment]
    return nn.ModuleDict({"mine": module})


def test_latent_attention_is_split_by_heads() -> None:
    (pair,) = find_pairs(latent(4), 2)
    assert (pair.columns, pair.row) == (("mine.q_b_proj", "mine.kv_b_proj"), "mine.o_proj")
    with pytest.raises(ConfigError, match=re.escape("mine cannot be split: 2 processes cannot share its 3 heads")):
        find_pairs(latent(3), 2)


def test_heads_are_counted_by_head_dim_if_their_number_is_unknown() -> None:
    """As in transformers' Llama and Qwen2, with fewer heads for keys and values."""
    module = linear(q_proj=(8, 16), k_proj=(8, 4), v_proj=(8, 4), o_proj=(16, 8))
    module.head_dim = 4  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="k_proj cannot be split: 2 processes cannot share its 1 heads"):
        find_pairs(module, 2)


SPLITS = '''
import os, sys
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from pipeline.system.errors import ConfigError
from task import Attention, Tiny
from train.parallel.pipeline_split import TemporaryWeights
from train.parallel.tensor_parallel import split_layers

class FixedWidth(Attention):
    def forward(self, x):
        return self.o_proj(self.q_proj(x).reshape(*x.shape[:2], 16))

class FixedHeads(Attention):
    """Runs with half of the channels, and then works on heads of half the size."""
    def forward(self, x):
        q = self.q_proj(x).view(*x.shape[:2], 4, -1)
        return self.o_proj(torch.softmax(q, dim=-1).flatten(2))

class NormOfHeads(Attention):
    """Each process sees the gradient of its heads only."""
    def __init__(self):
        super().__init__()
        self.q_norm = nn.RMSNorm(4)
    def forward(self, x):
        return self.o_proj(self.q_norm(self.q_proj(x).unflatten(2, (-1, 4))).flatten(2))

torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
for kind in (Attention, FixedWidth, FixedHeads, NormOfHeads):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mine": kind()})
    x = torch.randn(2, 6, 16)
    try:
        split_layers(model, Tiny(), mesh, lambda: model["mine"](x), TemporaryWeights(None, x.device))
        result = "split"
    except ConfigError as error:
        result = str(error)
    if mesh.get_rank() == 0:
        print(kind.__name__, result)
sys.stdout.flush()
os._exit(0)
'''


def test_split_that_changes_a_gradient_is_refused(transformer: Project) -> None:
    results = dict(line.split(" ", 1) for line in script(transformer, SPLITS, processes=2).splitlines())
    assert results["Attention"] == "split"
    assert "mine cannot be split: it does not run with a part of its heads" in results["FixedWidth"]
    assert "mine cannot be split: the gradient of its " in results["FixedHeads"]
    assert "mine cannot be split: the gradient of its q_norm.weight" in results["NormOfHeads"]


CHECKPOINTS = {"epochs": 1, "checkpoint_every": 2, "keep_checkpoints": 9}


@pytest.mark.long  # test_together.py has the same for known families
def test_split_transformer_trains_the_weights_of_one_process(transformer: Project) -> None:
    """With DDP it resumes from the checkpoint of one process, whose optimizer has other parameter groups."""
    settings = {"accumulate": 2, **CHECKPOINTS}
    one = trained(transformer, "one", 1, **settings)
    assert_close(resumed(transformer, one, "ddp", 2, 4, tensor_parallel=2, **settings), one)
    assert_close(trained(transformer, "fsdp", 4, tensor_parallel=2, strategy="fsdp", **settings), one)


@pytest.mark.long
def test_interrupted_run_resumes_bit_for_bit(transformer: Project) -> None:
    transformer.replace("nn.Dropout(0.0)", "nn.Dropout(0.1)")
    whole = trained(transformer, "whole", 2, tensor_parallel=2, **CHECKPOINTS)
    assert equal(
        weights(resumed(transformer, whole, "resumed", 2, 2, tensor_parallel=2, **CHECKPOINTS)), weights(whole)
    )


PARALLELIZE = """
    def parallelize(self, model, mesh):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        assert mesh.mesh_dim_names == ("tensor",)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def model("""


def test_parallelize_of_the_task_is_used(project: Project) -> None:
    project.replace("nn.Linear(3, 8), nn.Tanh()", "nn.Linear(3, 8), nn.Hardtanh()")  # not split without parallelize()
    one = trained(project, "one", 1, epochs=1)
    project.replace("\n    def model(", PARALLELIZE)
    assert_close(trained(project, "two", 2, tensor_parallel=2, epochs=1), one)


class Positions(Block):
    """Each process takes its part for the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(6, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.place[: x.shape[1]])


class Mean(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


class Mask(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.ones(1, 6, 1))


class OnceMore(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(super().forward(x).repeat(1, 2, 1))
        return out[:, ::2]


class ScaledBetween(Llama):
    """Has a weight outside the blocks that meets parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens)) * self.scale
        logits: Tensor = self.head(self.norm(self.layers[2](self.layers[1](x))))
        return logits


class OwnSplit(Tiny):
    def parallelize(self, model: nn.Module, mesh: object) -> None:
        pass


def llama(block: type[Block]) -> Llama:
    model = Llama()
    model.layers = nn.ModuleList(block() for _ in range(2))
    return model


def reason_of_refusal(group: ProcessGroup) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("tensor",))
    flat = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    models: dict[str, nn.Module] = {block.__name__: llama(block) for block in (Block, Positions, Mean, Mask, OnceMore)}
    models |= {"ScaledBetween": ScaledBetween(), "OwnSplit": Llama(), "flat": flat}
    reasons = {}
    for name, model in models.items():
        tokens, task = torch.arange(12).view(2, 6) % 11, cast("Task", OwnSplit() if name == "OwnSplit" else Tiny())
        inputs = tokens.float() if name == "flat" else tokens
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        try:
            split_layers(model, task, mesh, partial(model, inputs), TemporaryWeights(None, group.device), True)
            reasons[name] = ""
        except ConfigError as error:
            reasons[name] = str(error)
    return reasons


def test_models_that_cannot_have_parts_of_the_sequence_are_refused() -> None:
    for reasons in run_distributed(reason_of_refusal, 2):
        assert reasons.pop("Block") == ""
        assert all(reason.startswith("train.sequence_parallel: ") for reason in reasons.values()), reasons
        expected = {
            "Positions": "output 0 cannot have parts of the sequence",
            "Mean": "output 0 cannot have parts of the sequence",
            "Mask": "layers.0 cannot have parts of the sequence: the model does not run",
            "OnceMore": "layers.0.attention cannot have parts of the sequence: it gets [2, 6, 16] and not 3",
            "ScaledBetween": "scale cannot have parts of the sequence: it or its gradient differs",
            "OwnSplit": "the task's parallelize()",
            "flat": "no repeated blocks with split layers",
        }
        assert {name: text for name, text in expected.items() if text not in reasons[name]} == {}, reasons
    with pytest.raises(ValueError, match="sequence_parallel=true does not go with tensor_parallel=1"):
        Train(sequence_parallel=True)


class Observed:
    """A model with dropout, and what it does in two passes."""

    def __init__(self, mesh: DeviceMesh, recompute: bool, by_sequence: bool) -> None:
        torch.manual_seed(0)
        tokens, model = torch.arange(256).view(64, 4) % 11, llama(Block)
        if recompute:
            recompute_blocks(model)
        task: Any = Tiny()
        split_layers(model, task, mesh, lambda: model(tokens[:2]), TemporaryWeights(None, tokens.device), by_sequence)
        masks: list[Tensor] = []
        seeds: list[int] = []
        for block in model.layers:
            block.drop.p = 0.5  # type: ignore[union-attr]
            block.drop.register_forward_hook(lambda _, __, output: masks.append(output != 0))  # type: ignore[union-attr]
            block.attention.q_proj.register_forward_hook(  # type: ignore[union-attr]
                lambda *_: seeds.append(torch.initial_seed())
            )
        gradients = []
        for _ in range(2):
            seed_torch(5)
            self.kept: dict[int, int] = {}  # bytes for the backward pass, by address
            with saved_tensors_hooks(self._count, lambda tensor: tensor):
                loss = model(tokens).square().mean()
            loss.backward()
            gradients.append(model.layers[0].norm_1.weight.grad.clone())  # type: ignore[union-attr,operator]
            model.zero_grad()
        self.mask, self.attention_seeds, self.repeats = masks[0], seeds[:2], torch.equal(*gradients)

    def _count(self, tensor: Tensor) -> Tensor:
        storage = local_shard(tensor.detach()).untyped_storage()
        self.kept[storage.data_ptr()] = storage.nbytes()
        return tensor


def observe(group: ProcessGroup, recompute: bool) -> tuple[Observed, Observed]:
    mesh = init_device_mesh("cpu", (group.size,), mesh_dim_names=("tensor",))
    return Observed(mesh, recompute, by_sequence=False), Observed(mesh, recompute, by_sequence=True)


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_of_the_sequence_have_their_own_dropout_and_less_memory(recompute: bool) -> None:
    (whole, first), (other_whole, second) = run_distributed(observe, 2, recompute)
    assert torch.equal(whole.mask, other_whole.mask)
    assert first.mask.shape == second.mask.shape == (64, 2, 16)
    assert 0.45 < (first.mask == second.mask).float().mean() < 0.55
    assert first.repeats and second.repeats
    assert first.attention_seeds == second.attention_seeds and len({*first.attention_seeds}) == 2
    if not recompute:
        assert sum(first.kept.values()) < 0.85 * sum(whole.kept.values()), "the pairs gather their inputs"
