"""The chain of digests as a graph: what each thing came from, and where what is recorded is not what the run holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.report.scale import drawing, label, px
from pipeline.spec.facts import Facts
from pipeline.spec.html import Html, el, table
from pipeline.spec.wording import short

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
