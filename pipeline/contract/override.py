"""Overrides of a failed verdict: who, when, why, and exactly which verdict. Run and bundle contain them."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pipeline.contract.errors import PipelineError
from pipeline.contract.files import write_json
from pipeline.contract.settings.section import Frozen

OVERRIDE_FILE = "override.json"  # of a run, and of the bundle made of it
OVERRIDDEN = "overridden"  # the verdict in the manifest of such a bundle, and the status of such an evaluation


class Override(Frozen):
    at: str
    by: str
    reason: str
    verdict: str  # SHA-256 of the verdict.json it is about

    def __str__(self) -> str:
        return f"overridden by {self.by}, {self.at}: {self.reason}"


def read_override(directory: Path) -> Override | None:
    """Return the override in the directory of a run or a bundle, whichever verdict it is about."""
    path = directory / OVERRIDE_FILE
    try:
        return Override.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise PipelineError(f"{path}: damaged ({error.errors()[0]['msg']}); `pipe gate override` writes it") from error


def write_override(directory: Path, override: Override) -> None:
    write_json(directory / OVERRIDE_FILE, override.model_dump())


def passed_gate(verdict: str) -> bool:
    """Return whether a model with this verdict may be deployed; older versions wrote `forced` for `overridden`."""
    return verdict in ("pass", "no-baseline", OVERRIDDEN) or verdict.startswith("forced")
