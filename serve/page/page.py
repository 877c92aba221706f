"""The page at `GET /`: the model, live counters, a form to try it, and the model card.

The HTML is rendered here; the script draws the form and polls the counters. The card is Markdown with headings,
paragraphs, lists, tables and code; everything else is shown as plain text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import orjson

from pipeline.contract.signature import Generation, TensorSpec
from serve.errors import Headers
from serve.model_version import ModelVersion
from serve.models import ModelRepository
from serve.monitoring.metrics import SUCCESS
from serve.monitoring.snapshot import Snapshot, VersionSnapshot
from serve.protocol.examples import golden_row

_HERE = Path(__file__).resolve().parent
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='9' fill='%233b5bdb'/%3E"
    "%3Cpath d='M8 16h5m6 0h5' stroke='white' stroke-width='3.4' stroke-linecap='round'/%3E"
    "%3Ccircle cx='16' cy='16' r='3.6' fill='white'/%3E%3C/svg%3E"
)

log = logging.getLogger(__name__)


# Elements escape everything which is not already `Html`; a template engine would load in every service.

_VOID = {"meta", "link", "br", "img", "input"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


def el(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element, as in `el("td", 3, class_="number")`; None is left out, iterables are flattened."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    text = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    if name in _VOID:
        return Html(f"<{name}{text}>")
    return Html(f"<{name}{text}>{flat(*children)}</{name}>")


def flat(*children: Child) -> Html:
    return Html("".join(_text(child) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[Child]]) -> Html:
    """Return a table whose first column names the row."""
    names = [el("th", name, scope="col") for name in head]
    body = [el("tr", el("th", row[0], scope="row"), [el("td", cell) for cell in row[1:]]) for row in rows]
    return el("div", el("table", el("thead", el("tr", names)), el("tbody", body)), class_="scroll")


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return html.escape(str(child))
    return "".join(_text(inner) for inner in child)


@dataclass(frozen=True)
class PageModel:
    """A snapshot of one model, taken on the event loop and rendered in a thread."""

    current: ModelVersion
    versions: Sequence[ModelVersion]
    others: Sequence[str]  # the names of the other models of this server
    ready: bool

    @classmethod
    def of(cls, repository: ModelRepository, query: bytes) -> PageModel:
        """Return the model named by `?model=`, or the first."""
        name = dict(parse_qsl(query.decode("latin-1"))).get("model", repository.names[0])
        model = repository.find_model(name)
        others = [other for other in repository.names if other != name]
        return cls(model.find_version(), tuple(model.versions.values()), others, repository.model_ready(name))


def headers() -> Headers:
    """Allow only the page's own script and style, and no embedding in frames."""
    policy = (
        f"default-src 'none'; script-src {_csp_hash('page.js')}; style-src {_csp_hash('page.css')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
        (b"vary", b"accept"),
    )


def render(shown: PageModel) -> bytes:
    head = _head(f"{shown.current.name} · prediction service")
    body = el(
        "body",
        _header(shown),
        el(
            "main",
            _form_section(shown.current),
            _live_section(),
            _signature_section(shown.current),
            _versions_section(shown),
            _card_section(shown.current),
        ),
        _footer(shown),
        el("script", Html(embedded(shown.current)), type="application/json", id="data"),
        el("script", Html(_read_file("page.js"))),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n".encode()


def _head(title: str) -> Html:
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("link", rel="icon", href=_ICON),
        el("style", Html(_read_file("page.css"))),
    )


def _header(shown: PageModel) -> Html:
    bundle, session = shown.current.bundle, shown.current.predictor.session
    provider = session.provider.removesuffix("ExecutionProvider")
    state = ("ready", "good") if shown.ready else ("not ready", "bad")
    verdict, override = bundle.manifest.verdict, str(bundle.override) if bundle.override else None
    facts: list[Child] = [
        el("span", state[0], class_=f"pill {state[1]}", id="state"),
        el("span", f"verdict: {verdict}", class_=f"pill {'good' if verdict == 'pass' else 'warn'}", title=override),
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


def _form_section(served: ModelVersion) -> Html:
    """Return the element that the script fills with a form."""
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


def _live_section() -> Html:
    tiles = (
        ("rate", "requests per second"),
        ("p50", "median latency"),
        ("p99", "99th percentile"),
        ("failed", "failed or rejected"),
        ("batch", "instances per batch"),
        ("waiting", "waiting"),
    )
    shown = [el("div", el("dt", text), el("dd", "–", id=f"live-{key}"), class_="tile") for key, text in tiles]
    return el(
        "section",
        el("h2", "Live", id="live-title"),
        el("dl", shown, class_="tiles"),
        el("div", id="spark", class_="spark", role="img", aria_label="Requests per second in the last two minutes"),
        el("p", "The last minute of this process, all versions together.", class_="muted", id="live-note"),
        class_="live",
        aria_labelledby="live-title",
    )


def _signature_section(served: ModelVersion) -> Html:
    signature = served.bundle.signature
    rows = [_tensor_row("in", spec) for spec in signature.inputs]
    rows += [_tensor_row("out", spec) for spec in signature.outputs]
    limits = f"At most {signature.limits.max_batch_size:,} instances and {signature.limits.max_body_bytes:,} bytes per request."  # fmt: skip  # noqa: E501
    return el(
        "section",
        el("h2", "Signature"),
        table(("tensor", "direction", "datatype", "shape"), rows),
        el("p", limits, class_="muted"),
    )


def _tensor_row(direction: str, spec: TensorSpec) -> Sequence[Child]:
    datatype = f"{spec.datatype} or null" if spec.allows_missing else spec.datatype
    return el("code", spec.name), direction, datatype, " × ".join(map(str, spec.shape)) or "scalar"


def _versions_section(shown: PageModel) -> Html:
    rows: list[Sequence[Child]] = []
    for one in shown.versions:
        digest = el("code", one.bundle.digest[:12], title=one.bundle.digest)
        rows.append((one.version, digest, one.bundle.manifest.verdict, _role(one, shown.current)))
    if (mirror := shown.current.shadow) is not None:
        same, others = mirror.agreement.same, mirror.agreement.other + mirror.agreement.failed
        counted = f"{same:,} equal answers, {others:,} different"
        role = f"shadow: gets copies of {mirror.share:.0%} of the requests; {counted}"
        rows.append(("–", el("code", mirror.digest[:12], title=mirror.digest), "–", role))
    return el("section", el("h2", "Versions"), table(("version", "bundle", "verdict", "role"), rows))


def _role(one: ModelVersion, current: ModelVersion) -> str:
    canary = current.canary
    if canary is not None and one is canary.candidate:
        return f"canary: gets {canary.share:.0%} of the requests"
    if one is current:
        return "answers by default" if canary is None else "answers the other requests"
    return f"at /versions/{one.version}"


def _card_section(served: ModelVersion) -> Html | None:
    try:
        text = (served.bundle.path / "card.md").read_text(errors="replace")
    except OSError as error:  # as for the examples
        log.warning("the page shows no card: %s", error)
        return None
    card = el("div", render_markdown(text, level=3), class_="card")
    return el("section", el("h2", "Model card"), card, class_="about")


def _footer(shown: PageModel) -> Html:
    links = (
        ("OpenAPI", "/openapi.json"),
        ("metrics", "/metrics"),
        ("metadata", f"/v2/models/{shown.current.name}"),
        ("readiness", "/v2/health/ready"),
    )
    return el("footer", el("nav", [[el("a", text, href=path), " "] for text, path in links], aria_label="For programs"))


@functools.cache
def _read_file(name: str) -> str:
    return (_HERE / name).read_text()


@functools.cache
def _csp_hash(name: str) -> str:
    """Return the hash of a file as a content security policy names it."""
    digest = hashlib.sha256(_read_file(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_MAX_EXAMPLE_BYTES = 256 << 10  # larger examples are made by the script from the signature


def embedded(served: ModelVersion) -> str:
    """Return the script's data as JSON that cannot close its element."""
    data = {"model": served.name, "version": served.version, "digest": served.bundle.digest, "form": form(served)}
    text = orjson.dumps(data, default=str).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def form(served: ModelVersion) -> dict[str, Any]:
    """Describe the form: a drawing, fields or JSON for the codec, a prompt for a language model, or raw tensors."""
    fields, instances, tensors = _examples(served)
    inputs = [one.model_dump(include={"name", "datatype", "shape"}) for one in served.bundle.signature.inputs]
    drawing = served.predictor.drawing
    if drawing is not None:
        return {"kind": "drawing", "drawing": drawing.model_dump(), "examples": instances}
    if fields is not None:
        return {**fields, "examples": instances}
    if instances:
        return {"kind": "instances", "examples": instances}
    if (generation := served.bundle.signature.generation) is not None:
        return text_form(generation)
    return {"kind": "tensors", "examples": tensors, "inputs": inputs}


def text_form(generation: Generation) -> dict[str, Any]:
    """Describe the form for a language model: a message if it has a chat template, else the beginning of a text."""
    chat = bool(generation.template)
    path = f"/openai/v1/{'chat/completions' if chat else 'completions'}"
    tokens = min(64, generation.positions_limit // 2)
    return {"kind": "text", "examples": [], "chat": chat, "path": path, "max_tokens": tokens}


def _examples(served: ModelVersion) -> tuple[dict[str, Any] | None, list[Any], list[Any]]:
    """Return the fields of the golden instances, these instances, and the first golden row as a V2 request.

    What is too large for the page is empty.
    """
    try:
        golden = served.bundle.golden()
    except OSError as error:  # the bundle's folder may be deleted after loading
        log.warning("the page shows no example: %s", error)
        return None, [], []
    instances = golden.instances
    tensors = golden_row(golden, served.bundle.signature, _MAX_EXAMPLE_BYTES // 4)
    requests = [{"inputs": tensors}] if tensors else []
    return form_fields(instances), _fitting_examples(instances), _fitting_examples(requests)


def _fitting_examples(examples: Sequence[Any]) -> list[Any]:
    """Return as many examples as fit in the page."""
    fitting, size = [], 0
    for example in examples:
        size += len(orjson.dumps(example, default=str))
        if size > _MAX_EXAMPLE_BYTES:
            break
        fitting.append(example)
    return fitting


def counters(snapshot: Snapshot, *, ready: bool) -> dict[str, Any]:
    """Return the counters that the script polls; it computes rates and quantiles from the differences."""
    return {"ready": ready, "models": [_version_counters(version) for version in snapshot.versions.values()]}


def _version_counters(version: VersionSnapshot) -> dict[str, Any]:
    metrics = version.metrics
    histograms = list(metrics.seconds.values())
    return {
        "model": version.name,
        "version": version.version,
        "current": version.is_current,
        "digest": version.digest,
        "requests": sum(metrics.requests.values()),
        "failed": sum(count for (_, code), count in metrics.requests.items() if code not in SUCCESS),
        "seconds": [sum(counts) for counts in zip(*(one.counts for one in histograms), strict=True)],
        "bounds": list(histograms[0].bounds) if histograms else [],
        "batches": metrics.batch_rows.count,
        "rows": metrics.batch_rows.total,
        "waiting": version.waiting,
    }


_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*|\*(?P<em>[^*\s][^*]*)\*"
    r"|\[(?P<text>[^\]]+)\]\((?P<link>https?://[^\s()<>]+)\)"
)
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?")
_MAX_HEADING_LEVEL = 6


def render_markdown(text: str, level: int = 2) -> Html:
    """Render Markdown; a first-level heading gets this `level`."""
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
            marks, _, title = lines[place].strip().partition(" ")
            yield el(f"h{min(level + len(marks) - 1, _MAX_HEADING_LEVEL)}", inline(title))
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


def _block(kind: str, lines: Sequence[str]) -> Html:
    if kind == "list":
        return el("ul", [el("li", inline(line.strip()[2:])) for line in lines])
    if kind == "table":
        rows = [_cells(line) for line in lines if not _RULE.fullmatch(line.strip())]
        return table(rows[0], rows[1:]) if rows else Html("")
    return el("p", inline(" ".join(line.strip() for line in lines)))


def _cells(line: str) -> list[Html]:
    return [inline(cell.strip()) for cell in line.strip().strip("|").split("|")]


def inline(text: str) -> Html:
    """Render emphasis, code and links; all text is escaped."""
    parts: list[Child] = []
    position = 0
    for match in _INLINE.finditer(text):
        parts.append(text[position : match.start()])
        position = match.end()
        if match["link"]:
            parts.append(el("a", match["text"], href=match["link"], rel="noopener noreferrer"))
        else:
            kind = match.lastgroup or ""
            parts.append(el(kind, match[kind]))
    return flat(*parts, text[position:])


_PICTURES = ("iVBORw0KGgo", "/9j/")  # how base64 of PNG and JPEG files begins
_MAX_FIELDS = 100
_MAX_LINE_CHARACTERS = 60  # longer texts have a field of several lines


def form_fields(examples: Sequence[Any]) -> dict[str, Any] | None:
    """Describe the fields of an instance, which follow from examples; None if an instance has no fields.

    An object is a row of fields; a text, a number or a picture is a form of one field. A picture is base64 of a PNG or
    JPEG file, bare or as `{"b64": …}`. There is no form for anything else, such as a list of numbers, which is edited
    as JSON. `bare`: the instance is the value of its only field.
    """
    if not examples:
        return None
    first = examples[0]
    if not isinstance(first, Mapping) or _is_wrapped(first):
        field = _field("", examples, bare=True)
        return None if field["kind"] == "json" else {"kind": "fields", "bare": True, "fields": [field]}
    rows = [example for example in examples if isinstance(example, Mapping)]
    fields = [_field(str(name), [row.get(name) for row in rows]) for name in first]
    if not 0 < len(fields) <= _MAX_FIELDS or all(field["kind"] == "json" for field in fields):
        return None
    return {"kind": "fields", "bare": False, "fields": fields}


def _field(name: str, values: Sequence[Any], bare: bool = False) -> dict[str, Any]:
    present = [value for value in values if value is not None]
    kinds = {_field_kind(value, bare) for value in present}
    if kinds == {"text", "lines"}:
        kinds = {"lines"}
    kind = kinds.pop() if len(kinds) == 1 else "json"  # of several types, or always null
    return {
        "name": name,
        "kind": kind,
        "wrapped": kind == "picture" and _is_wrapped(present[0]),
        "nullable": len(present) < len(values),
    }


def _field_kind(value: Any, bare: bool) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str() if value.startswith(_PICTURES):
            return "picture"
        case str():
            return "lines" if bare or len(value) > _MAX_LINE_CHARACTERS or "\n" in value else "text"
    return "picture" if _is_wrapped(value) else "json"


def _is_wrapped(value: Any) -> bool:
    """Return whether it is `{"b64": picture}`."""
    return isinstance(value, Mapping) and list(value) == ["b64"] and str(value["b64"]).startswith(_PICTURES)
