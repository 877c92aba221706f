"""The DeepSeek section of docs/training.md, run as it is written, and distilled models of both kinds, barely trained.

Every command of the document runs in its order. `typed` has the differences: paths and addresses that exist,
a small part of the data, little training, and a lenient gate.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.contract.pretrained import WEIGHT_INDEX
from pipeline.contract.run import all_runs
from pipeline.system.sources import SOURCE_ROOT
from tests.ports import free_port

from .project_folder import PIPE, ProjectFolder, environment, wait_for

pytestmark = pytest.mark.long
LITTLE = ("train.max_samples=16", "train.epochs=1", "train.processes=1", "evaluate.margin=9", "package.builder=none")
_SECONDS = 1500
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 256}


@pytest.fixture
def projects(tmp_path: Path) -> Iterator[tuple[ProjectFolder, ProjectFolder]]:
    ignored = shutil.ignore_patterns("runs", "__pycache__")
    shutil.copytree(SOURCE_ROOT / "examples" / "deepseek", tmp_path / "deepseek", symlinks=True, ignore=ignored)
    small(tmp_path / "deepseek")
    walkers = tuple(ProjectFolder.with_free_port(tmp_path / "deepseek" / name) for name in ("pretrain", "classify"))
    yield walkers[0], walkers[1]
    for project in walkers:
        project.stop()


def small(folder: Path) -> None:
    """Use a twelfth of the library's files, and few documents for validation and test."""
    for file, old, new in (
        ("corpus.py", 'sorted(library.rglob("*.py"))', 'sorted(library.rglob("*.py"))[::12]'),
        ("pretrain/task.py", '{"validation": 96, "test": 192}', '{"validation": 4, "test": 8}'),
    ):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))


def official(folder: Path, kind: str) -> Path:
    """Write a tiny random checkpoint in the official layout: configuration, tokenizer, shards and their index."""
    folder.mkdir()
    program = "import sys, pathlib as p, vocabulary; vocabulary.train_tokenizer(['x'], 280, p.Path(sys.argv[1]))"
    here = SOURCE_ROOT / "examples" / "deepseek"
    variables = environment({"PYTHONPATH": f"{here}:{SOURCE_ROOT}"})
    subprocess.run([sys.executable, "-c", program, str(folder)], env=variables, cwd=here, check=True, timeout=120)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=280, pad_token_id=2, **heads, **_SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / WEIGHT_INDEX).is_file(), "in shards"
    return folder


def document() -> list[list[str]]:
    """Return the words of each documented command without `pipe`."""
    training = (SOURCE_ROOT / "docs" / "training.md").read_text()
    section = training.partition("\n## DeepSeek\n")[2].partition("\n## ")[0]
    bodies = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    lines = [line for body in bodies for line in body.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert commands[0] == ["cd", "examples/deepseek"]
    assert all(words[0] == "pipe" for words in commands[1:])
    return [words[1:] for words in commands[1:]]


def typed(words: list[str], weights: Path, address: str, ports: dict[str, int]) -> list[str]:
    text = [re.sub(r"/models/[\w.-]+", str(weights), word).replace("first.example:29400", address) for word in words]
    return [*text, *LITTLE, f"deploy.port={ports[words[1]]}"] if words[2] == "run" else text


def test_documented_commands_lead_to_predictions(projects: tuple[ProjectFolder, ProjectFolder], tmp_path: Path) -> None:
    weights, address = official(tmp_path / "weights", "qwen2"), f"127.0.0.1:{free_port()}"
    ports = {project.folder.name: project.port for project in projects}
    waiting: list[subprocess.Popen[str]] = []
    stdout: list[str] = []
    pretrain, classify = projects
    for words in (typed(words, weights, address, ports) for words in document()):
        if "train.nodes=2" in words:
            waiting.append(begun(words, tmp_path / "deepseek"))
            continue
        done = ended(begun(words, tmp_path / "deepseek"), words)
        if words[2] == "join":
            ended(waiting.pop(), ["run", "of two nodes"])
        if words[2] == "predict":
            stdout.append(done)
    assert not waiting
    assert len(stdout) == 3
    assert_answers(stdout)
    assert_lineage(pretrain, classify)


def begun(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command; if another machine has to join, wait until training waits for it."""
    process = subprocess.Popen(
        [*PIPE, *words],
        cwd=folder,
        env=environment({}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if "train.nodes=2" in words:
        wait_for(lambda: process.poll() is not None or waits(folder / words[1] / "runs"), seconds=_SECONDS)
    return process


def waits(runs: Path) -> bool:
    newest = all_runs(runs)[0].read()
    return newest.config["train"]["nodes"] == 2 and "train" in newest.steps  # type: ignore[index]


def ended(process: subprocess.Popen[str], words: list[str]) -> str:
    try:
        out, err = process.communicate(timeout=_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, f"pipe {' '.join(words)}\n{out}\n{err}"
    return out


def assert_answers(stdout: list[str]) -> None:
    for text in stdout:
        for answer in json.loads(text)["predictions"]:
            assert answer["package"] in answer["probabilities"]
            assert sum(answer["probabilities"].values()) == pytest.approx(1)


def assert_lineage(pretrain: ProjectFolder, classify: ProjectFolder) -> None:
    """Check the pretrained weights that each run recorded, and the multi-token layer of one."""
    multi_token, plain = all_runs(pretrain.runs)
    several, one, own = all_runs(classify.runs)
    recorded = [json.loads((run.output("prepare") / "pretrained.json").read_text()) for run in (own, one, several)]
    assert [body["run"] for body in recorded] == [plain.id, "", ""]
    assert recorded[1]["digest"] == recorded[2]["digest"] != recorded[0]["digest"]
    assert (own.bundle_path / "files" / "tokenizer.json").read_bytes() == (
        plain.bundle_path / "files" / "tokenizer.json"
    ).read_bytes()
    generation = plain.bundle().signature.generation
    assert generation is not None and len(generation.caches) == 2 * 4
    assert multi_token.bundle().signature.generation == generation, "the served model has no multi-token layer"
    [last] = [json.loads(line) for line in journal(multi_token) if "validation" in line]
    assert last["validation"]["minus_multi_token_loss"] < 0


def journal(run: Any) -> list[str]:
    text: str = (run.output("train") / "metrics.jsonl").read_text()
    return text.splitlines()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_distilled_model_is_adapted_exported_and_served(
    kind: str, projects: tuple[ProjectFolder, ProjectFolder], tmp_path: Path
) -> None:
    weights, classify = official(tmp_path / kind, kind), projects[1]
    one_step = ("train.max_samples=8", "train.batch_size=8", "train.epochs=1")
    words = (f"model.pretrained={weights}", "model.adapter=lora", f"deploy.port={classify.port}", *LITTLE, *one_step)
    classify.pipe("run", "all", *words, seconds=_SECONDS)
    run = classify.latest
    assert json.loads((run.output("train") / "summary.json").read_text())["steps"] == 1
    assert json.loads((run.output("prepare") / "files" / "config.json").read_text())["model_type"] == kind
    (classify.folder / "request.json").write_text(json.dumps({"instances": ["import xml.dom\n\nparser.feed(data)"]}))
    assert_answers([classify.pipe("predict", "request.json", "-o", "json").stdout])
    status, headers, found = classify.request(
        "/v1/models/deepseek-classify:predict", {"instances": ["import os", "a = 1"]}
    )
    assert (status, len(found["predictions"])) == (200, 2), headers
    status, _, found = classify.request("/v1/models/deepseek-classify:predict", {"instances": [" "]})
    assert status == 400 and "the text is empty" in found["error"]
    classify.pipe("stop")
