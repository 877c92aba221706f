"""Optional dependencies: which extra of the package installs a module that is missing."""

from __future__ import annotations

import re

from pipeline.contract.errors import ConfigError

EXTRAS = {  # extra: the modules it installs, by the names they are imported by
    "train": ("onnx", "onnxscript", "safetensors", "tensorboard", "torch"),
    "serve": ("msgspec", "onnxruntime", "simdjson", "tokenizers"),
    "cluster": ("kubernetes", "urllib3"),
    "deepseek": ("peft", "transformers"),
    "examples": ("sklearn",),
    "registry": ("fsspec", "s3fs"),
    "savedmodel": ("ai_edge_litert", "onnx2tf", "onnx_graphsurgeon", "sng4onnx", "tensorflow", "tf_keras"),
    "sign": ("cryptography",),
    "tune": ("optuna",),
}
_EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}
_IMPORT_FAILED = re.compile(r"^(?:\[rank\d+\]: )?ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)


def missing_extra(error: BaseException) -> ConfigError | None:
    """Return the error for a module that an extra installs; None for any other error, a module of the user's included.

    The cause counts too: libraries such as fsspec raise an ImportError of their own from it.
    """
    while error.__cause__ is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return _missing_module(error.name or "") if isinstance(error, ModuleNotFoundError) else None


def missing_extra_in_log(log: str) -> ConfigError | None:
    """Return the error for a process that ended while it imported its modules, before it could report anything."""
    names = _IMPORT_FAILED.findall(log)
    return _missing_module(names[-1]) if names else None


def _missing_module(name: str) -> ConfigError | None:
    module = name.partition(".")[0]
    extra = _EXTRA_OF.get(module)
    if extra is None:
        return None
    return ConfigError(f"the module `{module}` is not installed; to fix it: pip install 'pipe-road[{extra}]'")
