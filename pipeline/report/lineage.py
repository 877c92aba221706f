"""The chain of digests as a graph: what each thing came from, and where what is recorded is not what the run holds.

What the run was made of: data and its checks, environment, configuration, and the words that make it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.config import Config
from pipeline.contract.facts import Facts
from pipeline.contract.html import Child, Html, el, number, pairs, short, table
from pipeline.contract.run import STEPS
from pipeline.contract.settings.section import Section
from pipeline.contract.task import SPLITS
from pipeline.report.charts import drawing, label, px

_BOX_WIDTH, _BOX_HEIGHT = 148, 50
_ORIGINS = ("pretrained weights", "code", "data")
_PARENTS = {
    "checkpoint": _ORIGINS,
    "verdict": ("checkpoint",),
    "ONNX": ("checkpoint",),
    "bundle": ("verdict", "ONNX"),
    "image": ("bundle",),
    "service": ("bundle",),
}
_RANKS = (
    _ORIGINS,
    ("checkpoint",),
    ("verdict", "ONNX"),
    ("bundle",),
    ("image", "service"),
)


@dataclass(frozen=True)
class Link:
    """One thing of the chain, with its digest as each file that names it has it (empty: not reached)."""

    name: str
    told: tuple[str, ...]
    note: str = ""

    @property
    def digests(self) -> list[str]:
        return list(dict.fromkeys(digest for digest in self.told if digest))

    @property
    def broken(self) -> bool:
        return len(self.digests) > 1


def links(facts: Facts) -> list[Link]:
    """The chain as the bundle's manifest tells it, beside what the run's own files say."""
    told = facts.manifest.get("ancestors") or {}
    train = facts.step("train")
    trained = train.outputs.get("model.safetensors", "") if train else ""
    bundle = facts.digests.get("manifest.json", "")
    begun = str(facts.data.get("pretrained") or "")
    return [
        *([Link("pretrained weights", (begun,))] if begun else []),
        Link("code", (told.get("code", ""),)),
        Link("data", (told.get("data", ""), facts.digests.get("data.json", ""))),
        Link("checkpoint", (told.get("checkpoint", ""), facts.verdict.get("checkpoint", ""), trained)),
        Link("verdict", (told.get("verdict", ""), facts.digests.get("verdict.json", "")), facts.standing),
        Link("ONNX", (told.get("onnx", ""), str(facts.parity.get("onnx_sha256") or ""))),
        Link("bundle", (bundle,), "signed" if facts.signed else ""),
        Link("image", (str(facts.image.get("image_digest") or ""),)),
        Link("service", (str(facts.deploy.get("bundle") or ""), bundle if facts.deploy else "")),
    ]


def lineage(facts: Facts) -> Html:
    chain = links(facts)
    broken = [link.name for link in chain if link.broken]
    text = "Every prediction names the bundle in its header; each digest below is recorded in what its arrow leads to."
    note = el("p", text, class_="muted")
    if broken:
        text = f"The chain is broken at {', '.join(broken)}: what is recorded is not what the run holds."
        note = el("p", text, class_="note bad")
    rows = [(link.name, [el("code", digest) for digest in link.digests] or "not reached") for link in chain]
    listed = el("details", el("summary", "All digests in full"), table(["what", "SHA-256"], rows, numbers=False))
    return el("div", note, _graph(chain, True), _graph(chain, False), listed)


def _graph(chain: Sequence[Link], wide: bool) -> Html:
    """From left to right; on a narrow screen from top to bottom."""
    places = dict(_places({link.name: link for link in chain}, wide))
    width = max(x for x, _ in places.values()) + _BOX_WIDTH + 2
    height = max(y for _, y in places.values()) + _BOX_HEIGHT + 2
    arrows = [
        _arrow(places[parent], places[child], wide)
        for child, parents in _PARENTS.items()
        for parent in parents
        if parent in places and child in places
    ]
    boxes = [_box(link, *places[link.name]) for link in chain]
    text = ", ".join(f"{link.name} {' and '.join(map(short, link.digests)) or 'not reached'}" for link in chain)
    return drawing("Lineage", text, (arrows, boxes), width, height, "graph across" if wide else "graph down")


def _places(chain: dict[str, Link], wide: bool) -> Iterator[tuple[str, tuple[float, float]]]:
    """Things of one rank beside each other, in the middle of the way."""
    ranks = [[name for name in rank if name in chain] for rank in _RANKS]
    gap = 16
    across = _BOX_HEIGHT if wide else _BOX_WIDTH
    most = max(map(len, ranks)) * (across + gap) - gap
    for i, rank in enumerate(ranks):
        free = most - (len(rank) * (across + gap) - gap)
        for j, name in enumerate(rank):
            side = 1 + free / 2 + j * (across + gap)
            along = 1 + i * ((_BOX_WIDTH + 52) if wide else (_BOX_HEIGHT + 34))
            yield name, (along, side) if wide else (side, along)


def _box(link: Link, x: float, y: float) -> Html:
    kind = "broken" if link.broken else "" if link.digests else "none"
    digests = " ≠ ".join(short(one)[:6] for one in link.digests) if link.broken else "".join(map(short, link.digests))
    told = "\n".join(link.digests) or "not reached"
    heading = f"{link.name} · {link.note}" if link.note else link.name
    return el(
        "g",
        el("title", f"{link.name}\n{told}"),
        el("rect", x=px(x), y=px(y), width=_BOX_WIDTH, height=_BOX_HEIGHT, rx=3),
        label(x + 12, y + 21, heading, "start name"),
        label(x + 12, y + 39, digests or "not reached", "start digest"),
        class_=f"node {kind}".strip(),
    )


def _arrow(begin: tuple[float, float], end: tuple[float, float], wide: bool) -> Html:
    (x1, y1), (x2, y2) = begin, end
    if wide:
        x1, y1, y2 = x1 + _BOX_WIDTH, y1 + _BOX_HEIGHT / 2, y2 + _BOX_HEIGHT / 2
        middle = (x1 + x2) / 2
        path = f"M{px(x1)} {px(y1)}C{px(middle)} {px(y1)} {px(middle)} {px(y2)} {px(x2 - 7)} {px(y2)}"
        tip = f"M{px(x2)} {px(y2)}l-8 -4v8z"
    else:
        x1, y1, x2 = x1 + _BOX_WIDTH / 2, y1 + _BOX_HEIGHT, x2 + _BOX_WIDTH / 2
        middle = (y1 + y2) / 2
        path = f"M{px(x1)} {px(y1)}C{px(x1)} {px(middle)} {px(x2)} {px(middle)} {px(x2)} {px(y2 - 7)}"
        tip = f"M{px(x2)} {px(y2)}l-4 -8h8z"
    return el("g", el("path", d=path, class_="edge"), el("path", d=tip, class_="tip"))


_LISTED = 60  # classes
_LEVELS = {"ok": ("good-text", "✓ in order"), "warn": ("warn-text", "! warning"), "error": ("bad-text", "✕ error")}
_UNKNOWN = ("muted-text", "–")


def data(facts: Facts) -> Child:
    if not facts.splits:
        return None
    splits = {name: facts.splits[name] for name in (*SPLITS, *facts.splits) if name in facts.splits}
    rows = [
        (name, number(split.get("samples")), el("code", short(split.get("fingerprint", ""))))
        for name, split in splits.items()
    ]
    found = [table(["split", "samples", "fingerprint"], rows), _duplicates(facts), _checks(facts)]
    return [*found, _balance(facts, splits)]


def environment(facts: Facts) -> Child:
    return pairs(sorted(facts.file.environment.items()))


def reproduce(facts: Facts) -> Child:
    """The command that makes it again, and what each step was called with."""
    parent = el("p", "Rerun of ", el("code", facts.file.parent), class_="muted") if facts.file.parent else None
    ran = [(name, record.argv) for name in STEPS if (record := facts.step(name)) and record.argv]
    rows = [(name, el("code", " ".join(argv))) for name, argv in ran]
    calls = el("details", el("summary", "What each step was called with"), table(["step", "command"], rows, False))
    text = "Makes the run again from its own configuration and says whether the same came out."
    again = el("p", el("code", f"pipe repro {facts.file.id}", class_="command"))
    return [el("p", text, class_="muted"), again, parent, calls if rows else None]


def config(facts: Facts) -> Child:
    rows = [(key, el("code", value), el("code", usual)) for key, value, usual in changed(facts.file.config)]
    whole = el("pre", json.dumps(facts.file.config, indent=2, sort_keys=True, default=str), class_="config")
    continued = [el("p", "Went on with ", el("code", word), class_="muted") for word in facts.file.continued]
    settings = table(["setting", "value", "default"], rows, numbers=False)
    return [settings, continued, el("details", el("summary", "The whole configuration"), whole)]


def changed(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Settings that are not the defaults, each with its value and the default; keys of other versions count too."""
    yield from _changed(Config, config, "")


def _changed(kind: type[Section] | None, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, value in values.items():
        field = kind.model_fields.get(name) if kind else None
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, Section) and isinstance(value, Mapping):
            yield from _changed(inner, value, f"{prefix}{name}.")
            continue
        usual = None if field is None or field.is_required() else _plain(field.get_default(call_default_factory=True))
        if value != usual:
            yield f"{prefix}{name}", _written(value), "" if usual is None else _written(usual)


def _plain(value: Any) -> Any:
    """As run.json would have it."""
    dumped = value.model_dump(mode="json") if isinstance(value, Section) else value
    return json.loads(json.dumps(dumped, default=str))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _balance(facts: Facts, splits: dict[str, dict[str, Any]]) -> Html | None:
    classes = next((split["classes"] for split in splits.values() if split.get("classes")), None)
    if not classes:
        return None
    rows = []
    for name in (facts.classes or list(classes))[:_LISTED]:
        counts = [(split.get("classes") or {}).get(name, 0) for split in splits.values()]
        rows.append((name, *[number(count) for count in counts]))
    summary = el("summary", f"Class balance ({len(classes)} classes)")
    return el("details", summary, table(["class", *splits], rows))


def _duplicates(facts: Facts) -> Html:
    count = facts.data.get("duplicate_count", 0)
    if not count:
        return el("p", "No sample stands in more than one split.", class_="muted")
    pairs = [
        f"{pair['b']['split']}[{pair['b']['index']}] = {pair['a']['split']}[{pair['a']['index']}]"
        for pair in facts.data.get("duplicates", [])[:10]
    ]
    text = (
        f"{number(count)} samples stand in more than one split: {', '.join(pairs)}{' …' if count > len(pairs) else ''}"
    )
    return el("p", text, class_="note bad")


def _checks(facts: Facts) -> Html | None:
    if not facts.checks:
        return None
    rank = {level: i for i, level in enumerate(("error", "warn", "ok"))}
    ordered = sorted(facts.checks, key=lambda one: rank.get(str(one.get("level")), 0))
    rows = [
        (
            f"{one.get('check', '')}",
            f"{one.get('where') or ''}",
            _level(one),
            number(one.get("value")),
            number(one.get("limit")),
            el("span", str(one.get("detail") or ""), class_="words"),
        )
        for one in ordered
    ]
    return table(["check", "where", "outcome", "value", "limit", "what was found"], rows, words=(1, 2, 5))


def _level(one: dict[str, Any]) -> Html:
    kind, word = _LEVELS.get(str(one.get("level")), _UNKNOWN)
    return el("span", word, class_=kind)
