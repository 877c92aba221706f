"""Write the project for a model that exists already: `python -m pipeline.given.sources REQUEST`.

The files are copies of `examples/given/`, with what was read from the model in model.json. torch is loaded here, which
the command line never does.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.contract.given import describe_input, run_on_ones
from pipeline.contract.pretrained import open_pretrained
from pipeline.contract.task import BATCH, load_class
from pipeline.history import example_folder
from pipeline.system.errors import ConfigError, DataError, PipelineError
from pipeline.system.sources import project_sources
from pipeline.system.torchvision_operators import declare_torchvision_operators
from pipeline.system.wording import join_names

WEIGHTS = "weights/model.safetensors"  # of the project
_LISTED = 8
_MANY = 1000  # classes of networks that were trained on ImageNet
_PICTURES = {"export": {"batch_sizes": [1, 2, 7]}, "serve": {"max_batch_size": 8, "batch_rows": 8}}
_TEXTS = {"export": {"batch_sizes": [1, 2, 7]}, "serve": {"max_batch_size": 16}}
_SOUNDS = {"export": {"batch_sizes": [1, 2]}, "serve": {"max_batch_size": 4, "batch_rows": 4}}
_TRANSFORMERS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {  # template, its file for model.py, settings
    "ForImageClassification": ("images", "model_transformers.py", _PICTURES),
    "ForSemanticSegmentation": ("segments", "", _PICTURES),
    "DetrForObjectDetection": ("boxes", "", _PICTURES),
    "YolosForObjectDetection": ("boxes", "", _PICTURES),
    "TableTransformerForObjectDetection": ("boxes", "", _PICTURES),
    "ForSequenceClassification": ("texts", "", _TEXTS),
    "ForTokenClassification": ("texts", "", _TEXTS),
    "WhisperForConditionalGeneration": ("speech", "", _SOUNDS),
    "ForCausalLM": ("language", "", _TEXTS),
    "LMHeadModel": ("language", "", _TEXTS),
    "ASTForAudioClassification": ("spectrograms", "", _SOUNDS),
    "ForCTC": ("sounds", "", _SOUNDS),  # and ForSequenceClassification of models of sound
}
_LABELLED = ("images", "texts", "sounds", "spectrograms", "tensors")
_WITH_TOKENIZER = ("texts", "speech", "language")
_INPUT = re.compile(r"(?P<name>\w+)=(?P<dtype>float32|float64|float16|int64|int32|uint8|bool)\[(?P<axes>[^\]]*)\]")
_TRAINED = {
    "timm": "timm.create_model('{}', pretrained=True)",
    "torchvision": "torchvision.models.get_model('{}', weights='DEFAULT')",
}
_FLOATS = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Request:
    source: str
    folder: str
    name: str
    weights: str = ""
    inputs: Sequence[str] = ()
    data: str = ""  # with labels
    baseline: str = ""  # a bundle
    trusts_code: bool = False  # of the folder


@dataclass(frozen=True)
class Given:
    """A project to write: the folder of its template, further files of it by their names there, and its settings."""

    template: str
    pretrained: str
    facts: Mapping[str, Any] | None = None  # of model.json
    model: str = ""  # the file of the template that builds the model
    code: str = ""  # or its text
    settings: Mapping[str, Any] | None = None


def write_project(request: Request) -> None:
    given = read_source(request)
    folder, template = Path(request.folder), example_folder(f"given/{given.template}")
    for path in template.glob("*.py"):
        if not path.name.startswith("model_"):
            shutil.copyfile(path, folder / path.name)
    if (folder / "remote").is_dir():
        first, _, rest = (folder / "task.py").read_text().partition("\nimport torch\n")
        (folder / "task.py").write_text(f"{first}\nimport remote  # noqa: F401\nimport torch\n{rest}")
    if given.model:
        shutil.copyfile(template / given.model, folder / "model.py")
    if given.code:
        (folder / "model.py").write_text(given.code)
    settings: dict[str, Any] = {"name": request.name, "task": "task.py:Task", "codec": "codec.py:Codec"}
    if given.facts is not None:
        (folder / "model.json").write_text(json.dumps(given.facts, indent=1) + "\n")
        settings["prepare"] = {"files": ["model.json"]}
    settings |= {"model": {"pretrained": given.pretrained}, "train": {"epochs": 0}, **(given.settings or {})}
    if request.data:
        settings |= {"task": "labelled.py:Task", **_add_labels(request, given.template, settings.get("prepare", {}))}
    head = "# The model with its weights as they are; `pipe explain` describes every setting.\n"
    (folder / "pipe.yaml").write_text(head + yaml.safe_dump(settings, sort_keys=False))


def _add_labels(request: Request, template: str, prepare: Mapping[str, Any]) -> dict[str, Any]:
    """Write the task with labelled data, and return its settings."""
    if template not in _LABELLED:
        raise ConfigError(
            f"--data: labels are for classifiers and models of numbers, and not for {template}; to fix it: export it "
            "without --data, and write metrics() in task.py"
        )
    text = (example_folder("given/labels") / "task.py").read_text()
    for name, value in (("DATA", request.data), ("BASELINE", request.baseline)):
        text = text.replace(f'\n{name} = ""', f"\n{name} = {json.dumps(value)}")
    (Path(request.folder) / "labelled.py").write_text(text)
    labels = [label for _, label in load_class("labelled.py:read_rows", Path(request.folder))()]
    has_numbers = load_class("labelled.py:are_numbers", Path(request.folder))(labels)
    evaluate = {"metric": "mae" if has_numbers else "accuracy"}
    rule = {"rule": "non-inferior"} if request.baseline else {}
    data = os.path.relpath(request.data, Path(request.folder).parents[1] / request.name)  # from where it will lie
    return {"prepare": {"files": [*prepare.get("files", ()), data]}, "evaluate": evaluate | rule}


def read_source(request: Request) -> Given:
    library, is_library, name = request.source.partition(":")
    if is_library and library in ("timm", "torchvision"):
        return _network(request, library, name)
    path = Path(library).expanduser()
    if is_library and path.suffix == ".py":
        return _module(request, path, name)
    if path.is_dir():
        return _folder(request, path.resolve())
    readers: dict[str, Callable[[Request, Path], Given]] = {".onnx": _onnx_file, ".pt2": _program}
    if path.suffix not in readers:
        raise ConfigError(
            f"{request.source}: is none of a folder of Hugging Face, timm:NAME, torchvision:NAME, FILE.py:CLASS, a "
            ".pt2 or an .onnx file"
        )
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    return readers[path.suffix](request, path.resolve())


def _folder(request: Request, path: Path) -> Given:
    if (path / "modules.json").is_file():
        transformer, facts = read_sentence_transformer(path)
        unused = {"pretrained": str(transformer), "allow_mismatch": ["*pooler.*", "*position_ids"]}
        return Given("embeddings", str(transformer), facts, settings={"model": unused, **_TEXTS})
    config = open_pretrained(path).config()
    if "auto_map" in config:
        _copy_code(request, path, config["auto_map"])
    architecture = str((config.get("architectures") or ["?"])[0])
    kind = next((kind for suffix, kind in _TRANSFORMERS.items() if architecture.endswith(suffix)), None)
    if "conv_kernel" in config and architecture.endswith("ForSequenceClassification"):
        kind = _TRANSFORMERS["ForCTC"]
    if kind is None or (kind[0] == "sounds" and "conv_kernel" not in config):
        embeddings = "; for embeddings, a folder needs modules.json, as sentence-transformers writes it"
        raise ConfigError(
            f"{path / 'config.json'}: the architecture {architecture} is not supported; supported are those that end "
            f"with {', '.join(_TRANSFORMERS)} (of samples){embeddings if architecture.endswith('Model') else ''}; to "
            "fix it: write task.py, as in `pipe init --template transformer`"
        )
    template, model, settings = kind
    if template in _WITH_TOKENIZER and not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path}: has no tokenizer.json; to fix it: save it with transformers' AutoTokenizer")
    return Given(template, str(path), model=model, settings=settings)


def _copy_code(request: Request, path: Path, classes: Mapping[str, str]) -> None:
    """Copy the folder's own classes into the project, where they take the place of those of transformers."""
    if not request.trusts_code:
        raise ConfigError(
            f"{path / 'config.json'}: names code to run (auto_map), which is refused; to fix it: read it, then add "
            "--trust-remote-code, which copies it into the project"
        )
    package = Path(request.folder) / "remote"
    package.mkdir()
    for file in path.glob("*.py"):
        shutil.copyfile(file, package / file.name)
    lines = ['"""Code of the model\'s folder, in place of what transformers has."""', "", "import transformers", ""]
    names = {auto: str(target).rpartition(".") for auto, target in classes.items() if auto.startswith("AutoModel")}
    for module, _, name in [str(classes.get("AutoConfig", "")).rpartition("."), *names.values()]:
        if not (package / f"{module}.py").is_file():
            raise ConfigError(
                f"{path / 'config.json'}: auto_map names {module}.{name}, whose file is not in the folder"
            )
        lines.append(f"from .{module} import {name}")
    config = str(classes["AutoConfig"]).rpartition(".")[2]
    lines += ["", f"transformers.AutoConfig.register({config}.model_type, {config}, exist_ok=True)"]
    lines += [f"transformers.{auto}.register({config}, {name}, exist_ok=True)" for auto, (_, _, name) in names.items()]
    (package / "__init__.py").write_text("\n".join(lines) + "\n")


def _network(request: Request, library: str, name: str) -> Given:
    """Return the project for a network of timm or torchvision."""
    declare_torchvision_operators()
    try:
        build, describe = {"timm": _timm, "torchvision": _torchvision}[library](name)
    except ImportError as error:
        raise ConfigError(f"{request.source}: {error}; to fix it: `pip install {library}`") from error
    if not request.weights:
        raise ConfigError(
            f"{request.source}: name the file with its weights, --weights FILE; to save those of {library}: python -c "
            f"\"import torch, {library}; torch.save({_TRAINED[library].format(name)}.state_dict(), '{name}.pt')\""
        )
    weights = _read_weights(Path(request.weights))
    classes = _count_classes(build(_MANY), weights)
    model = build(classes)
    facts = {"name": name, **describe(model, classes)}
    return Given("images", _write_weights(request, weights, model), facts, f"model_{library}.py", settings=_PICTURES)


_Network = tuple[Callable[[int], nn.Module], Callable[[Any, int], dict[str, Any]]]


def _timm(name: str) -> _Network:
    timm: Any = importlib.import_module("timm")
    data: Any = importlib.import_module("timm.data")
    if not timm.is_model(name):
        raise ConfigError(f"timm has no network {name!r}; `timm.list_models()` names them")

    def describe(model: Any, classes: int) -> dict[str, Any]:
        config = data.resolve_model_data_config(model)
        if config.get("crop_mode", "center") not in ("center", "squash"):
            raise ConfigError(f"timm:{name}: the crop_mode {config['crop_mode']!r} is not supported")
        _, height, width = config["input_size"]
        size = {"height": height, "width": width}
        edge = {"shortest_edge": int(height // config["crop_pct"])}
        resample = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}[config["interpolation"]]
        processor = _processor(
            size if config.get("crop_mode") == "squash" else edge, resample, size, config["mean"], config["std"]
        )
        subset = data.infer_imagenet_subset(model) if classes == _MANY else None
        names = data.ImageNetInfo(subset).label_descriptions() if subset else _labels(classes)
        return {"labels": names, "processor": processor, "data": config}

    return lambda classes: timm.create_model(name, num_classes=classes).eval(), describe


def _torchvision(name: str) -> _Network:
    models: Any = importlib.import_module("torchvision.models")
    if name not in models.list_models(module=models):
        raise ConfigError(f"torchvision has no classifier {name!r}; `torchvision.models.list_models()` names them")
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}

    def describe(_: nn.Module, classes: int) -> dict[str, Any]:
        weights = models.get_model_weights(name).DEFAULT
        steps = weights.transforms()
        resample = {"nearest": 0, "bilinear": 2, "bicubic": 3}[steps.interpolation.value]
        side = steps.crop_size[0]
        crop = {"height": side, "width": side}
        processor = _processor({"shortest_edge": steps.resize_size[0]}, resample, crop, steps.mean, steps.std)
        names = weights.meta["categories"] if classes == _MANY else _labels(classes)
        return {"labels": list(names), "processor": processor}

    return lambda classes: models.get_model(name, weights=None, num_classes=classes, **options).eval(), describe


def _processor(size: Any, resample: int, crop: Any, mean: Any, std: Any) -> dict[str, Any]:
    """Return the settings of an image processor of transformers that does the same."""
    return {
        "do_resize": True, "size": size, "resample": resample, "do_center_crop": True, "crop_size": crop,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": mean, "image_std": std,
    }  # fmt: skip


def _labels(classes: int) -> list[str]:
    return [f"class {number}" for number in range(classes)]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict, from a pickle only with `weights_only`."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file with weights")
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    try:
        body = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, torch and zipfile raise their own
        raise ConfigError(
            f"{path}: holds more than tensors, or is no file of torch, and such pickles can run code when they are "
            "read; to fix it: save the weights alone, with torch.save(model.state_dict(), FILE) or as safetensors"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(body, dict) and isinstance(body.get(key), dict):
            body = body[key]
    if not isinstance(body, dict) or not all(isinstance(value, Tensor) for value in body.values()):
        raise ConfigError(f"{path}: holds no state dict; save one with torch.save(model.state_dict(), FILE)")
    return {name.removeprefix("module."): value for name, value in body.items()}


def _count_classes(model: nn.Module, weights: Mapping[str, Tensor]) -> int:
    """Return the number of classes: where weights have another first size than those of a thousand classes."""
    sizes = {
        len(weights[name])
        for name, own in model.state_dict().items()
        if name in weights and own.ndim and weights[name].shape != own.shape and len(own) == _MANY
    }
    return sizes.pop() if len(sizes) == 1 else _MANY


def _write_weights(request: Request, weights: Mapping[str, Tensor], model: nn.Module) -> str:
    """Check that the weights are the model's, and write them into the project."""
    own = model.state_dict()
    weights = {name: own[name] for name in own if name.endswith("num_batches_tracked")} | dict(weights)
    misfits = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    kinds = {"missing": own.keys() - weights, "unexpected": weights.keys() - own, "of another shape": misfits}
    if problems := [f"{kind}: {join_names(sorted(names), _LISTED)}" for kind, names in kinds.items() if names]:
        raise DataError(f"{request.weights}: are not the weights of {request.source}; {'; '.join(problems)}")
    return _save(request, {name: weight.contiguous().clone() for name, weight in weights.items()})


def _save(request: Request, tensors: Mapping[str, Tensor]) -> str:
    path = Path(request.folder) / WEIGHTS
    path.parent.mkdir()
    save_file(dict(tensors), path)
    return WEIGHTS


def _module(request: Request, path: Path, name: str) -> Given:
    """Return the project for a class or function of the user's."""
    path = path.resolve()
    build = load_class(f"{path.name}:{name}", path.parent)
    try:
        model = build()
    except TypeError as error:
        raise ConfigError(f"{request.source}: cannot be called without arguments ({error})") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{request.source}: is no torch module, but {type(model).__name__}")
    names = [name for name in inspect.signature(model.forward).parameters if name not in ("args", "kwargs")]
    hints = () if request.inputs else _annotated_inputs(model)
    if not (request.inputs or hints):
        example = " ".join(f"--input {name}=float32[batch,8]" for name in names)
        raise ConfigError(f"{request.source}: describe what forward() takes, as in {example}")
    inputs, longest = read_inputs(request.inputs or hints)
    if missing := sorted(inputs.keys() - set(names)):
        raise ConfigError(f"--input {missing[0]}: forward() has no such argument; it takes {', '.join(names)}")
    if not request.weights:
        raise ConfigError(f"{request.source}: name the file with its weights: --weights FILE.safetensors")
    pretrained = _write_weights(request, _read_weights(Path(request.weights)), model)
    order = {name: inputs[name] for name in names if name in inputs}
    facts = {"inputs": order, "outputs": _output_names(model.eval(), order, longest), "longest": longest}
    for file in project_sources(path.parent, f"{path.name}:{name}"):
        if str(file) in ("task.py", "codec.py", "labelled.py"):
            raise ConfigError(f"{path.parent / file}: the project has a file of this name; to fix it: rename yours")
        (Path(request.folder) / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / file, Path(request.folder) / file)
    own = Path(request.folder, "model.py")  # of the user, with one more name at its end
    code = own.read_text() if own.exists() else f'"""The model, from {path.name}."""'
    line = f"build = {name}" if path.stem == "model" else f"from {path.stem} import {name} as build  # noqa: E402"
    return Given("tensors", pretrained, facts, code=f"{code.rstrip()}\n\n{line}\n")


def _annotated_inputs(model: nn.Module) -> list[str]:
    """Return the inputs of `forward(self, x: Annotated[Tensor, "float32[batch,3,224,224]"])`."""
    with contextlib.suppress(NameError):  # of a type that is imported for type checkers alone
        hints = get_type_hints(model.forward, include_extras=True)
        texts = {name: getattr(hint, "__metadata__", ("",))[0] for name, hint in hints.items() if name != "return"}
        return [f"{name}={text}" for name, text in texts.items() if isinstance(text, str) and text]
    return []


def read_inputs(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Read `name=float32[batch,time<=512,80]`: the inputs, and the longest of each named axis."""
    inputs: dict[str, Any] = {}
    longest: dict[str, int] = {}
    examples = [_examples(Path(text)) if text.endswith(".npz") else [(text, (0, 1))] for text in texts]
    for text, limits in itertools.chain.from_iterable(examples):
        match = _INPUT.fullmatch(text.replace(" ", ""))
        axes = [part.partition("<=") for part in match["axes"].split(",")] if match else []
        if match is None or axes[0][0] != BATCH or not all(size[0] for size in axes):
            raise ConfigError(
                f"--input {text}: write it as in x=float32[batch,3,224,224] or ids=int64[batch,time<=512], or name "
                "an .npz file with an example of each input"
            )
        for name, _, size in axes[1:]:
            if not name.isdigit():
                if not (size.isdigit() or name in longest):
                    raise ConfigError(f"--input {text}: write the maximum of {name}, as in {name}<=512")
                longest[name] = int(size) if size.isdigit() else longest[name]
        sizes = [int(name) if name.isdigit() else name for name, _, _ in axes]
        inputs[match["name"]] = describe_input(match["dtype"], sizes, *limits)
    return inputs, longest


def _examples(path: Path) -> list[tuple[str, tuple[int, int]]]:
    """Describe the arrays of a file, whose first axis is the batch; whole numbers are drawn from their range."""
    try:
        with np.load(path) as file:
            arrays = {name: np.atleast_1d(file[name]) for name in file}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"--input {path}: cannot be read as .npz ({' '.join(str(error).split())})") from error
    shapes = {name: ",".join(["batch", *map(str, array.shape[1:])]) for name, array in arrays.items()}
    return [
        (
            f"{name}={array.dtype}[{shapes[name]}]",
            (int(array.min()), int(array.max()) + 1) if array.size and array.dtype.kind in "iu" else (0, 1),
        )
        for name, array in arrays.items()
    ]


def _output_names(model: nn.Module, inputs: Mapping[str, Any], longest: Mapping[str, int]) -> list[str]:
    """Run the model on ones, and return names for what it returns."""
    outputs = run_on_ones(model, inputs, {BATCH: 2, **longest}, "forward()")
    if isinstance(outputs, Tensor):
        return ["output"]
    return list(outputs) if isinstance(outputs, Mapping) else [f"output_{i}" for i in range(len(outputs))]


def _program(request: Request, path: Path) -> Given:
    try:
        program = torch.export.load(path)
    except Exception as error:  # torch and zipfile raise their own
        raise ConfigError(f"{path}: is no program of torch.export ({' '.join(str(error).split())[:200]})") from error
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    inputs: dict[str, Any] = {}
    longest: dict[str, int] = {}
    for name in program.graph_signature.user_inputs:
        value = placeholders[str(name)]
        axes: list[Any] = [BATCH]
        if isinstance(value.shape[0], int):
            raise ConfigError(f"{path}: the first axis of {name} is fixed at {value.shape[0]}; export it with torch.export.Dim")  # fmt: skip  # noqa: E501
        for size in value.shape[1:]:
            axes.append(size if isinstance(size, int) else str(size))
            if not isinstance(size, int):
                longest[str(size)] = int(min(ranges[str(size)].upper, 512))
        inputs[str(name)] = describe_input(str(value.dtype).removeprefix("torch."), axes)
    outputs = [f"output_{i}" for i in range(len(program.graph_signature.user_outputs))]
    facts = {"inputs": inputs, "outputs": ["output"] if len(outputs) == 1 else outputs, "longest": longest}
    return _file_project(request, {"file": path.read_bytes()}, facts, "model_exported.py")


def _onnx_file(request: Request, path: Path) -> Given:
    from export.given import read_onnx

    files, facts = read_onnx(path, read_inputs(request.inputs)[1])
    return _file_project(request, files, facts, "model_onnx.py")


def _file_project(request: Request, files: Mapping[str, bytes], facts: Mapping[str, Any], model: str) -> Given:
    """Return the project for a model that is a file: its weights are the bytes."""
    tensors = {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in files.items()}
    sizes = {name: len(content) for name, content in files.items()}
    return Given("tensors", _save(request, tensors), {**facts, "bytes": sizes}, model)


_SUPPORTED = ["Transformer", "Pooling", "Normalize"]
_POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_DECODERS = ("t5", "mt5", "clip", "siglip")  # AutoModel of these needs more than the ids of a text
_SETTINGS = "sentence_bert_config.json"
_LONGEST = 1 << 20  # tokens of a text; transformers writes a larger number where it knows none


def read_sentence_transformer(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the transformer and the facts of model.json; raise ConfigError for what is not supported."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{folder / 'modules.json'}: must hold a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unsupported := [kind for kind in kinds if kind not in _SUPPORTED]:
        raise ConfigError(
            f"{folder / 'modules.json'}: the module {unsupported[0]} is not supported; supported are "
            f"{', '.join(_SUPPORTED)}; to fix it: write its layer in task.py, from `pipe init --template embedding`"
        )
    if kinds not in (_SUPPORTED[:2], _SUPPORTED):
        raise ConfigError(f"{folder / 'modules.json'}: needs the modules Transformer, Pooling and, if any, Normalize")
    transformer, pooling = (folder / _inside(folder, str(module.get("path", ""))) for module in modules[:2])
    _check_prompt(folder)
    facts = {
        "folder": str(folder),
        **_transformer_facts(transformer),
        "pooling": _pooling_modes(pooling / "config.json"),
        "normalizes": kinds == _SUPPORTED,
    }
    return transformer, facts


def _inside(folder: Path, path: str) -> str:
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / 'modules.json'}: the path {path!r} is outside the folder")
    return path


def _transformer_facts(folder: Path) -> dict[str, Any]:
    config, settings = _read(folder / "config.json"), _read(folder / _SETTINGS)
    if (kind := config.get("model_type")) in _DECODERS:
        raise ConfigError(f"{folder / 'config.json'}: the model type {kind} is not supported; use an encoder as BERT")
    length, tokenizer = settings.get("max_seq_length"), folder / "tokenizer_config.json"
    if length is None and tokenizer.is_file():  # as releases since 6 write it
        length = _read(tokenizer).get("model_max_length")
    if not isinstance(length, int) or not 3 <= length <= _LONGEST:
        raise ConfigError(f"{folder / _SETTINGS}: set max_seq_length to the most tokens of a text, found {length!r}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder}: has no tokenizer.json; to fix it: load it with transformers' AutoTokenizer and save it there"
        )
    return {
        "longest": length,
        "lowercase": bool(settings.get("do_lower_case")),
        "padding": config.get("pad_token_id") or 0,
        "dimensions": config.get("matryoshka_dimensions") or [],
    }


def _pooling_modes(path: Path) -> list[str]:
    """Return the modes of pooling in the order in which their vectors are joined."""
    config = _read(path)
    if "pooling_mode" in config:
        modes = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        names = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        modes = [re.sub(r"^pooling_mode_|(?<!len)_tokens?$", "", name) for name in names]
        modes.sort(key=lambda mode: _POOLING.index(mode) if mode in _POOLING else -1)
    if not modes or any(mode not in _POOLING for mode in modes):
        raise ConfigError(f"{path}: pooling {', '.join(map(str, modes)) or 'of no kind'} is not supported; supported are {', '.join(_POOLING)}")  # fmt: skip  # noqa: E501
    return modes


def _check_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    if path.is_file() and (prompt := _read(path).get("default_prompt_name")):
        raise ConfigError(
            f"{path}: the default prompt {prompt!r} is not supported; remove it, and send it in the texts"
        )


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, which a sentence-transformers folder has")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def main(argv: Sequence[str]) -> int:
    try:
        write_project(Request(**json.loads(argv[0])))
    except PipelineError as error:
        print(json.dumps({"error": str(error)}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
