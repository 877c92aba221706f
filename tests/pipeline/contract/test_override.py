from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.contract.bundle import (
    Ancestors,
    Override,
    open_bundle,
    passed_gate,
    read_override,
    write_manifest,
    write_override,
)
from pipeline.system.errors import BundleError, PipelineError
from pipeline.system.files import digest_file

GIVEN = Override(at="2026-01-02", by="ann@here", reason="shown on Monday", verdict="v")


def seal(bundle: Path, verdict: str, override: str) -> None:
    onnx = digest_file(bundle / "model.onnx")
    ancestors = Ancestors(code="c", data="d", checkpoint="w", verdict="v", onnx=onnx, override=override)
    write_manifest(bundle, "pairs", verdict, ancestors)


def test_override_is_read_from_its_bundle(bundle: Path) -> None:
    write_override(bundle, GIVEN)
    seal(bundle, "overridden", digest_file(bundle / "override.json"))
    assert open_bundle(bundle).override == GIVEN
    assert str(GIVEN) == "overridden by ann@here, 2026-01-02: shown on Monday"


def test_a_bundle_that_passed_has_none(bundle: Path) -> None:
    assert open_bundle(bundle).override is None


@pytest.mark.parametrize("verdict", ["overridden", "pass"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_verdict_lineage_and_override_file_must_agree(bundle: Path, verdict: str, named: bool, there: bool) -> None:
    if there:
        write_override(bundle, GIVEN)
    seal(bundle, verdict, digest_file(bundle / "override.json") if named and there else "f" * 64 if named else "")
    if (verdict == "overridden", named, there) in ((True, True, True), (False, False, False)):
        assert (open_bundle(bundle).override is not None) is there
    else:
        with pytest.raises(BundleError, match="do not match"):
            open_bundle(bundle)


def test_override_of_another_verdict_is_refused(bundle: Path) -> None:
    write_override(bundle, GIVEN.model_copy(update={"verdict": "another"}))
    seal(bundle, "overridden", digest_file(bundle / "override.json"))
    with pytest.raises(BundleError, match="about another verdict than the one in the lineage"):
        open_bundle(bundle)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "override.json").write_text('{"reason": 3}')
    with pytest.raises(PipelineError, match=r"override\.json: damaged"):
        read_override(tmp_path)


@pytest.mark.parametrize("verdict", ["pass", "no-baseline", "overridden", "fail", "passed"])
def test_verdicts_that_pass_the_gate(verdict: str) -> None:
    assert passed_gate(verdict) is (verdict not in ("fail", "passed"))
