"""OpenAI's own client against a service that embeds texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest

from pipeline.contract.codec import embedding_sizes
from pipeline.system.errors import ConfigError, InvalidPayload
from serve.protocol.embeddings import parse
from tests.serve.embedder import build, vector

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running

TEXTS = ["hello world", "x", "größer"]


@pytest.fixture(scope="module")
def server(module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return module_launcher(build(tmp_path_factory.mktemp("embed") / "bundle"))


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def _vectors(client: openai.OpenAI, texts: Any, **fields: Any) -> Any:
    found = client.embeddings.create(model="tiny", input=texts, **fields)
    assert [one.index for one in found.data] == list(range(len(found.data)))
    return np.array([one.embedding for one in found.data])


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_vectors_are_those_of_the_model(client: openai.OpenAI, encoding: dict[str, Any]) -> None:
    expected = np.stack([vector(text) for text in TEXTS])
    found: Any = client.embeddings.create(model="tiny", input=TEXTS, **encoding)
    rows = [
        np.frombuffer(base64.b64decode(one.embedding), "<f4") if isinstance(one.embedding, str) else one.embedding
        for one in found.data
    ]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    tokens = sum(len(text.encode()) for text in TEXTS)
    assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (tokens, tokens, "tiny")


def test_inputs_may_be_texts_or_token_ids(client: openai.OpenAI) -> None:
    ids = [list(text.encode()) for text in TEXTS]
    np.testing.assert_allclose(_vectors(client, ids), _vectors(client, TEXTS), atol=1e-6)
    np.testing.assert_allclose(_vectors(client, ids[0]), _vectors(client, TEXTS[0]), atol=1e-6)


def test_vectors_are_cut_to_sizes_of_the_model(client: openai.OpenAI) -> None:
    whole = _vectors(client, TEXTS)
    cut = _vectors(client, TEXTS, dimensions=4)
    np.testing.assert_allclose(cut, whole[:, :4] / np.linalg.norm(whole[:, :4], axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "kind", "param", "sentence"),
    [
        ({"model": "no"}, openai.NotFoundError, None, "no model 'no'"),
        ({"input": []}, openai.BadRequestError, "input", "give a text"),
        ({"input": [1, "x"]}, openai.BadRequestError, "input", "give a text"),
        ({"input": ["x", ""]}, openai.BadRequestError, "input", "each must be a text"),
        ({"input": "x" * 21}, openai.BadRequestError, "input", "20"),
        ({"input": ["x"] * 5}, openai.BadRequestError, "input", "5 in one request exceed the limit of 4"),
        ({"dimensions": 3}, openai.BadRequestError, "dimensions", "3 is none of the sizes of this model: 2, 4"),
        ({"encoding_format": "hex"}, openai.BadRequestError, "encoding_format", "invalid enum value 'hex'"),
        ({"extra_body": {"truncate": 1}}, openai.BadRequestError, "truncate", "is not supported"),
    ],
)
def test_errors_have_openais_types(
    client: openai.OpenAI, fields: dict[str, Any], kind: Any, param: str | None, sentence: str
) -> None:
    with pytest.raises(kind) as caught:
        client.embeddings.create(**{"model": "tiny", "input": "x", **fields})
    body: Any = caught.value.body
    assert sentence in body["message"]
    assert (body["type"], body["param"]) == ("invalid_request_error", param)


def test_an_embedder_is_listed_and_described(client: openai.OpenAI, server: Running) -> None:
    assert [one.id for one in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="does not generate text"):
        client.completions.create(model="tiny", prompt="x")
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    openai_paths = {path for path in document["paths"] if path.startswith("/openai")}
    assert "/openai/v1/embeddings" in openai_paths
    assert "/openai/v1/completions" not in openai_paths
    fields = {"model": "tiny", "input": TEXTS, "dimensions": None}
    answer = httpx.post(f"{server.url}/openai/v1/embeddings", json=fields, timeout=60)
    for value, scheme in ((fields, "Request"), (answer.json(), "Answer")):
        reference = {"$ref": f"#/components/schemas/texts.embeddings.{scheme}", "components": document["components"]}
        jsonschema.validate(value, reference)
    assert len(answer.headers["x-bundle-digest"]) == 64


def test_a_request_without_input_is_rejected() -> None:
    with pytest.raises(InvalidPayload, match="body: missing required field `input`"):
        parse(json.dumps({"model": "m", "input": None}).encode())


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"embeddings": "yes"}, r"write `embeddings = True`, found 'yes'"),
        ({"embeddings": True, "dimensions": 64}, r"write `dimensions = \(64, 256\)`, found 64"),
        ({"embeddings": True, "dimensions": (0,)}, r"write `dimensions"),
    ],
)
def test_invalid_attributes_of_a_codec_are_refused(attributes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        embedding_sizes(type("C", (), attributes), "codec.py:C")
    assert embedding_sizes(object(), "codec.py:C") is None
