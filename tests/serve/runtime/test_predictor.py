from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.system.errors import BundleError, InvalidPayload
from serve.runtime.predictor import CodecError, Predictor
from serve.runtime.session import Session
from tests.k8s import doubling_bundle
from tests.serve.bundles import build, digits, seal
from tests.serve.conftest import ROOT


@pytest.fixture(scope="module")
def predictor(bundle: Bundle) -> Predictor:
    return Predictor(bundle, Session(bundle, "cpu", 1))


@pytest.fixture
def tricky(tricky_path: Path) -> Predictor:
    bundle = open_bundle(tricky_path)
    return Predictor(bundle, Session(bundle, "cpu", 1))


def test_predictions_keep_the_order_of_instances(predictor: Predictor, picture: list[list[int]]) -> None:
    blank = [[0] * 8] * 8
    both = predictor.predict([picture, blank])
    assert [one["digit"] for one in both] == [predictor.predict([one])[0]["digit"] for one in (picture, blank)]


def test_codec_error_is_reported_without_its_message(tricky: Predictor, picture: list[list[int]]) -> None:
    with pytest.raises(CodecError, match=r"^instances: the model's codec cannot decode them$") as caught:
        tricky.predict([{"image": picture, "fail": "decode"}])
    assert "a secret of the server" in str(caught.value.__cause__), "the log shows it with the request"


def test_missing_package_of_the_codec_is_named(bundle: Bundle) -> None:
    signature = bundle.signature.model_copy(update={"requires": ("no-such-package==1.2",)})
    with pytest.raises(
        BundleError, match=r"its codec needs no-such-package==1\.2, which is not installed; to fix it: pip install"
    ):
        Predictor(replace(bundle, signature=signature), Session(bundle, "cpu", 1))


def test_decoded_arrays_must_fit_the_model(tricky: Predictor) -> None:
    with pytest.raises(InvalidPayload, match=r"image: shape \[1, 1, 2\] does not fit \[batch, 1, 8, 8\]"):
        tricky.predict([{"image": [1, 2]}])
    with pytest.raises(InvalidPayload, match=r"codec cannot decode"):
        tricky.predict([{"image": [[1], [1, 2]]}])


def test_null_is_refused_where_no_number_was_missing(tricky: Predictor, picture: list[list[Any]]) -> None:
    """numpy turns null into NaN, and some operators turn NaN into numbers that look like a prediction."""
    holes = [[None, *row[1:]] for row in picture]
    with pytest.raises(InvalidPayload, match=r"image: holds null or NaN, but the model was trained without"):
        tricky.predict([{"image": holes}])
    (spec,) = tricky.signature.inputs
    tricky.signature = tricky.signature.model_copy(
        update={"inputs": (spec.model_copy(update={"allows_missing": True}),)}
    )
    (part,) = tricky.decode([{"image": holes}])
    assert np.isnan(part.arrays["image"]).any()


def test_two_models_have_different_helpers_of_one_name(tmp_path: Path, picture: list[list[int]]) -> None:
    predictors = []
    for number in (1, 2):
        own = build(tmp_path / str(number), "codec.py:DigitsCodec", "", [picture], digits)
        (own / "codec.py").unlink()
        (own / "codec").mkdir()
        source = (ROOT / "examples/digits/codec.py").read_text()
        (own / "codec" / "codec.py").write_text(f"{source}\n\nfrom utils import encode\nDigitsCodec.encode = encode\n")
        (own / "codec" / "utils.py").write_text(f"def encode(self, outputs):\n    return [{number}]\n")
        seal(own)
        predictors.append(Predictor(opened := open_bundle(own), Session(opened)))
        assert not list(own.rglob("__pycache__"))
    assert [predictor.predict([picture]) for predictor in predictors] == [[1], [2]]


def test_encoding_failure_is_not_a_client_error(tricky: Predictor, picture: list[list[int]]) -> None:
    with pytest.raises(RuntimeError, match="a secret"):
        tricky.predict([{"image": picture, "fail": "encode"}])


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_predictions_is_a_server_error(tmp_path: Path, picture: list[list[int]], count: int) -> None:
    source = (ROOT / "examples/digits/codec.py").read_text()
    wrong = f"{source}\n\nDigitsCodec.encode = lambda self, outputs: [0] * {count}\n"
    bundle = open_bundle(build(tmp_path / "bundle", "DigitsCodec", wrong, [picture], digits))
    with pytest.raises(ValueError, match=f"codec.encode returned {count} predictions for 2 instances"):
        Predictor(bundle, Session(bundle)).predict([picture, picture])


def test_further_arrays_of_decode_reach_encode_only(tmp_path: Path) -> None:
    codec = """
import numpy as np


class C:
    def decode(self, instances):
        return {"x": np.asarray(instances, np.float32), "count": np.arange(len(instances))}

    def encode(self, outputs, inputs):
        return [[*row, count] for row, count in zip(outputs["y"].tolist(), inputs["count"].tolist())]
"""
    bundle = doubling_bundle.make_bundle(tmp_path, codec=codec)
    predictor = Predictor(bundle, Session(bundle, "cpu", 1))
    assert predictor.predict([[1, 2], [3, 4]]) == [[2, 4, 0], [6, 8, 1]]
