from __future__ import annotations

from pipeline.spec.config import Config, override_config
from pipeline.spec.sections import Train
from pipeline.steps import argv_of, processes_per_node

TORCHRUN = ("python", "-m", "torch.distributed.run")


def test_a_plain_step_is_one_python_process(config: Config) -> None:
    assert argv_of("prepare", config, "runs/one") == ("python", "-m", "pipeline.prepare", "runs/one")
    assert argv_of("evaluate", config, "runs/one") == ("python", "-m", "evaluate", "runs/one")


def test_training_is_started_by_what_watches_over_it_whatever_the_launcher(config: Config) -> None:
    for words in (["train.processes=1"], ["train.launcher=mpirun"], ["train.nodes=2:3", "train.rendezvous='a:1'"]):
        argv = argv_of("train", override_config(config, words), "runs/one")
        assert argv == ("python", "-m", "pipeline.node", "runs/one")


def test_several_machines_that_train_evaluate_on_one(config: Config) -> None:
    many = override_config(config, ["train.nodes=3", "train.rendezvous='head:29500'", "evaluate.processes=2"])
    argv = argv_of("evaluate", many, "runs/one")
    assert argv == (*TORCHRUN, "--standalone", "--nnodes=1", "--nproc-per-node=2", "-m", "evaluate", "runs/one")


def test_processes_are_one_a_gpu_or_two_on_a_cpu_unless_configured() -> None:
    assert processes_per_node(Train(), gpus=0) == 2
    assert processes_per_node(Train(), gpus=4) == 4
    assert processes_per_node(Train(device="cpu"), gpus=4) == 2
    assert processes_per_node(Train(processes=3), gpus=4) == 3
