"""The trained weights as transformers writes them: safetensors with official names, config.json and the tokenizer.

`AutoModel.from_pretrained` and `model.pretrained` read the folder. What is around a transformer in the task's model,
such as a head of the task, has no official names and is left out.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn

from pipeline.contract.pretrained import SMALL_FILES
from pipeline.contract.task import transformers_model
from pipeline.system.files import write_json

_SHARD_SIZE = "5GB"
_CONFIG = "config.json"


def write_official_weights(model: nn.Module, files: Path, folder: Path) -> str:
    """Write the transformer in a model; return a line for the log, empty if there is no transformer.

    A transformer that the task has changed, so that it is no longer the one of its configuration, is not written: the
    bundle does not need it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    located = transformers_model(model)
    if located is None:
        return ""
    transformer: Any = located[1]
    if _has_adapters(transformer):
        return f"warning: {folder.name} not written: the task adds adapters by itself; use model.adapter instead"
    try:
        transformer.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    except (RuntimeError, ValueError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"warning: {folder.name} not written: {' '.join(str(error).split())[:300]}"
    for pattern in SMALL_FILES:
        for path in files.glob(pattern):
            target = folder / path.relative_to(files)
            if target != folder / _CONFIG:  # the model's own is there
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    config = json.loads((folder / _CONFIG).read_text())
    if config.pop("quantization_config", None):  # of the pretrained files; these weights are not quantized
        write_json(folder / _CONFIG, config)
    return f"{folder.name}: the transformer's weights, as transformers reads them"


def _has_adapters(transformer: nn.Module) -> bool:
    """Return whether the task itself has put adapters of peft into the transformer."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in transformer.modules())
