from __future__ import annotations

from pipeline.spec.config import Config, override_config
from pipeline.steps import argv_of, processes_per_node

TORCHRUN = ("python", "-m", "torch.distributed.run")


def test_a_plain_step_is_one_python_process(config: Config) -> None:
    assert argv_of("prepare", config, "runs/one", gpus=0) == ("python", "-m", "pipeline.prepare", "runs/one")
    assert argv_of("evaluate", config, "runs/one", gpus=8) == ("python", "-m", "evaluate", "runs/one")


def test_training_goes_through_torchrun_even_alone(config: Config) -> None:
    alone = override_config(config, ["train.processes=1"])
    assert argv_of("train", alone, "runs/one", gpus=0) == (
        *TORCHRUN, "--standalone", "--nnodes=1", "--nproc-per-node=1", "-m", "train", "runs/one",
    )  # fmt: skip


def test_several_machines_meet_where_they_are_told(config: Config) -> None:
    many = override_config(config, ["train.nodes=3", "train.rendezvous='head:29500'", "train.processes=8"])
    argv = argv_of("train", many, "runs/one", gpus=0)
    assert argv[3:8] == (
        "--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=head:29500", "--rdzv-conf=join_timeout=300",
        "--nproc-per-node=8",
    )  # fmt: skip


def test_several_machines_that_train_evaluate_on_one(config: Config) -> None:
    many = override_config(config, ["train.nodes=3", "train.rendezvous='head:29500'", "evaluate.processes=2"])
    argv = argv_of("evaluate", many, "runs/one", gpus=0)
    assert argv == (*TORCHRUN, "--standalone", "--nnodes=1", "--nproc-per-node=2", "-m", "evaluate", "runs/one")


def test_processes_are_one_a_gpu_or_two_on_a_cpu_unless_configured(config: Config) -> None:
    assert processes_per_node(config, gpus=0) == 2
    assert processes_per_node(config, gpus=4) == 4
    assert processes_per_node(override_config(config, ["train.device=cpu"]), gpus=4) == 2
    assert processes_per_node(override_config(config, ["train.processes=3"]), gpus=4) == 3
