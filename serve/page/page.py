"""The page for people at `GET /`: what the model is, how it does now, and a form that asks it something.

What the page's script works with: the form it shows, and the counters it polls.

The model card as HTML: headings, paragraphs, lists, tables and code; anything else stays the text it is.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson

from pipeline.contract.html import Child, Html, el, flat, table
from pipeline.contract.signature import Generation, TensorSpec
from serve.errors import Headers
from serve.model_version import ModelVersion
from serve.models import OnnxPlane

_HERE = Path(__file__).resolve().parent
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='9' fill='%233b5bdb'/%3E"
    "%3Cpath d='M8 16h5m6 0h5' stroke='white' stroke-width='3.4' stroke-linecap='round'/%3E"
    "%3Ccircle cx='16' cy='16' r='3.6' fill='white'/%3E%3C/svg%3E"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """One model as it is at this moment; taken on the event loop, rendered off it."""

    current: ModelVersion
    versions: Sequence[ModelVersion]
    others: Sequence[str]  # the names of the other models of this server
    ready: bool

    @classmethod
    def of(cls, plane: OnnxPlane, query: bytes) -> Shown:
        """The model that `?model=` names, or the first."""
        name = dict(parse_qsl(query.decode("latin-1"))).get("model", plane.names[0])
        model = plane.model(name)
        others = [other for other in plane.names if other != name]
        return cls(model.served(), tuple(model.versions.values()), others, bool(model.ready) and not plane.draining)


def wanted(accept: bytes) -> bool:
    """A browser asks for HTML by name; probes and scripts do not."""
    return b"text/html" in accept


def headers() -> Headers:
    """Nothing from elsewhere, no script and no style but ours, in nobody's frame."""
    policy = (
        f"default-src 'none'; script-src {_source('page.js')}; style-src {_source('page.css')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
        (b"vary", b"accept"),
    )


def render(shown: Shown) -> bytes:
    name = shown.current.name
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{name} · prediction service"),
        el("link", rel="icon", href=_ICON),
        el("style", Html(_text("page.css"))),
    )
    body = el(
        "body",
        _top(shown),
        el("main", _ask(shown.current), _live(), _signature(shown.current), _versions(shown), _card(shown.current)),
        _foot(shown),
        el("script", Html(embedded(shown.current)), type="application/json", id="data"),
        el("script", Html(_text("page.js"))),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n".encode()


def _top(shown: Shown) -> Html:
    bundle, session = shown.current.bundle, shown.current.predictor.session
    provider = session.provider.removesuffix("ExecutionProvider")
    state = ("ready", "good") if shown.ready else ("not ready", "bad")
    verdict = bundle.manifest.verdict
    facts: list[Child] = [
        el("span", state[0], class_=f"pill {state[1]}", id="state"),
        el(
            "span",
            f"verdict: {verdict}",
            class_=f"pill {'good' if verdict == 'pass' else 'warn'}",
            title=str(bundle.override) if bundle.override else None,
        ),
        el("span", f"runs on {provider}", class_="pill", title=session.fallback or None),
    ]
    models = None
    if shown.others:
        links = [el("a", name, href=f"/?model={name}") for name in shown.others]
        models = el("nav", el("span", "Other models: "), [[link, " "] for link in links], aria_label="Other models")
    return el(
        "header",
        el("div", el("h1", shown.current.name), el("div", facts, class_="pills"), class_="title"),
        el("p", "bundle ", el("code", bundle.digest[:12], title=bundle.digest), class_="muted"),
        models,
    )


def _ask(served: ModelVersion) -> Html:
    """Filled by the script, which knows what kind of form it is to be."""
    without = el("p", "This form needs JavaScript. Over HTTP: ", el("code", _path(served)), class_="muted")
    return el(
        "section",
        el("h2", "Try it", id="try-title"),
        el("div", el("noscript", without), id="form"),
        el("div", id="answer", aria_live="polite"),
        class_="try",
        aria_labelledby="try-title",
    )


def _path(served: ModelVersion) -> str:
    if served.generator is not None and not served.bundle.signature.codec:
        return "POST /openai/v1/completions"
    return f"POST /v1/models/{served.name}:predict"


def _live() -> Html:
    tiles = (
        ("rate", "requests a second"),
        ("p50", "half answered within"),
        ("p99", "99 % answered within"),
        ("failed", "failed or refused"),
        ("batch", "instances a batch"),
        ("waiting", "waiting now"),
    )
    shown = [el("div", el("dt", text), el("dd", "–", id=f"live-{key}"), class_="tile") for key, text in tiles]
    return el(
        "section",
        el("h2", "Live", id="live-title"),
        el("dl", shown, class_="tiles"),
        el("div", id="spark", class_="spark", role="img", aria_label="Requests a second, the last two minutes"),
        el("p", "The last minute of this process, all versions together.", class_="muted", id="live-note"),
        class_="live",
        aria_labelledby="live-title",
    )


def _signature(served: ModelVersion) -> Html:
    signature = served.bundle.signature
    rows = [_tensor("in", spec) for spec in signature.inputs] + [_tensor("out", spec) for spec in signature.outputs]
    limits = f"At most {signature.limits.max_batch_size:,} instances and {signature.limits.max_body_bytes:,} bytes a request."  # fmt: skip  # noqa: E501
    return el(
        "section",
        el("h2", "Signature"),
        table(("tensor", "direction", "datatype", "shape"), rows, numbers=False),
        el("p", limits, class_="muted"),
    )


def _tensor(direction: str, spec: TensorSpec) -> Sequence[Child]:
    return el("code", spec.name), direction, spec.datatype, " × ".join(map(str, spec.shape)) or "one value"


def _versions(shown: Shown) -> Html:
    rows: list[Sequence[Child]] = [
        (
            one.version,
            el("code", one.bundle.digest[:12], title=one.bundle.digest),
            one.bundle.manifest.verdict,
            _role(one, shown.current),
        )
        for one in shown.versions
    ]
    if (mirror := shown.current.shadow) is not None:
        same, others = mirror.agreement.same, mirror.agreement.other + mirror.agreement.failed
        role = f"shadow: gets copies of {mirror.share:.0%}; answered {same:,} alike, {others:,} otherwise"
        rows.append(("–", el("code", mirror.digest[:12], title=mirror.digest), "–", role))
    return el("section", el("h2", "Versions"), table(("version", "bundle", "verdict", "role"), rows, numbers=False))


def _role(one: ModelVersion, current: ModelVersion) -> str:
    canary = current.canary
    if canary is not None and one is canary.candidate:
        return f"canary: gets {canary.share:.0%} of the requests"
    if one is current:
        return "answers by default" if canary is None else "answers the other requests"
    return f"at /versions/{one.version}"


def _card(served: ModelVersion) -> Html | None:
    try:
        text = (served.bundle.path / "card.md").read_text(errors="replace")
    except OSError as error:  # as with the example
        log.warning("the page shows no card: %s", error)
        return None
    return el(
        "section", el("h2", "Model card"), el("div", render_markdown(text, level=3), class_="card"), class_="about"
    )


def _foot(shown: Shown) -> Html:
    links = (
        ("OpenAPI", "/openapi.json"),
        ("metrics", "/metrics"),
        ("metadata", f"/v2/models/{shown.current.name}"),
        ("ready?", "/v2/health/ready"),
    )
    return el("footer", el("nav", [[el("a", text, href=path), " "] for text, path in links], aria_label="For machines"))


@functools.cache
def _text(name: str) -> str:
    return (_HERE / name).read_text()


@functools.cache
def _source(name: str) -> str:
    """What a content security policy calls this very text."""
    digest = hashlib.sha256(_text(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_MOST_EXAMPLE_BYTES = 256 << 10  # a larger one would make the page heavy; the signature is enough to make another


def embedded(served: ModelVersion) -> str:
    """JSON that no content can lead out of its element."""
    told = {
        "model": served.name,
        "version": served.version,
        "digest": served.bundle.digest,
        "form": form(served),
    }
    text = orjson.dumps(told, default=str).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def form(served: ModelVersion) -> dict[str, Any]:
    """What the page's form sends: instances through the codec where there is an example, words, or raw tensors."""
    instances, tensors = _examples(served)
    inputs = [
        {"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in served.bundle.signature.inputs
    ]
    drawing = served.predictor.drawing
    if drawing is not None:
        return {"kind": "drawing", "drawing": drawing.model_dump(), "examples": instances}
    if instances:
        return {"kind": "instances", "examples": instances}
    if served.generator is not None:
        return words(served.generator.tokenizer.generation)
    return {"kind": "tensors", "examples": tensors, "inputs": inputs}


def words(generation: Generation) -> dict[str, Any]:
    """A text box: a message where the model knows conversations, else the beginning of a text."""
    chat = bool(generation.template)
    path = f"/openai/v1/{'chat/completions' if chat else 'completions'}"
    return {
        "kind": "words",
        "examples": [],
        "chat": chat,
        "path": path,
        "most": min(64, generation.positions_limit // 2),
    }


def _examples(served: ModelVersion) -> tuple[list[Any], list[Any]]:
    """The golden instances, and the first golden row as the body of an inference; empty where too large to carry."""
    try:
        golden = served.bundle.golden()
    except OSError as error:  # the bundle's folder may go once it is loaded; the service lives on, and so does its page
        log.warning("the page shows no example: %s", error)
        return [], []
    arrays = {name: array[:1] for name, array in golden.inputs.items()}
    if sum(array.size for array in arrays.values()) > _MOST_EXAMPLE_BYTES // 4:
        return _within(golden.instances), []
    specs = {spec.name: spec for spec in served.bundle.signature.inputs}
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": specs[name].datatype, "data": array.ravel().tolist()}
        for name, array in arrays.items()
    ]
    return _within(golden.instances), _within([{"inputs": inputs}])


def _within(examples: Sequence[Any]) -> list[Any]:
    """As many of them as the page can carry."""
    found, size = [], 0
    for one in examples:
        size += len(orjson.dumps(one, default=str))
        if size > _MOST_EXAMPLE_BYTES:
            break
        found.append(one)
    return found


def counters(models: Sequence[tuple[ModelVersion, bool]], *, ready: bool) -> dict[str, Any]:
    """The counters as the script polls them; rates and quantiles are differences of two of these."""
    return {"ready": ready, "models": [_counted(one, current) for one, current in models]}


def _counted(served: ModelVersion, current: bool) -> dict[str, Any]:
    series = served.metrics
    series.flush()
    histograms = list(series.seconds.values())
    refused = sum(count for (_, code), count in series.requests.items() if code not in (200, "OK"))
    return {
        "model": served.name,
        "version": served.version,
        "current": current,
        "digest": served.bundle.digest,
        "requests": sum(series.requests.values()),
        "failed": refused,
        "seconds": [sum(counts) for counts in zip(*(one.counts for one in histograms), strict=True)],
        "bounds": list(histograms[0].bounds) if histograms else [],
        "batches": series.batch_rows.count,
        "rows": series.batch_rows.total,
        "waiting": served.batcher.waiting,
    }


_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<em>[^*\s][^*]*)\*"
    r"|\[(?P<text>[^\]]+)\]\((?P<link>https?://[^\s()<>]+)\)"
)
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?")
_DEEPEST = 6


def render_markdown(text: str, level: int = 2) -> Html:
    """`level`: what a heading of the first rank becomes on the page around it."""
    return flat(_blocks(text.splitlines(), level))


def _blocks(lines: Sequence[str], level: int) -> Iterator[Html]:
    place = 0
    while place < len(lines):
        kind = _kind(lines[place])
        end = place + 1
        if kind == "code":
            while end < len(lines) and _kind(lines[end]) != "code":
                end += 1
            yield el("pre", el("code", "\n".join(lines[place + 1 : end])))
            end += 1
        elif kind == "heading":
            yield _heading(lines[place], level)
        else:
            while end < len(lines) and _kind(lines[end]) == kind:
                end += 1
            if kind:
                yield _block(kind, lines[place:end])
        place = end


def _kind(line: str) -> str:
    bare = line.strip()
    if bare.startswith("```"):
        return "code"
    if re.match(r"#{1,6} ", bare):
        return "heading"
    if re.match(r"[-*] ", bare):
        return "list"
    return "table" if bare.startswith("|") else "paragraph" if bare else ""


def _heading(line: str, level: int) -> Html:
    marks, _, text = line.strip().partition(" ")
    return el(f"h{min(level + len(marks) - 1, _DEEPEST)}", inline(text))


def _block(kind: str, lines: Sequence[str]) -> Html:
    if kind == "list":
        return el("ul", [el("li", inline(line.strip()[2:])) for line in lines])
    if kind == "table":
        rows = [_cells(line) for line in lines if not _RULE.fullmatch(line.strip())]
        return table(rows[0], rows[1:], numbers=False) if rows else Html("")
    return el("p", inline(" ".join(line.strip() for line in lines)))


def _cells(line: str) -> list[Html]:
    return [inline(cell.strip()) for cell in line.strip().strip("|").split("|")]


def inline(text: str) -> Html:
    """What stands between the marks is escaped like all else."""
    parts: list[Child] = []
    place = 0
    for found in _INLINE.finditer(text):
        parts.append(text[place : found.start()])
        place = found.end()
        if found["link"]:
            parts.append(el("a", found["text"], href=found["link"], rel="noopener noreferrer"))
        else:
            kind = found.lastgroup or ""
            parts.append(el(kind, found[kind]))
    return flat(*parts, text[place:])
