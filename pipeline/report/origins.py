"""What the run was made of: data and its checks, environment, configuration, and the words that make it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.spec.config import Config
from pipeline.spec.facts import Facts
from pipeline.spec.html import Child, Html, el, pairs, table
from pipeline.spec.run import STEPS
from pipeline.spec.section import Section
from pipeline.spec.task import SPLITS
from pipeline.spec.wording import number, short

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
