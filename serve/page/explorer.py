"""The page at `GET /docs`: the operations of `/openapi.json`, each with a form that sends a request."""

from __future__ import annotations

import functools

from pipeline.contract.html import Html, el
from serve.page.page import page_head, read_file

STYLES, SCRIPT = ("page.css", "explorer.css"), "explorer.js"


@functools.cache
def render() -> bytes:
    """Return the page, which is the same for all models: the script reads the document."""
    intro = el("p", "Everything this service answers, from ", el("a", "openapi.json", href="/openapi.json"), ". ")
    title = el("div", el("h1", "API"), el("a", "← the model", href="/"), class_="title")
    options = el(
        "div",
        el("input", id="filter", type="search", placeholder="Filter by path or text", aria_label="Filter operations"),
        el("input", id="key", type="password", placeholder="API key", aria_label="API key", hidden=True),
        el("label", el("input", id="versions", type="checkbox"), " single versions"),
        class_="options",
    )
    body = el(
        "body",
        el("header", title, el("div", intro, class_="muted"), options),
        el("main", el("p", "This page needs JavaScript.", class_="muted"), id="operations"),
        el("script", Html(read_file(SCRIPT))),
    )
    return f"<!doctype html>\n{el('html', page_head('API', STYLES), body, lang='en')}\n".encode()
