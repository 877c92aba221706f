"""Write other formats, each loaded again and compared with torch.

They are torch.export's pt2, TensorFlow's SavedModel, and the folder of a language model for onnxruntime-genai.

onnx2tf converts ONNX to a SavedModel. It pins another version of onnx, and TensorFlow conflicts with packages torch
needs, so both run in a process and, if configured, an environment of their own. Their outputs come back as arrays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from export.language_model import (
    TorchDecoder,
    choose_prompts,
    complete_generation,
    language_export_input,
    make_generation,
    verify_language,
)
from export.parity import Arrays, compare_all, evaluated_outputs, measure
from export.parity_everywhere import case_inputs, compare_outputs, make_cases
from export.to_onnx import export_input
from export.trace import ExportInput, trace
from pipeline.contract.data import Samples, example_batch
from pipeline.contract.golden import Decoder, empty_past, inputs_of
from pipeline.contract.prompting import ANSWER_TOKENS
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Generation, TensorSpec
from pipeline.contract.task import Generates, Task
from pipeline.system.errors import StageError, install_command
from pipeline.system.files import digest_tree, write_json
from pipeline.system.torch_private import tree_flatten, tree_unflatten

FORMATS_FILE, FOLDER = "formats.json", "formats"
RunFeeds = Callable[[Sequence[Arrays]], list[Arrays]]  # runs a loaded file on many feeds


@dataclass(frozen=True)
class Original:
    """The model, and the file that was verified against it."""

    task: Task
    model: nn.Module
    test: Samples
    config: Export
    path: Path
    inputs: Mapping[str, TensorSpec]
    files: Path | None = None  # what model, data and codec share: the tokenizer


class Skipped(Exception):
    """Raised for a format that cannot be written on this machine."""


def write_formats(original: Original, folder: Path) -> list[dict[str, Any]]:
    """Return a row of formats.json for each requested format; a file that differs from the model is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    return [_row(original, name, folder / name) for name in original.config.formats if name != "onnx"]


def require_formats(rows: Sequence[Mapping[str, Any]]) -> None:
    if failed := [row for row in rows if not row["passed"] and not row["skipped"]]:
        raise StageError("; ".join(f"export.formats: {row['format']} is not kept: {row['reason']}" for row in failed))


def _row(original: Original, name: str, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    error, skipped, reason = None, False, ""
    try:
        path, comparisons = _WRITERS[name](original, folder)
        error = max(row["max_abs_error"] for row in comparisons)
        reason = _fault(comparisons)
    except Skipped as error_:
        path, skipped, reason = folder, True, str(error_)
        print(f"export.formats: {name} is skipped: {reason}")
    except (StageError, RuntimeError, AssertionError) as error_:  # torch's own, and guards of its programs
        path, reason = folder, " ".join(str(error_).split())[:600]
    if reason:
        shutil.rmtree(folder, ignore_errors=True)
    files = digest_tree(folder) if folder.is_dir() else {}
    return {
        "format": name,
        "path": "" if reason else f"{FOLDER}/{path.relative_to(folder.parent).as_posix()}",
        "passed": not reason,
        "skipped": skipped,
        "reason": f"skipped: {reason}" if skipped else reason or "equal to torch",
        "max_abs_error": error,
        "bytes": sum((folder / file).stat().st_size for file in files),
        "sha256": files,
    }


def _fault(comparisons: Sequence[Mapping[str, Any]]) -> str:
    wrong = [row for row in comparisons if row["beyond_tolerance"] or row["unexplained_flips"]]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda row: row["max_abs_error"])
    return (
        f"it is not the model: {worst['beyond_tolerance']} elements differ beyond tolerance at batch size "
        f"{worst['batch_size']}, off by {worst['max_abs_error']:.3g} in {worst['worst']}"
    )


def _write_pt2(original: Original, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Write torch's own format, which loads without the model's code."""
    path = folder / "model.pt2"
    traced = _export_input(original)
    result = trace(traced)
    if result.program is None:
        raise StageError(
            f"torch.export alone does not manage this model{f': {result.limits}' if result.limits else ''}"
        )
    result.program.example_inputs = None  # samples of the data must not be in the file
    for node in result.program.graph.nodes:
        node.meta.pop("stack_trace", None)  # of the machine that made it
    torch.export.save(result.program, path)
    module = torch.export.load(path).module()
    return path, _verify(original, partial(_run_program, module, traced))


def _write_saved_model(original: Original, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Write TensorFlow's format, converted from the ONNX file."""
    if isinstance(original.task, Generates):
        raise Skipped("the decoder of a language model, with its cache, has no SavedModel; other models have")
    python = os.environ.get(TENSORFLOW_PYTHON, "")
    if reason := saved_model_problem(python):
        raise Skipped(reason)
    answers = partial(
        run_saved_model, python, original.path, folder, tuple(original.task.outputs)
    )  # fmt: skip
    return folder, _verify(original, answers)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def _write_genai(original: Original, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Write what onnxruntime-genai runs: the ONNX file, genai_config.json and the files of the tokenizer."""
    if find_spec("onnxruntime_genai") is None:
        raise Skipped(f"onnxruntime_genai is not installed here; to install it: {install_command('genai')}")
    task: Any = original.task
    assert original.files is not None, "of a language model"
    model = task.language_model(original.model)
    generation = complete_generation(make_generation(task, model), task, original.files)
    write_json(folder / "genai_config.json", _genai_config(model.config, generation, original.inputs))
    for file in original.path.parent.glob(f"{original.path.name}*"):
        shutil.copyfile(file, folder / file.name)
    for file in filter(Path.is_file, (original.files / name for name in _TOKENIZER_FILES)):
        shutil.copyfile(file, folder / file.name)
    if not (folder / "tokenizer_config.json").exists():
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": generation.template}
        write_json(folder / "tokenizer_config.json", tokenizer)
    reference, decoder = TorchDecoder(model, generation), Decoder(dict, generation, original.inputs)
    prompts = choose_prompts(task.prompting().prompts, original.test, generation)
    return folder, _compare_genai(folder, reference, decoder, prompts, original.config)


def _genai_config(config: Any, generation: Generation, inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    specs = [inputs[cache.input] for cache in generation.caches]
    kinds = [cache.input.rpartition(".")[2] for cache in generation.caches]
    if kinds != ["key", "value"] * (len(kinds) // 2) or len({spec.shape[1::2] for spec in specs}) > 1:
        raise StageError("onnxruntime-genai reads caches of keys and values of one shape, and this model has others")
    _, heads, _, width = specs[0].shape
    sampling = generation.sampling
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": generation.positions_limit,
            "bos_token_id": next(iter(generation.begin), 0),
            "eos_token_id": list(generation.end),
            "pad_token_id": next(iter(generation.end), 0),
            "decoder": {
                "filename": "model.onnx",
                "session_options": {},
                "hidden_size": config.hidden_size,
                "head_size": width,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(specs) // 2,
                "inputs": {
                    "input_ids": generation.ids,
                    "attention_mask": generation.mask,
                    "position_ids": generation.positions,
                    "past_key_names": "past.%d.key",
                    "past_value_names": "past.%d.value",
                },
                "outputs": {
                    "logits": generation.logits,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": generation.positions_limit,
            "past_present_share_buffer": False,
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature or 1.0,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
    }


def _compare_genai(
    folder: Path, reference: TorchDecoder, decoder: Decoder, prompts: Sequence[Sequence[int]], config: Export
) -> list[dict[str, Any]]:
    """Compare the logits of the prompts and of each token of torch's greedy answers."""
    import onnxruntime_genai

    generation = reference.generation
    model = onnxruntime_genai.Model(str(folder))
    onnxruntime_genai.Tokenizer(model)  # refuses a tokenizer of another kind
    parameters = onnxruntime_genai.GeneratorParams(model)
    rows = []
    for prompt in prompts:
        answer = reference.greedy(prompt, min(ANSWER_TOKENS, generation.positions_limit - len(prompt)))
        ids = np.array([[*prompt, *answer[:-1]]])
        feed = inputs_of(generation, ids, np.ones_like(ids), empty_past(decoder, 1))
        expected = reference.run(feed)[generation.logits][0, len(prompt) - 1 :]
        started, generator, actual = time.perf_counter(), onnxruntime_genai.Generator(model, parameters), []
        for tokens in (prompt, *([token] for token in answer[:-1])):
            generator.append_tokens(np.array([tokens], np.int32))
            actual.append(generator.get_logits()[0, -1])
        seconds = time.perf_counter() - started
        text = f"a prompt of {len(prompt)} tokens, run by onnxruntime-genai"
        pairs = {generation.logits: (expected, np.array(actual))}
        rows.append(asdict(measure(pairs, config, 1, seconds, text, generation.logits)))
    return rows


def _export_input(original: Original) -> ExportInput:
    if isinstance(original.task, Generates):
        model = original.task.language_model(original.model)
        return language_export_input(model, make_generation(original.task, model))
    return export_input(original.model, original.task, example_batch(original.task, original.test))


@torch.no_grad()
def _run_program(module: nn.Module, traced: ExportInput, feeds: Sequence[Arrays]) -> list[Arrays]:
    results = []
    spec = tree_flatten(traced.arguments)[1]
    for feed in feeds:
        tensors = [torch.from_numpy(feed[name]) for name in traced.inputs]
        answers = module(*tree_unflatten(tensors, spec))
        results.append({name: value.numpy() for name, value in zip(traced.outputs, answers, strict=True)})
    return results


def _verify(original: Original, answers: RunFeeds) -> list[dict[str, Any]]:
    """Compare on the whole test set at every size, and on the other inputs the bundle's file was compared on."""
    if isinstance(original.task, Generates):
        task: Any = original.task
        model = task.language_model(original.model)
        decoder = Decoder(lambda feed: answers([dict(feed)])[0], make_generation(task, model), original.inputs)
        return verify_language(
            model, decoder, original.test, original.config, partial(evaluated_outputs, task, original.model)
        )
    cases = list(
        make_cases(original.task, original.model, case_inputs(original.task, original.test, original.config), [])
    )
    sizes = original.config.batch_sizes
    batches = {size: list(original.test.batches(range(len(original.test)), size)) for size in sizes}
    feeds = [{name: batch[name].numpy() for name in original.task.inputs} for size in sizes for batch in batches[size]]
    started = time.perf_counter()
    outputs = answers([*feeds, *(case.feed for case in cases)])
    seconds = time.perf_counter() - started
    remaining = iter(outputs)
    parts = {size: [next(remaining) for _ in batches[size]] for size in sizes}
    comparisons = compare_all(original.task, original.model, original.test, original.config, parts, seconds)
    return [*comparisons, *compare_outputs(cases, list(remaining), original.config)]


_WRITERS: dict[str, Callable[[Original, Path], tuple[Path, list[dict[str, Any]]]]] = {
    "pt2": _write_pt2,
    "savedmodel": _write_saved_model,
    "genai": _write_genai,
}


TENSORFLOW_PYTHON = "PIPE_TENSORFLOW_PYTHON"  # variable: python of an environment with onnx2tf and tensorflow
_REQUIRED_MODULES = ("onnx2tf", "tensorflow")
_HOW_TO_INSTALL = (
    "pip install -c constraints.txt '.[savedmodel]', or let PIPE_TENSORFLOW_PYTHON name the python of an "
    "environment that has it"
)
_TIMEOUT_SECONDS = 1800


def saved_model_problem(python: str) -> str:
    """Return why no SavedModel can be written, empty if one can; an empty `python` means this interpreter."""
    if not python:
        missing = [name for name in _REQUIRED_MODULES if find_spec(name) is None]
        return f"{' and '.join(missing)} not installed here; {_HOW_TO_INSTALL}" if missing else ""
    if shutil.which(python) is None:
        return f"{TENSORFLOW_PYTHON}={python}: no such program; {_HOW_TO_INSTALL}"
    check_program = (
        f"import importlib.util as u, sys; sys.exit(any(u.find_spec(n) is None for n in {_REQUIRED_MODULES}))"
    )
    result = subprocess.run([python, "-c", check_program], capture_output=True, check=False, timeout=60)
    return (
        ""
        if result.returncode == 0
        else f"{' or '.join(_REQUIRED_MODULES)} is not installed for {python}; {_HOW_TO_INSTALL}"
    )


def run_saved_model(
    python: str, path: Path, folder: Path, outputs: Sequence[str], feeds: Sequence[Arrays]
) -> list[Arrays]:
    """Convert `path` into `folder` and run the result on `feeds`, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        cases, results = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
        arrays: dict[str, Any] = {
            f"{index}/{name}": array for index, feed in enumerate(feeds) for name, array in feed.items()
        }
        np.savez(cases, **arrays)
        arguments = json.dumps({"model": str(path), "folder": str(folder), "inputs": str(cases), "outputs_file": str(results), "outputs": list(outputs)})  # fmt: skip  # noqa: E501
        result = subprocess.run(
            [python or sys.executable, "-c", _PROGRAM, arguments],
            capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS, cwd=scratch,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
        if result.returncode:
            raise StageError(f"onnx2tf does not convert the file: {_cause(result.stderr)}")
        with np.load(results) as outputs_:
            return [{name: outputs_[f"{index}/{name}"] for name in outputs} for index in range(len(feeds))]


def _cause(stderr: str) -> str:
    """Return the first error in the output, from which the others follow; else its last words."""
    errors = [line.strip() for line in stderr.splitlines() if re.match(r"\s*\w*(Error|Exception): ", line)]
    return errors[0][:400] if errors else " ".join(stderr.split()[-40:])


# Runs where only onnx2tf, TensorFlow and numpy are. onnx2tf keeps the order of outputs, not always their names.
_PROGRAM = """
import json, shutil, sys
from pathlib import Path
from typing import Any
import onnx2tf, numpy, onnx, tensorflow
job = json.loads(sys.argv[1])
names = [value.name for value in onnx.load(job["model"], load_external_data=False).graph.input]
onnx2tf.convert(
    input_onnx_file_path=job["model"], output_folder_path=job["folder"], non_verbose=True, not_use_onnxsim=True,
    output_signaturedefs=True, keep_shape_absolutely_input_names=names,
)
for extra in Path(job["folder"]).glob("*.tflite"):
    extra.unlink()
serve = tensorflow.saved_model.load(job["folder"]).signatures["serving_default"]
feeds = {}
with numpy.load(job["inputs"]) as inputs:
    for key in inputs.files:
        index, _, name = key.partition("/")
        feeds.setdefault(index, {})[name] = tensorflow.constant(inputs[key])
results = {}
for index, feed in feeds.items():
    outputs = serve(**feed)
    order = job["outputs"]
    if not set(order) <= set(outputs):
        order = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
    if len(order) != len(job["outputs"]):
        raise SystemExit(f"it has the outputs {sorted(outputs)}, the model has {job['outputs']}")
    for name, key in zip(job["outputs"], order):
        results[f"{index}/{name}"] = outputs[key].numpy()
numpy.savez(job["outputs_file"], **results)
"""
