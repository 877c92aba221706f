"""Prepare a project for an existing training script: `pipe init --from train.py`.

The script is read by its syntax tree and never run. The new files import its model, data set and loss, and list what
is not carried over; what is left to write raises NotImplementedError with a sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.system.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """A part of the script: its line, and its code on one line."""

    line: int
    code: str


@dataclass(frozen=True)
class Script:
    """What a training script defines, and what it does besides."""

    name: str
    models: tuple[str, ...]
    data: tuple[str, ...]
    losses: tuple[str, ...]
    arguments: tuple[str, ...]  # of the first model's forward()
    build: str  # expression that builds the first model, if it needs nothing but constants
    left: tuple[Piece, ...]  # what is not carried over
    unsafe: Piece | None  # statement that does work when the script is imported

    @property
    def imported(self) -> list[str]:
        return [] if self.unsafe else sorted({*self.models, *self.data, *self.losses})


_MODEL, _DATA = re.compile(r"Module$|Model$"), re.compile(r"Dataset$|DataModule$")
_LOSS = re.compile(r"loss|criterion", re.IGNORECASE)
# Calls and names whose statements are listed: what pipe does by its own settings, and what scores or converts data.
_LISTED = re.compile(
    r"optim|sgd|adam|sched|backward|loader|transform|compose|tokenizer|processor|trainer|arguments|add_argument|seed|"
    r"clip_|autocast|scaler|compile|parallel|data|_set|loss|entropy|correct|accura|metric|score|log_dict|f1|auc",
    re.IGNORECASE,
)
_HARMLESS = {"getLogger", "device", "is_available", "Path", "frozenset", "set", "tuple", "dict", "list", "range"}
_WIDTH = 80  # of the code in a comment


def read_script(path: Path) -> Script:
    """Find what a training script defines and does."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except FileNotFoundError:
        raise ConfigError(f"--from {path}: no such file") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from {path}: cannot be read as Python: {error}") from error
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    losses = [node for node in definitions if _LOSS.search(node.name)]
    classes = [node for node in definitions if isinstance(node, ast.ClassDef) and node not in losses]
    data = [node for node in classes if _has_base(node, _DATA)]
    models = [node for node in classes if _has_base(node, _MODEL) and node not in data]
    if not models and not any(re.search("backward$|Trainer$", _called(call)) for call in _calls(tree)):
        raise ConfigError(
            f"{path.name}: defines no nn.Module and trains nothing; to fix it, name the script that trains, or start "
            "with `pipe init` without --from"
        )
    carried = [node for definition in (*models, *data, *losses) for node in ast.walk(definition)]
    left = [node for node in ast.walk(tree) if node not in carried and _is_listed(node)]
    unsafe = next((node for node in tree.body if not _is_safe(node)), None)
    return Script(
        path.name,
        tuple(node.name for node in models),
        tuple(node.name for node in data),
        tuple(node.name for node in losses),
        _forward_arguments(models[0]) if models else (),
        "" if unsafe or not models else _build(tree, models[0].name),
        tuple(sorted((_piece(node, text) for node in left), key=lambda piece: piece.line)),
        None if unsafe is None else _piece(unsafe, text),
    )


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    """Return the dotted name of what is called, as `torch.optim.SGD`; only the last name of other expressions."""
    name = ast.unparse(call.func)
    return name if re.fullmatch(r"[\w.]+", name) else name.rpartition(".")[2]


def _has_base(node: ast.ClassDef, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(ast.unparse(base)) for base in node.bases)


def _is_listed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return) or not node.value:
        return False
    targets = [] if isinstance(node, ast.Expr | ast.Return) else getattr(node, "targets", [getattr(node, "target", 0)])
    names = [*map(_called, _calls(node.value)), *map(ast.unparse, targets)]
    return not isinstance(node.value, ast.Constant) and any(map(_LISTED.search, names))


def _forward_arguments(node: ast.ClassDef) -> tuple[str, ...]:
    forward = (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward")
    return next((tuple(argument.arg for argument in item.args.args[1:]) for item in forward), ())


def _build(tree: ast.Module, model: str) -> str:
    for call in _calls(tree):
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if _called(call) == model and all(isinstance(value, ast.Constant) for value in values):
            return ast.unparse(call)
    return ""


def _piece(node: ast.stmt | ast.AST, text: str) -> Piece:
    assert isinstance(node, ast.stmt)
    code = " ".join((ast.get_source_segment(text, node) or "").split())
    return Piece(node.lineno, code if len(code) <= _WIDTH else f"{code[:_WIDTH]}…")


def _is_safe(node: ast.stmt) -> bool:
    """Return whether a statement of a module defines something and does no work, also below a main guard."""
    match node:
        case ast.If() if "__name__" in ast.unparse(node.test):
            return True
        case ast.If():
            return _is_harmless(node.test) and all(map(_is_safe, [*node.body, *node.orelse]))
        case ast.Try():
            handlers = [part for handler in node.handlers for part in handler.body]
            return all(map(_is_safe, [*node.body, *handlers, *node.orelse, *node.finalbody]))
        case ast.Assign() | ast.AnnAssign():
            return _is_harmless(node)
        case ast.Expr():
            return isinstance(node.value, ast.Constant)
    definitions = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass
    return isinstance(node, definitions)


def _is_harmless(node: ast.AST) -> bool:
    return all(_called(call).rpartition(".")[2] in _HARMLESS for call in _calls(node))


def task_source(script: Script) -> str:
    """Return task.py for a script."""
    name, inputs = script.name, script.arguments or ("features",)
    output = "prediction" if "prediction" not in inputs else "output"
    columns = ", ".join(f'"{column}": ...' for column in inputs)
    head = [f'"""The task, prepared from {name}: complete what raises NotImplementedError.', ""]
    if script.left:
        head += [f"Not carried over from {name}; what of it matters belongs here, in codec.py or in pipe.yaml:", ""]
        head += [f"- line {piece.line}: {piece.code}".replace("\\", "/").replace('"""', "'''") for piece in script.left]
    head += ['"""', "", "from __future__ import annotations", "", "from typing import Any", ""]
    head += ["from torch import Tensor, nn", ""]
    if script.unsafe is not None:
        head += [
            f"# {name} cannot be imported, because line {script.unsafe.line} would run: {script.unsafe.code}",
            '# Move what trains below `if __name__ == "__main__":` and import the classes here, or copy them.',
        ]
    elif script.imported:
        head += [f"from {Path(name).stem} import {', '.join(script.imported)}"]
    model = (
        f"return {script.build}  # without .to(device): pipe moves it"
        if script.build
        else _missing(f"return {script.models[0] if script.models else 'the model'}(...), without .to(device)")
    )
    data = f"{' or '.join(script.data)}(...), whose samples are mappings of " if script.data else "the columns "
    loss = f"{script.losses[0]}(...)" if script.losses else 'functional.cross_entropy(outputs, batch["label"])'
    return (
        "\n".join(head)
        + f'''


class Task:
    inputs = ({", ".join(f'"{column}"' for column in inputs)},)  # columns that the model takes, as forward() does
    outputs = ("{output}",)  # names for what it returns

    def model(self) -> nn.Module:
        {model}

    def data(self, split: str) -> Any:
        """Return the samples of "train", "validation" or "test"; the same each time."""
        {_missing(f'return {data}{{{columns}, "label": ...}}')}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean over the batch; `outputs` is the `{output}` of the model."""
        {_missing(f"return the loss, such as {loss}")}

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return one value per sample, not per batch; higher is better, or name it in `directions`."""
        {_missing('return {"accuracy": (outputs.argmax(dim=1) == batch["label"]).float()} or your own')}
'''
    )


def _missing(sentence: str) -> str:
    return f"raise NotImplementedError(\n            {sentence!r}\n        )"


def codec_source(script: Script) -> str:
    """Return codec.py for a script."""
    inputs = script.arguments or ("features",)
    output = "prediction" if "prediction" not in inputs else "output"
    columns = ", ".join(f'"{column}": ...' for column in inputs)
    return f'''# What clients send → arrays for the model → what they get back. Without torch; use it in data() too.

from __future__ import annotations

from typing import Any

import numpy as np


class Codec:
    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return an array for each input of the task; raise pipeline.InvalidPayload to reject a request."""
        {_missing(f"return arrays {{{columns}}} for the instances of a request, prepared as in training")}

    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        """Return one JSON value for each instance."""
        return [row.tolist() for row in outputs["{output}"]]
'''


def settings_source(script: Script, name: str) -> str:
    """Return pipe.yaml for a script."""
    return f"""# Prepared from {script.name}; `pipe explain` describes every setting.
name: {name}
task: task.py:Task
codec: codec.py:Codec

evaluate:
  metric: accuracy  # a name from metrics()
"""
