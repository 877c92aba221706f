"""The version of a step stands for its code in the keys; here the code of each version is recorded.

To accept code that computes the same: `python -m tests.pipeline.test_step_code`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.plan import STEP_KINDS, StepKind
from pipeline.system.files import digest_mapping
from pipeline.system.sources import SOURCE_ROOT, digest_tree, parse_source

from .package_files import package_files

RECORDED = Path(__file__).with_name("step_code.json")
CACHED = [kind for kind in STEP_KINDS.values() if kind.cached]


def current(kind: StepKind) -> dict[str, object]:
    paths = {path.relative_to(SOURCE_ROOT).as_posix(): path for path in package_files(kind.module)}
    digests = {name: digest_tree(parse_source(path.read_bytes(), name)) for name, path in paths.items()}
    return {"version": kind.version, "code": digest_mapping(digests)}


@pytest.mark.parametrize("kind", CACHED, ids=lambda kind: kind.name)
def test_code_that_may_compute_something_else_has_another_version(kind: StepKind) -> None:
    recorded = json.loads(RECORDED.read_text())[kind.name]
    assert recorded == current(kind), (
        f"code of `{kind.name}` changed: raise its version in pipeline/plan.py if results can differ, "
        "or accept: python -m tests.pipeline.test_step_code"
    )


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({kind.name: current(kind) for kind in CACHED}, indent=2) + "\n")
