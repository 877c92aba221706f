"""One line of the judgement of the data, and what is done about all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warn", "off"]
Level: TypeAlias = Literal["ok", "warn", "error"]
Against: TypeAlias = Literal["splits", "champion"]

_NAMED = 5

SPLITS: Against = "splits"
CHAMPION: Against = "champion"


@dataclass(frozen=True)
class Finding:
    """What a check found in one place; `severity` is what configuration makes of a limit that is passed."""

    check: str
    where: str
    severity: Severity
    passed: bool
    detail: str
    value: float | None = None
    limit: float | None = None
    against: Against = SPLITS

    @property
    def level(self) -> Level:
        return "ok" if self.passed or self.severity == "off" else self.severity

    def row(self) -> dict[str, Any]:
        body = asdict(self) | {"level": self.level, "value": rounded(self.value), "limit": rounded(self.limit)}
        return {name: value for name, value in body.items() if name not in ("severity", "passed")}

    def sentence(self) -> str:
        return f"{self.where}: {self.detail}"


def listed(names: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def rounded(value: float | None) -> float | None:
    """As many digits as mean something, and never infinite."""
    return None if value is None else float(f"{min(value, 1e300):.6g}")
