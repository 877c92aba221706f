"""Training that no `pipe` leads: its first pod makes the run, walks what comes before, and keeps the books."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k8s.manifest import Object
from pipeline.spec.config import Config, override_config
from pipeline.spec.digest import digest_bytes

CONFIG = "PIPE_CONFIG"  # of what the run is made


def config_text(config: Config) -> str:
    """The configuration with all overrides, the same text every time."""
    values: Mapping[str, Any] = config.model_dump(mode="json")
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def run_name(config: Config, image: str) -> str:
    """Another one for whatever would train something else: the pods of a Job cannot be changed."""
    return f"train-{digest_bytes(f'{image} {config_text(config)}'.encode())[:12]}"


def lead_itself(trainer: Object, config: Config, run_dir: str, processes: int, meeting: str) -> None:
    """The trainer's container as it stands in the manifest; where its pods meet is told by the run itself."""
    words = [f"train.processes={processes}", f"train.rendezvous={meeting}", "jobs.executor=local"]
    trainer["command"] = ["python", "-m", "pipeline.pod"]
    trainer["args"] = ["train", run_dir, "--begin", "--", "python", "-m", "pipeline.node", run_dir]
    trainer["env"].append({"name": CONFIG, "value": config_text(override_config(config, words))})
