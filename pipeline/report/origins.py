"""Where everything came from: data, the chain of digests, environment, configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipeline.report.facts import Facts
from pipeline.report.wording import number, short
from pipeline.spec.html import Child, Html, el, pairs, table
from pipeline.spec.task import SPLITS

_LISTED = 60  # classes


@dataclass(frozen=True)
class Link:
    """One thing of the chain, with its digest as each file that names it has it (empty: not reached)."""

    name: str
    told: tuple[str, ...]

    @property
    def digests(self) -> list[str]:
        return list(dict.fromkeys(digest for digest in self.told if digest))

    @property
    def broken(self) -> bool:
        return len(self.digests) > 1


def data(facts: Facts) -> Child:
    splits = facts.data.get("splits")
    if not splits:
        return None
    splits = {name: splits[name] for name in (*SPLITS, *splits) if name in splits}
    rows = [
        (name, number(split.get("samples")), el("code", short(split.get("fingerprint", ""))))
        for name, split in splits.items()
    ]
    return [table(["split", "samples", "fingerprint"], rows), _balance(facts, splits), _duplicates(facts)]


def links(facts: Facts) -> list[Link]:
    """The chain as the bundle's manifest tells it, beside what the run's own files say."""
    told = facts.manifest.get("ancestors", {})
    train = facts.step("train")
    trained = train.outputs.get("model.safetensors", "") if train else ""
    bundle = facts.digests.get("manifest.json", "")
    return [
        Link("code", (told.get("code", ""),)),
        Link("data", (told.get("data", ""), facts.digests.get("data.json", ""))),
        Link("checkpoint", (told.get("checkpoint", ""), facts.verdict.get("checkpoint", ""), trained)),
        Link("verdict", (told.get("verdict", ""), facts.digests.get("verdict.json", ""))),
        Link("ONNX", (told.get("onnx", ""), facts.parity.get("onnx_sha256", ""))),
        Link("bundle", (bundle,)),
        Link("image", (str(facts.image.get("image_digest") or ""),)),
        Link("service", (str(facts.deploy.get("bundle") or ""), bundle if facts.deploy else "")),
    ]


def lineage(facts: Facts) -> Html:
    chain = links(facts)
    broken = [link.name for link in chain if link.broken]
    text = "Every prediction names the bundle in its header; each digest below is recorded in the next."
    note = el("p", text, class_="muted")
    if broken:
        text = f"The chain is broken at {', '.join(broken)}: what is recorded is not what the run holds."
        note = el("p", text, class_="note bad")
    return el("div", note, el("ol", [_node(link) for link in chain], class_="chain"))


def environment(facts: Facts) -> Child:
    return pairs(sorted(facts.file.environment.items()))


def config(facts: Facts) -> Child:
    return el("pre", json.dumps(facts.file.config, indent=2, sort_keys=True, default=str), class_="config")


def _node(link: Link) -> Html:
    if not link.digests:
        return el("li", el("b", link.name), el("code", "not reached"), class_="none")
    codes = [el("code", short(digest), title=digest) for digest in link.digests]
    return el("li", el("b", link.name), codes, class_="bad" if link.broken else "good")


def _balance(facts: Facts, splits: dict[str, dict[str, dict[str, int]]]) -> Html | None:
    classes = next((split["classes"] for split in splits.values() if split.get("classes")), None)
    if not classes:
        return None
    rows = []
    for name in (facts.classes or list(classes))[:_LISTED]:
        counts = [(split.get("classes") or {}).get(name, 0) for split in splits.values()]
        rows.append((name, *[number(count) for count in counts]))
    summary = el("summary", f"Class balance ({len(classes)} classes)")
    return el("details", summary, table(["class", *splits], rows), open="")


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
