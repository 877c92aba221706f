"""Sections on what the run was made of: data and its checks, lineage, environment, commands and configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.config import Config
from pipeline.contract.results import Body, Facts
from pipeline.contract.run import STEPS
from pipeline.contract.settings.section import Section, section_of
from pipeline.contract.task import SPLITS
from pipeline.report.charts import Chart, Group, Label, Path, Rectangle, Shape, px
from pipeline.system.wording import number, short

_MAX_CLASSES = 60  # shown
_LEVELS = ("error", "warn", "ok")
_BOX_WIDTH, _BOX_HEIGHT = 148, 50
_GAP = 16  # between boxes of one rank
_INPUTS = ("pretrained weights", "code", "data")
_PARENTS = {
    "checkpoint": _INPUTS,
    "verdict": ("checkpoint",),
    "ONNX": ("checkpoint",),
    "bundle": ("verdict", "ONNX"),
    "image": ("bundle",),
    "service": ("bundle",),
}
_RANKS = (_INPUTS, ("checkpoint",), ("verdict", "ONNX"), ("bundle",), ("image", "service"))


def data(facts: Facts) -> Body | None:
    if not facts.splits:
        return None
    splits = {name: facts.splits[name] for name in (*SPLITS, *facts.splits) if name in facts.splits}
    classes = next((split["classes"] for split in splits.values() if split.get("classes")), None) or {}
    balance = [
        (name, *[number((split.get("classes") or {}).get(name, 0)) for split in splits.values()])
        for name in ((facts.classes or list(classes))[:_MAX_CLASSES] if classes else ())
    ]
    rank = {level: i for i, level in enumerate(_LEVELS)}
    return {
        "splits": splits,
        "checks": sorted(facts.checks, key=lambda check: rank.get(str(check.get("level")), 0)),
        "class_count": len(classes),
        "balance": balance,
    }


def environment(facts: Facts) -> Body:
    return {"rows": sorted(facts.file.environment.items())}


def reproduce(facts: Facts) -> Body:
    """Return the command that repeats the run, and the command line of each step."""
    records = [(name, record.argv) for name in STEPS if (record := facts.step(name)) and record.argv]
    return {"file": facts.file, "commands": [(name, " ".join(argv)) for name, argv in records]}


def configuration(facts: Facts) -> Body:
    return {
        "changed": list(changed_settings(Config, facts.file.config)),
        "overrides": facts.file.continued,
        "whole": json.dumps(facts.file.config, indent=2, sort_keys=True, default=str),
    }


def changed_settings(
    kind: type[Section] | None, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield settings that differ from the default, with value and default; settings of other versions count too."""
    for name, value in values.items():
        field = kind.model_fields.get(name) if kind else None
        section = section_of(field) if field else None
        if section and isinstance(value, Mapping):
            yield from changed_settings(section, value, f"{prefix}{name}.")
            continue
        default = None
        if field is not None and not field.is_required():
            default = _recorded_form(field.get_default(call_default_factory=True))
        if value != default:
            yield f"{prefix}{name}", _text(value), "" if default is None else _text(default)


def _recorded_form(value: Any) -> Any:
    """Return a default as run.json would store it."""
    plain = value.model_dump(mode="json") if isinstance(value, Section) else value
    return json.loads(json.dumps(plain, default=str))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Artifact:
    """One link of the digest chain, with its digest from each file that records it (empty: not reached)."""

    name: str
    recorded: tuple[str, ...]
    note: str = ""

    @property
    def digests(self) -> list[str]:
        return list(dict.fromkeys(digest for digest in self.recorded if digest))

    @property
    def is_broken(self) -> bool:
        return len(self.digests) > 1


def digest_chain(facts: Facts) -> list[Artifact]:
    """Compare the chain recorded in the bundle's manifest with the run's own files."""
    ancestors = facts.manifest.get("ancestors") or {}
    train = facts.step("train")
    model_digest = train.outputs.get("model.safetensors", "") if train else ""
    bundle = facts.digests.get("manifest.json", "")
    pretrained = str(facts.data.get("pretrained") or "")
    return [
        *([Artifact("pretrained weights", (pretrained,))] if pretrained else []),
        Artifact("code", (ancestors.get("code", ""),)),
        Artifact("data", (ancestors.get("data", ""), facts.digests.get("data.json", ""))),
        Artifact("checkpoint", (ancestors.get("checkpoint", ""), facts.verdict.get("checkpoint", ""), model_digest)),
        Artifact(
            "verdict", (ancestors.get("verdict", ""), facts.digests.get("verdict.json", "")), facts.effective_verdict
        ),
        Artifact("ONNX", (ancestors.get("onnx", ""), str(facts.parity.get("onnx_sha256") or ""))),
        Artifact("bundle", (bundle,), "signed" if facts.signed else ""),
        Artifact("image", (str(facts.image.get("image_digest") or ""),)),
        Artifact("service", (str(facts.deploy.get("bundle") or ""), bundle if facts.deploy else "")),
    ]


def lineage(facts: Facts) -> Body:
    chain = digest_chain(facts)
    return {
        "chain": chain,
        "broken": [artifact.name for artifact in chain if artifact.is_broken],
        "graphs": [_graph(chain, wide=True), _graph(chain, wide=False)],
        "accepted": facts.accepted_changes,
    }


def _graph(chain: Sequence[Artifact], wide: bool) -> Chart:
    """Left to right, or top to bottom for narrow screens."""
    positions = dict(_places({artifact.name for artifact in chain}, wide))
    width = max(x for x, _ in positions.values()) + _BOX_WIDTH + 2
    height = max(y for _, y in positions.values()) + _BOX_HEIGHT + 2
    arrows = [
        _arrow(positions[parent], positions[child], wide)
        for child, parents in _PARENTS.items()
        for parent in parents
        if parent in positions and child in positions
    ]
    boxes = [_box(artifact, *positions[artifact.name]) for artifact in chain]
    text = ", ".join(
        f"{artifact.name} {' and '.join(map(short, artifact.digests)) or 'not reached'}" for artifact in chain
    )
    return Chart("Lineage", text, [*arrows, *boxes], width, height, "graph across" if wide else "graph down")


def _places(names: set[str], wide: bool) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield the corner of each box: boxes of one rank side by side, centered."""
    ranks = [[name for name in rank if name in names] for rank in _RANKS]
    across, along = (_BOX_HEIGHT, _BOX_WIDTH + 52) if wide else (_BOX_WIDTH, _BOX_HEIGHT + 34)
    longest = max(map(len, ranks)) * (across + _GAP) - _GAP
    for i, rank in enumerate(ranks):
        margin = (longest - (len(rank) * (across + _GAP) - _GAP)) / 2
        for j, name in enumerate(rank):
            a, b = 1 + i * along, 1 + margin + j * (across + _GAP)
            yield name, (a, b) if wide else (b, a)


def _box(artifact: Artifact, x: float, y: float) -> Group:
    digests = artifact.digests
    kind = " broken" if artifact.is_broken else "" if digests else " none"
    short_digests = (
        " ≠ ".join(short(digest)[:6] for digest in digests) if artifact.is_broken else "".join(map(short, digests))
    )
    heading = f"{artifact.name} · {artifact.note}" if artifact.note else artifact.name
    shapes: list[Shape] = [
        Rectangle(x, y, _BOX_WIDTH, _BOX_HEIGHT, "", radius=3),
        Label(x + 12, y + 21, heading, "start name"),
        Label(x + 12, y + 39, short_digests or "not reached", "start digest"),
    ]
    return Group(shapes, f"node{kind}", "\n".join([artifact.name, *(digests or ["not reached"])]))


def _arrow(start: tuple[float, float], end: tuple[float, float], wide: bool) -> Group:
    (x1, y1), (x2, y2) = start, end
    if wide:
        x1, y1, y2 = x1 + _BOX_WIDTH, y1 + _BOX_HEIGHT / 2, y2 + _BOX_HEIGHT / 2
        middle = (x1 + x2) / 2
        path = f"M{px(x1)} {px(y1)}C{px(middle)} {px(y1)} {px(middle)} {px(y2)} {px(x2 - 7)} {px(y2)}"
        arrow_head = f"M{px(x2)} {px(y2)}l-8 -4v8z"
    else:
        x1, y1, x2 = x1 + _BOX_WIDTH / 2, y1 + _BOX_HEIGHT, x2 + _BOX_WIDTH / 2
        middle = (y1 + y2) / 2
        path = f"M{px(x1)} {px(y1)}C{px(x1)} {px(middle)} {px(x2)} {px(middle)} {px(x2)} {px(y2 - 7)}"
        arrow_head = f"M{px(x2)} {px(y2)}l-4 -8h8z"
    return Group([Path(path, "edge"), Path(arrow_head, "tip")])
