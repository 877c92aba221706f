"""`pipe export --data`: the answers of a model that exists already, compared with labels and with another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, save
from PIL import Image

from pipeline.system.files import read_object
from tests.e2e import given_models
from tests.e2e.test_given import newest, pipe, predictor


def judged(project: Path) -> dict[str, Any]:
    values: dict[str, Any] = read_object(newest(project).output("evaluate") / "metrics.json")
    return values


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.long
def test_classes_of_a_table_are_compared_with_another_model(tmp_path: Path) -> None:
    given_models.write_classifier(tmp_path / "good.onnx")
    given_models.write_classifier(tmp_path / "poor.onnx", coefficients=[0.0, 0.0, 0.3, 2.0, 1.0, -2.0])
    numbers = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "good.onnx")
    labels = session.run(["label"], {"X": numbers})[0]
    labels[:40] = (labels[:40] + 1) % 3
    rows = [f"{x!r},{label},{y!r}" for (x, y), label in zip(numbers.tolist(), labels.tolist(), strict=True)]
    (tmp_path / "rows.csv").write_text("\n".join(["left,label,right", *rows]))

    pipe(tmp_path, "export", "good.onnx", "--data", "rows.csv", "--baseline", "poor.onnx")
    values = judged(tmp_path / "good")
    assert values["candidate"]["accuracy"] == 0.9
    assert values["baseline"]["accuracy"] < 0.87
    assert newest(tmp_path / "good").bundle().manifest.verdict == "pass"

    bundle = newest(tmp_path / "good").bundle_path
    words = ("export", "poor.onnx", "--to", "worse", "--data", "rows.csv", "--baseline", str(bundle))
    assert "candidate rejected: accuracy is " in pipe(tmp_path, *words, expect=3).stderr


def test_numbers_are_compared_with_predicted_ones(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 3), ("y", 1)))
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph([helper.make_node("ReduceSum", ["x", "axes"], ["y"])], "g", [x], [y], [axes])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "sum.onnx")
    numbers = np.random.default_rng(0).integers(-9, 9, (60, 3)).tolist()
    write_rows(tmp_path / "rows.jsonl", [{"x": row, "label": sum(row) + 0.5} for row in numbers])
    pipe(tmp_path, "export", "sum.onnx", "--data", "rows.jsonl")
    assert judged(tmp_path / "sum")["candidate"]["mae"] == pytest.approx(0.5)


@pytest.mark.long
def test_texts_are_compared_with_the_names_or_numbers_of_classes(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    given_models.write_bert(tmp_path / "bert")
    texts = [f"I have {word} {end}" for word in given_models.WORDS[4:] for end in (".", "!", "soup", "film cold")]
    write_rows(tmp_path / "rows.jsonl", [{"text": text, "label": i % 3} for i, text in enumerate(texts)])
    pipe(tmp_path, "export", "bert", "--to", "project", "--data", "rows.jsonl")
    served = predictor(newest(tmp_path / "project"))
    answers = [answer for i in range(0, len(texts), 8) for answer in served.predict(texts[i : i + 8])]
    expected = np.mean([answer["label"] == ("bad", "so-so", "good")[i % 3] for i, answer in enumerate(answers)])
    assert judged(tmp_path / "project")["candidate"]["accuracy"] == pytest.approx(expected)
    write_rows(tmp_path / "rows.jsonl", [{"text": text, "label": "fine"} for text in texts])
    message = "'fine' is no class of the model; its classes are bad, so-so, good"
    assert message in pipe(tmp_path, "export", "bert", "--to", "other", "--data", "rows.jsonl", expect=2).stderr


@pytest.mark.long
def test_finetuning_continues_from_the_weights_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    given_models.write_bert(tmp_path / "bert")
    words = given_models.WORDS[4:]
    texts = [" ".join(words[i : i + 3] + words[:j]) for i in range(len(words) - 2) for j in range(8)]
    rows = [{"text": text, "label": "good" if "a" in text.split()[0] else "bad"} for text in texts]
    write_rows(tmp_path / "rows.jsonl", rows[::2])
    write_rows(tmp_path / "train.jsonl", rows[1::2])
    pipe(tmp_path, "export", "bert", "--to", "project", "--data", "rows.jsonl")
    before = judged(tmp_path / "project")["candidate"]["accuracy"]
    finetune = ("run", "evaluate", "train.epochs=30", "train.batch_size=16", "train.lr=0.003")
    refused = pipe(tmp_path / "project", *finetune, expect=2).stderr
    assert "to finetune it, set TRAIN in labelled.py to other data" in refused
    code = tmp_path / "project" / "labelled.py"
    code.write_text(code.read_text().replace('TRAIN = ""', 'TRAIN = "../train.jsonl"'))
    pipe(tmp_path / "project", *finetune)
    assert judged(tmp_path / "project")["candidate"]["accuracy"] > before + 0.2


@pytest.mark.long
def test_pictures_are_labelled_by_their_folders(tmp_path: Path) -> None:
    (tmp_path / "vit").mkdir()
    given_models.write_vit(tmp_path / "vit")
    rng = np.random.default_rng(0)
    for number in range(40):
        file = tmp_path / "pictures" / "abcd"[number % 4] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(file)
    pipe(tmp_path, "export", "vit", "--to", "project", "--data", "pictures")
    values = judged(tmp_path / "project")
    assert (values["samples"], values["classes"]) == (40, list("abcd"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "good.onnx"], "--baseline: is compared on labelled data; to fix it: add --data"),
        (["--data", "empty.csv"], "empty.csv: every row needs the field `label`, and another one"),
        (["--data", "good.onnx"], "good.onnx: read_table reads .csv, .tsv and .parquet files"),
    ],
)
def test_wrong_data_is_one_sentence_and_leaves_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    given_models.write_classifier(tmp_path / "good.onnx")
    (tmp_path / "empty.csv").write_text("a,b\n1,2\n")
    done = pipe(tmp_path, "export", "good.onnx", "--to", "project", *words, expect=2)
    assert message in done.stderr
    assert not (tmp_path / "project").exists()
