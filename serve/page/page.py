"""The page for people at `GET /`: what the model is, how it does now, and a form that asks it something."""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from pipeline.spec.html import Child, Html, el, table
from pipeline.spec.signature import TensorSpec
from serve.model import OnnxPlane
from serve.page.markdown import render as markdown
from serve.page.page_data import embedded
from serve.refusal import Headers
from serve.served import Served

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

    current: Served
    versions: Sequence[Served]
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


def _ask(served: Served) -> Html:
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


def _path(served: Served) -> str:
    if served.writer is not None and not served.bundle.signature.codec:
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


def _signature(served: Served) -> Html:
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
    if (mirror := shown.current.mirror) is not None:
        same, others = mirror.agreement.same, mirror.agreement.other + mirror.agreement.failed
        role = f"shadow: gets copies of {mirror.share:.0%}; answered {same:,} alike, {others:,} otherwise"
        rows.append(("–", el("code", mirror.digest[:12], title=mirror.digest), "–", role))
    return el("section", el("h2", "Versions"), table(("version", "bundle", "verdict", "role"), rows, numbers=False))


def _role(one: Served, current: Served) -> str:
    canary = current.canary
    if canary is not None and one is canary.candidate:
        return f"canary: gets {canary.share:.0%} of the requests"
    if one is current:
        return "answers by default" if canary is None else "answers the other requests"
    return f"at /versions/{one.version}"


def _card(served: Served) -> Html | None:
    try:
        text = (served.bundle.path / "card.md").read_text(errors="replace")
    except OSError as error:  # as with the example
        log.warning("the page shows no card: %s", error)
        return None
    return el("section", el("h2", "Model card"), el("div", markdown(text, level=3), class_="card"), class_="about")


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
