"""A file as the body of a V1 request, where the codec names its media type."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import jsonschema
import pytest

from tests.serve.bundles import build

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running

# An instance is a file of 64 grey values behind the four bytes GREY.
CODEC = """
import base64
import numpy as np
from pipeline.system.errors import InvalidPayload

class GreyCodec:
    media_types = ("image/x-grey", "image/png")

    def decode(self, instances):
        files = [base64.b64decode(one["b64"]) if "b64" in one else None for one in instances]
        if any(file is not None and (file[:4] != b"GREY" or len(file) != 68) for file in files):
            raise InvalidPayload("instances: each must be a file of GREY and 64 bytes in base64")
        pixels = [one["image"] if file is None else np.frombuffer(file[4:], np.uint8).reshape(8, 8)
                  for one, file in zip(instances, files)]
        return {"image": np.array(pixels, np.float32)[:, None]}

    def encode(self, outputs):
        return [int(row.argmax()) for row in outputs["logits"]]
"""
FILE = b"GREY" + bytes(range(64))
PATH = "/v1/models/tiny:predict"


@pytest.fixture(scope="module")
def grey(
    module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory, picture: list[list[int]]
) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("grey") / "bundle"
    build(path, "GreyCodec", CODEC, [{"image": picture}], lambda logits: [int(row.argmax()) for row in logits])
    with httpx.Client(base_url=module_launcher(path).url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("content_type", ["image/x-grey", "IMAGE/PNG", "image/png; charset=utf-8"])
def test_file_is_one_instance(grey: httpx.Client, content_type: str) -> None:
    answer = grey.post(PATH, content=FILE, headers={"content-type": content_type})
    as_json = grey.post(PATH, json={"instances": [{"b64": base64.b64encode(FILE).decode()}]})
    assert (answer.status_code, answer.json()) == (200, as_json.json())


def test_file_may_be_compressed_and_sent_to_a_version(grey: httpx.Client) -> None:
    headers = {"content-type": "image/png", "content-encoding": "gzip"}
    answer = grey.post("/v1/models/tiny/versions/1:predict", content=gzip.compress(FILE), headers=headers)
    assert answer.status_code == 200
    assert len(answer.json()["predictions"]) == 1


def test_file_that_the_codec_rejects_is_a_bad_request(grey: httpx.Client) -> None:
    for content in (b"", b"GREY"):
        answer = grey.post(PATH, content=content, headers={"content-type": "image/png"})
        assert answer.status_code == 400
        assert "a file of GREY and 64 bytes" in answer.json()["error"]


def test_other_types_are_refused_and_the_accepted_ones_named(grey: httpx.Client, server: Running) -> None:
    answer = grey.post(PATH, content=FILE, headers={"content-type": "image/gif"})
    assert answer.status_code == 415
    assert answer.json()["error"] == (
        "content-type: 'image/gif' given, send application/json or image/x-grey or image/png"
    )
    answer = httpx.post(server.url + PATH, content=FILE, headers={"content-type": "image/png"}, timeout=60)
    assert answer.status_code == 415
    assert answer.json()["error"] == "content-type: 'image/png' given, send application/json"
    answer = grey.post("/v2/models/tiny/infer", content=FILE, headers={"content-type": "image/png"})
    assert answer.status_code == 415


def test_openapi_lists_the_types(grey: httpx.Client) -> None:
    operation = grey.get("/openapi.json").json()["paths"][PATH]["post"]
    assert list(operation["requestBody"]["content"]) == ["application/json", "image/x-grey", "image/png"]
    jsonschema.validate("text", operation["requestBody"]["content"]["image/png"]["schema"])


def test_templates_for_pictures_take_a_file(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    from pipeline.contract.codec import load_codec, media_types

    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.jpg")
    for template in ("images", "image-to-image"):
        folder = Path(__file__).parents[2] / "examples" / "templates" / template
        codec = load_codec("codec.py:Codec", folder)
        assert media_types(codec, template) == ("image/png", "image/jpeg")
        for file in ("red.png", "red.jpg"):
            arrays = codec.decode([{"b64": base64.b64encode((tmp_path / file).read_bytes()).decode()}])
            assert len(arrays["image"]) == 1
