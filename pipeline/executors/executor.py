"""Where a step runs: as a process on this machine, or as a Job on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.config import Config
from pipeline.display import Display
from pipeline.executors.local import LocalExecutor
from pipeline.plan import CLUSTER_STEPS
from pipeline.system.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.executors.cluster import ClusterExecutor


def choose_executor(
    step: str, config: Config, root: Path, cores: int, server: Mapping[str, str], display: Display
) -> LocalExecutor | ClusterExecutor:
    if not runs_on_cluster(step, config):
        return LocalExecutor(root, cores, server)
    from pipeline.executors.cluster import ClusterExecutor  # the manifests are slow to load

    return ClusterExecutor(root, display.report, display.ask)


def runs_on_cluster(step: str, config: Config) -> bool:
    return config.cluster.executor == "kubernetes" and step in CLUSTER_STEPS


def check_config(config: Config) -> None:
    """Raise mistakes that concern more than one section."""
    if config.cluster.executor == "kubernetes":
        from pipeline.executors.cluster import check_jobs  # the manifests are slow to load

        check_jobs(config)
    if needs_other_machines(config) and not config.train.rendezvous:
        raise ConfigError(
            f"train.nodes={config.train.nodes} needs train.rendezvous=HOST:PORT, an address all nodes can connect to; "
            "on a cluster, `pipe run train --render DIR` writes the Job"
        )


def needs_other_machines(config: Config) -> bool:
    """Return True where other machines must join by `pipe join`; on a cluster their pods do it."""
    several = config.train.launcher == "torchrun" and config.train.most_nodes > 1
    return several and not runs_on_cluster("train", config)
