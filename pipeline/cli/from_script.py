"""Prepare a project for an existing training script: `pipe init --from train.py`.

The script is read by its syntax tree and never run. Its model, data, loss, metrics and settings are named in the new
files where they belong; what is left to write raises NotImplementedError with a sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pipeline.contract.errors import ConfigError

LOOP, LIGHTNING, TRAINER = "a plain training loop", "a LightningModule", "a Trainer of Hugging Face"


Assignment: TypeAlias = ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Piece:
    """A part of the script: its line, and its code on one line."""

    line: int
    code: str


@dataclass
class Script:
    """What a training script contains, by the part of a project that it belongs to."""

    name: str
    kind: str
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    model: str = ""  # expression that builds the model from the script's classes, if it needs nothing else
    classes: list[str] = field(default_factory=list)  # modules and data sets that can be imported
    arguments: list[str] = field(default_factory=list)  # of the model's forward()
    label: str = "label"  # column that only the loss needs
    settings: dict[str, tuple[object, str]] = field(default_factory=dict)  # of the section train, and their places
    unsafe: Piece | None = None  # statement that runs when the script is imported


def read_script(path: Path) -> Script:
    """Find the pieces of a training script."""
    if not path.is_file():
        raise ConfigError(f"--from {path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from {path}: cannot be read as Python: {error}") from error
    return _Reader(path.name, text, tree).read()


class _Reader:
    def __init__(self, name: str, text: str, tree: ast.Module) -> None:
        self._name, self._text, self._tree = name, text, tree
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self._classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self._functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._values: dict[str, Assignment] = {}  # the first assignment to each name, other than a constant
        self._constants: dict[str, ast.Constant] = {}  # the first constant assigned to each name
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for name in _targets(node):
                    if isinstance(node.value, ast.Constant):
                        self._constants.setdefault(name, node.value)
                    else:
                        self._values.setdefault(name, node)

    def read(self) -> Script:
        script = Script(self._name, self._kind(), unsafe=self._unsafe_statement())
        {LOOP: self._read_loop, LIGHTNING: self._read_lightning, TRAINER: self._read_trainer}[script.kind](script)
        self._read_settings(script)
        self._read_common(script)
        return script

    def _kind(self) -> str:
        methods = {function.name for function in self._functions}
        if {"training_step", "configure_optimizers"} <= methods:
            return LIGHTNING
        if self._trainer() is not None:
            return TRAINER
        if any(_called(call) == "backward" for call in self._calls):
            return LOOP
        raise ConfigError(
            f"{self._name}: has no loop with loss.backward(), no LightningModule and no Trainer(...); to fix it, name "
            "the script that trains, or start with `pipe init` without --from"
        )

    def _trainer(self) -> ast.Call | None:
        """Return the call that creates a Trainer of Hugging Face; one of Lightning takes no data sets."""
        marks = {"args", "train_dataset", "eval_dataset", "compute_metrics"}
        trainers = [
            call for call in self._calls if _called(call).endswith("Trainer") and marks & _keywords(call).keys()
        ]
        return trainers[0] if trainers else None

    def _read_loop(self, script: Script) -> None:
        for model in self._optimized_models():
            self._add_model(script, model)
        for call in self._calls:
            if _called(call) == "DataLoader":
                self._add(script, "data", self._assigned(call))
                self._add(script, "data", self._source(_keywords(call).get("dataset") or next(iter(call.args), None)))
            if _called(call) == "backward":
                for loss in self._losses(call):
                    self._add(script, "loss", self._source(loss))
        script.label = self._label(script.arguments) or script.label
        own = [function for function in self._functions if function.name in self._loss_calls()]
        inside = [node for function in own for node in ast.walk(function)]
        measured, losses = self._validated(), {function.name for function in own}
        scores = re.compile(r"correct|accura|metric|_score|f1|iou|psnr|auc|error", re.IGNORECASE)
        for statement in ast.walk(self._tree):
            if isinstance(statement, ast.Assign | ast.AugAssign) and not isinstance(statement.value, ast.Constant):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                is_score = any(scores.search(ast.unparse(target)) for target in targets)
                is_loss = statement in measured and bool(losses & set(map(_called, _calls_in(statement))))
                if statement not in inside and (is_score or is_loss):
                    self._add(script, "metrics", statement)

    def _loss_calls(self) -> set[str]:
        """Return the names of what the loss is computed with."""
        losses = [loss for call in self._calls if _called(call) == "backward" for loss in self._losses(call)]
        values = [self._source(loss) or loss for loss in losses]
        return {_called(call) for value in values for call in _calls_in(value)}

    def _validated(self) -> list[ast.AST]:
        """Return the nodes of blocks without gradients, where scores are computed."""
        blocks = [node for node in ast.walk(self._tree) if isinstance(node, ast.With)]
        quiet = [block for block in blocks if re.search("no_grad|inference_mode", ast.unparse(block.items[0]))]
        return [node for block in quiet for node in ast.walk(block)]

    def _label(self, arguments: list[str]) -> str:
        """Return the name that the training loop gives to what the model does not take; empty if that is not clear."""
        for loop in (node for node in ast.walk(self._tree) if isinstance(node, ast.For)):
            if any(_called(call) == "backward" for call in _calls_in(loop)):
                targets = [node for node in ast.walk(loop.target) if isinstance(node, ast.Tuple)][-1:]
                names = [name.id for target in targets for name in target.elts if isinstance(name, ast.Name)]
                others = [name for name in names if name not in arguments]
                if len(names) == len(arguments) + 1:
                    return others[0] if len(others) == 1 else names[-1]
        return ""

    def _optimized_models(self) -> Iterator[ast.expr]:
        """Yield the models whose parameters() an optimizer gets."""
        for call in self._calls:
            for argument in call.args[:1]:
                if isinstance(argument, ast.Call) and _called(argument) == "parameters":
                    assert isinstance(argument.func, ast.Attribute)
                    yield argument.func.value

    def _losses(self, call: ast.Call) -> list[ast.expr]:
        """Return what loss.backward(), scaler.scale(loss).backward() or accelerator.backward(loss) differentiates."""
        names: list[ast.expr] = [
            node for node in ast.walk(call) if isinstance(node, ast.Name) and "loss" in node.id.lower()
        ]
        return names or ([call.func.value] if isinstance(call.func, ast.Attribute) else [])

    def _read_lightning(self, script: Script) -> None:
        module = next(node for node in self._classes.values() if "training_step" in _methods(node))
        created = next((call for call in self._calls if _called(call) == module.name), None)
        self._add_model(script, created)
        script.arguments = script.arguments or _forward_arguments(module)
        self._add(script, "model", module)
        for function in self._functions:
            if function.name.endswith("_dataloader") or function.name in ("prepare_data", "setup"):
                self._add(script, "data", function)
            elif function.name == "training_step":
                self._add(script, "loss", function)
                self._add(script, "loss", self._values.get("loss"))
            elif function.name in ("validation_step", "test_step"):
                self._add(script, "metrics", function)
        for call in self._calls:
            if _called(call) in ("log", "log_dict"):
                self._add(script, "metrics", call)

    def _read_trainer(self, script: Script) -> None:
        trainer = self._trainer()
        assert trainer is not None
        keywords = _keywords(trainer)
        self._add_model(script, keywords.get("model") or next(iter(trainer.args), None))
        script.arguments = script.arguments or ["input_ids", "attention_mask"]
        for name in ("train_dataset", "eval_dataset", "data_collator"):
            if name in keywords:
                self._add(script, "data", self._source(keywords[name]))
        for function in self._functions:
            if function.name == "compute_loss":
                self._add(script, "loss", function)
        if measure := keywords.get("compute_metrics"):
            functions = [function for function in self._functions if function.name == ast.unparse(measure)]
            self._add(script, "metrics", functions[0] if functions else measure)

    def _read_common(self, script: Script) -> None:
        """Find what converts inputs, and the classes to import."""
        converters = ("Compose", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor")
        for call in self._calls:
            if any(part in converters for part in ast.unparse(call.func).split(".")):
                self._add(script, "codec", self._assigned(call))
        for name, node in self._classes.items():
            bases = " ".join(ast.unparse(base) for base in node.bases)
            if node in self._tree.body and re.search(r"Module|Dataset|PreTrainedModel", bases):
                script.classes.append(name)
        if script.unsafe is not None:
            script.model = ""

    def _add_model(self, script: Script, expression: ast.expr | None) -> None:
        """Record where the model is built, and the expression if it needs only the script's classes and constants."""
        source = self._source(expression)
        self._add(script, "model", source)
        value: ast.expr | None = source.value if isinstance(source, Assignment) else source
        while isinstance(value, ast.Call) and _called(value) in ("to", "cuda", "cpu", "float"):
            value = value.func.value if isinstance(value.func, ast.Attribute) else None
        if isinstance(value, ast.Call) and _called(value) in self._classes:
            node = self._classes[_called(value)]
            script.arguments = script.arguments or _forward_arguments(node)
            values = [*value.args, *(keyword.value for keyword in value.keywords)]
            if node in self._tree.body and all(isinstance(argument, ast.Constant) for argument in values):
                script.model = script.model or ast.unparse(value)

    def _read_settings(self, script: Script) -> None:
        for call in self._calls:
            keywords, name = _keywords(call), _called(call)
            if name.endswith("TrainingArguments"):
                for key, setting in _ARGUMENTS.items():
                    self._set(script, setting, keywords.get(key))
            elif name == "DataLoader" and not self._is_held_out(call):
                self._set(script, "batch_size", keywords.get("batch_size"))
            elif any(isinstance(argument, ast.Call) and _called(argument) == "parameters" for argument in call.args):
                is_known = name.lower() in ("sgd", "adam", "adamw")
                optimizer = ("sgd" if name == "SGD" else "adamw", f"line {call.lineno}: {name}")
                script.settings.setdefault("optimizer", optimizer)
                for key in ("lr", "weight_decay") if is_known else ():
                    self._set(script, key, keywords.get(key))
            elif name == "Trainer":
                self._set(script, "epochs", keywords.get("max_epochs"))
        for node in ast.walk(self._tree):
            if isinstance(node, ast.For) and "epoch" in ast.unparse(node.target).lower():
                self._set(script, "epochs", _count(node.iter))

    def _is_held_out(self, loader: ast.Call) -> bool:
        """Return whether the name or the data of a loader are those of a test or validation split."""
        node = self._assigned(loader)
        names = [*(_targets(node) if isinstance(node, Assignment) else ()), *map(ast.unparse, loader.args[:1])]
        return any(re.search(r"test|val|dev", name, re.IGNORECASE) for name in names)

    def _set(self, script: Script, setting: str, value: ast.expr | None) -> None:
        """Record a setting that is a constant, a name of one, or the default of an option."""
        if isinstance(value, ast.Name):
            value = self._constants.get(value.id)
        if isinstance(value, ast.Attribute):
            value = self._option_default(value.attr)
        if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
            script.settings.setdefault(setting, (value.value, f"line {value.lineno}"))

    def _option_default(self, option: str) -> ast.expr | None:
        for call in self._calls:
            names = [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
            if _called(call) == "add_argument" and f"--{option.replace('_', '-')}" in (
                name.replace("_", "-") for name in names
            ):
                return _keywords(call).get("default")
        return None

    def _unsafe_statement(self) -> Piece | None:
        """Return the first statement that does work when the script is imported."""
        return next((self._piece(node) for node in self._tree.body if not _is_safe(node)), None)

    def _source(self, expression: ast.expr | None) -> ast.expr | Assignment | None:
        """Return the assignment of a name, also that of `data` for `data["train"]`, or the expression itself."""
        if expression is None:
            return None
        if isinstance(expression, ast.Subscript) and ast.unparse(expression) not in self._values:
            expression = expression.value
        return self._values.get(ast.unparse(expression), expression)

    def _assigned(self, call: ast.Call) -> ast.expr | Assignment:
        return next((node for node in self._values.values() if call in ast.walk(node)), call)

    def _add(self, script: Script, part: str, node: ast.stmt | ast.expr | None) -> None:
        pieces = script.pieces.setdefault(part, [])
        if node is not None and (piece := self._piece(node)) not in pieces:
            pieces.append(piece)

    def _piece(self, node: ast.stmt | ast.expr) -> Piece:
        segment = ast.get_source_segment(self._text, node) or ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            segment = segment.partition("\n")[0]
        code = " ".join(segment.split())
        return Piece(node.lineno, code if len(code) <= _WIDTH else f"{code[:_WIDTH]}…")


_WIDTH = 80  # of the code in a comment
_LINE = 120  # of a file
_HARMLESS = {"getLogger", "device", "is_available", "Path", "frozenset", "set", "tuple", "dict", "list", "range"}
_ARGUMENTS = {  # of TrainingArguments, and the setting of the section train
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "warmup_ratio": "warmup_ratio",
    "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip_norm",
    "seed": "seed",
}


def _called(call: ast.Call) -> str:
    """Return the last name of what is called, as `SGD` of `torch.optim.SGD(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _is_safe(node: ast.stmt) -> bool:
    """Return whether a statement of a module defines something and does no work, also below a main guard."""
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.If):
        return _is_harmless(node.test) and all(map(_is_safe, [*node.body, *node.orelse]))
    if isinstance(node, ast.Try):
        handlers = [part for handler in node.handlers for part in handler.body]
        return all(map(_is_safe, [*node.body, *handlers, *node.orelse, *node.finalbody]))
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return _is_harmless(node)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(
        node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass
    )


def _is_harmless(node: ast.AST) -> bool:
    return all(_called(call) in _HARMLESS for call in ast.walk(node) if isinstance(call, ast.Call))


def _targets(node: Assignment) -> Iterator[str]:
    """Yield the names that an assignment sets, such as `a` and `b` of `a, b = ...`."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            yield ast.unparse(part)


def _count(iterated: ast.expr) -> ast.expr | None:
    """Return n of range(n) and range(1, n + 1), also within tqdm()."""
    for call in ast.walk(iterated):
        if isinstance(call, ast.Call) and _called(call) == "range":
            match call.args:
                case [count] | [ast.Constant(0), count]:
                    return count
                case [ast.Constant(1), ast.BinOp(count, ast.Add(), ast.Constant(1))]:
                    return count
    return None


def _methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef)}


def _forward_arguments(node: ast.ClassDef) -> list[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            return [argument.arg for argument in item.args.args[1:]]
    return []


def task_source(script: Script) -> str:
    """Return task.py for a script."""
    inputs = script.arguments or ["features"]
    output = "prediction" if "prediction" not in inputs else "output"
    return "".join(_task_parts(script, inputs, output))


def _task_parts(script: Script, inputs: list[str], output: str) -> Iterator[str]:
    yield f'"""The task, prepared from {script.name}: complete what raises NotImplementedError."""\n\n'
    yield "from __future__ import annotations\n\nfrom typing import Any\n\n"
    yield "from torch import Tensor, nn\n"
    if script.unsafe is not None:
        yield (
            f"\n# {script.name} cannot be imported, because line {script.unsafe.line} would run: {script.unsafe.code}\n"
            '# Move what trains below `if __name__ == "__main__":` and import the classes here, or copy them.\n'
        )
    elif script.classes:
        yield f"from {Path(script.name).stem} import {', '.join(sorted(script.classes))}\n"
    yield "\n\nclass Task:\n"
    names = ", ".join(f'"{name}"' for name in inputs) + ("," if len(inputs) == 1 else "")
    yield f"    inputs = ({names})  # columns of data() that the model takes, in the order of forward()\n"
    yield f'    outputs = ("{output}",)  # names for what it returns\n\n'
    yield "    def model(self) -> nn.Module:\n"
    yield _comments(script, "model")
    if script.model:
        yield f"        return {script.model}  # without .to(device): pipe moves it\n\n"
    else:
        yield _missing("return the model, without .to(device)")
    yield "    def data(self, split: str) -> dict[str, Any]:\n"
    yield '        """Return the samples of "train", "validation" or "test"; the same each time."""\n'
    yield _comments(script, "data")
    columns = ", ".join(f'"{name}": ...' for name in inputs)
    yield _missing(f'return columns {{{columns}, "{script.label}": ...}}, or a map-style data set of such mappings')
    yield "    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:\n"
    yield f'        """Mean over the batch; `outputs` is the `{output}` of the model."""\n'
    yield _comments(script, "loss", _MODEL_LOSS if script.kind == TRAINER else "")
    yield _missing(f'return the loss, such as functional.cross_entropy(outputs, batch["{script.label}"])')
    yield "    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:\n"
    yield '        """One value per sample, not per batch; higher is better, or name it in `directions`."""\n'
    yield _comments(script, "metrics")
    yield (
        _missing(
            f'return {{"accuracy": (outputs.argmax(dim=1) == batch["{script.label}"]).float()}} or your own'
        ).rstrip("\n")
        + "\n"
    )


_MODEL_LOSS = "The model computes its own loss if it gets labels; here it gets only `inputs`, so that it can be served."


def _comments(script: Script, part: str, otherwise: str = "") -> str:
    pieces = sorted(script.pieces.get(part, []), key=lambda piece: piece.line)
    if not pieces:
        return f"        # {otherwise or f'Nothing in {script.name} was recognized as this.'}\n"
    return "".join(f"        # {script.name}, line {piece.line}: {piece.code}\n" for piece in pieces)


def _missing(sentence: str) -> str:
    text = repr(sentence) if '"' in sentence else f'"{sentence}"'
    line = f"        raise NotImplementedError({text})\n\n"
    return line if len(line) <= _LINE else f"        raise NotImplementedError(\n            {text}\n        )\n\n"


def codec_source(script: Script) -> str:
    """Return codec.py for a script."""
    inputs = script.arguments or ["features"]
    output = "prediction" if "prediction" not in inputs else "output"
    columns = ", ".join(f'"{name}": ...' for name in inputs)
    missing = _missing(f"return arrays {{{columns}}} for the instances of a request, prepared as in training")
    return (
        "# What clients send → arrays for the model → what they get back. Without torch; use it in data() too.\n\n"
        "from __future__ import annotations\n\nfrom typing import Any\n\nimport numpy as np\n\n\n"
        "class Codec:\n    def decode(self, instances: Any) -> dict[str, np.ndarray[Any, Any]]:\n"
        '        """Return an array for each input of the task; raise pipeline.InvalidPayload to reject a request."""\n'
        f"{_comments(script, 'codec')}{missing}"
        "    def encode(self, outputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:\n"
        '        """Return one JSON value for each instance."""\n'
        f'        return [row.tolist() for row in outputs["{output}"]]\n'
    )


def settings_source(script: Script, name: str) -> str:
    """Return pipe.yaml for a script, with the settings that are constants in it."""
    lines = [f"{setting}: {value}  # {script.name}, {place}" for setting, (value, place) in script.settings.items()]
    train = "".join(f"  {line}\n" for line in lines) or "  epochs: 10\n"
    return (
        f"# Prepared from {script.name}; `pipe explain` describes every setting.\n"
        f"name: {name}\ntask: task.py:Task\ncodec: codec.py:Codec\n\ntrain:\n{train}\n"
        "evaluate:\n  metric: accuracy  # a name from metrics()\n"
    )
