"""The export step with variants: the shipped one is in the bundle and named in all its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from export.__main__ import export
from pipeline.contract.bundle import open_bundle
from pipeline.system.errors import StageError
from pipeline.system.files import digest_file
from pipeline.verify import verify_bundle

from .test_step import CODEC, TASK, evaluated_run, refusal


def test_shipped_variant_is_named_in_all_files(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "sums_task.py").write_text(TASK)
    (tmp_path / "sums_codec.py").write_text(CODEC)
    words = {"variants": ["int8-dynamic", "int8-static"], "choose": "int8-dynamic", "variant_margin": 0.1}
    run = evaluated_run(tmp_path, export=words)
    export(run, tmp_path)
    bundle = open_bundle(run.partial("export") / "bundle")
    assert bundle.signature.variant == "int8-dynamic"
    assert "MatMulInteger" in {node.op_type for node in onnx.load(bundle.model).graph.node}
    assert "int8-dynamic (this bundle)" in (bundle.path / "card.md").read_text()
    parity = json.loads((run.partial("export") / "parity.json").read_text())
    assert (parity["variant"], parity["onnx_sha256"]) == ("int8-dynamic", digest_file(bundle.model))
    found = json.loads((run.partial("export") / "variants.json").read_text())
    assert [(one["variant"], one["chosen"], one["passed"]) for one in found] == [
        ("fp32", False, True),
        ("int8-dynamic", True, True),
        ("int8-static", False, False),
    ]
    assert "9 training samples are too few to learn ranges from" in found[2]["reason"]
    assert sorted(path.name for path in run.partial("export").iterdir()) == ["bundle", "parity.json", "variants.json"]
    assert [*verify_bundle(bundle.path)][-1] == "golden requests are answered as at export"
    assert "*  int8-dynamic" in capsys.readouterr().out
    again = evaluated_run(tmp_path, export={**words, "choose": "int8-static"})
    assert "export.choose=int8-static is not shipped: calibration: 9 training" in refusal(again, tmp_path, StageError)
    assert not any(row["chosen"] for row in json.loads((again.partial("export") / "variants.json").read_text()))
