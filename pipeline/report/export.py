"""Sections of the export, package and deploy steps: ONNX parity, variants, formats, image and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.contract.results import Facts, mappings
from pipeline.report.charts import interval_text, parse_range
from pipeline.report.rendering import render
from pipeline.system.html import Html, number, size

_TIMED_BATCHES = {"1": "p50, batch 1", "32": "p50, batch 32"}
_QUANTILES = {"p50": "median", "p95": "95 %", "p99": "99 %", "max": "slowest"}


def parity(facts: Facts) -> Html | None:
    body = facts.parity
    if not body:
        return None
    onnx_bytes = next((variant.get("bytes") for variant in facts.variants if variant.get("variant") == "fp32"), None)
    return render(
        "parity.html",
        parity=body,
        onnx_bytes=onnx_bytes or body.get("onnx_bytes"),
        runs=mappings(body.get("runs")),
        elsewhere=mappings(body.get("coverage")),
        left_out=list(body.get("left_out") or ()),
        padding=body.get("padding"),
    )


def variants(facts: Facts) -> Html | None:
    if not facts.variants:
        return None
    fp32 = next((variant for variant in facts.variants if variant.get("variant") == "fp32"), facts.variants[0])
    batches = [key for key in _TIMED_BATCHES if any(key in (variant.get("p50_ms") or {}) for variant in facts.variants)]
    return render(
        "variants.html",
        metric=next(
            (str(variant["metric"].get("name")) for variant in facts.variants if variant.get("metric")), "metric"
        ),
        times=[_TIMED_BATCHES[key] for key in batches],
        rows=[_variant(variant, fp32, batches) for variant in facts.variants],
    )


def _variant(body: Mapping[str, Any], fp32: Mapping[str, Any], timed: Sequence[str]) -> dict[str, Any]:
    own_bytes, fp32_bytes = body.get("bytes"), fp32.get("bytes")
    share = f" ({own_bytes / fp32_bytes:.0%})" if own_bytes and fp32_bytes and body is not fp32 else ""
    first_wrong = body.get("first_wrong")
    times = body.get("p50_ms") or {}
    details = [str(text).removeprefix("passed, ") for text in (body.get("reason"), body.get("note")) if text]
    if isinstance(first_wrong, dict):
        node, error = f"{first_wrong.get('node')} ({first_wrong.get('op')})", number(first_wrong.get("error"))
        details.append(f"First wrong at {node}, error {error}.")
    return {
        "name": str(body.get("variant", "")),
        "chosen": body.get("chosen"),
        "value": (body.get("metric") or {}).get("value"),
        "difference": interval_text(parse_range(body.get("difference"))) or "–",
        "max_abs_error": body.get("max_abs_error"),
        "size": size(own_bytes) + share,
        "times": [f"{number(times.get(key), 3)} ms" if times.get(key) is not None else "–" for key in timed],
        "passed": body.get("passed"),
        "details": details,
    }


def formats(facts: Facts) -> Html | None:
    return render("formats.html", formats=facts.formats) if facts.formats else None


def package(facts: Facts) -> Html | None:
    if not facts.image:
        return None
    names = {
        "image": "image",
        "builder": "builder",
        "image_digest": "digest",
        "reference": "pushed as",
        "context": "context",
        "reason": "note",
    }
    return render("package.html", rows=[(title, facts.image.get(key)) for key, title in names.items()])


def latency(facts: Facts) -> Html | None:
    """The latency of the deployed service or, before there is one, of the exported file."""
    if facts.deploy:
        return _service_latency(facts.deploy)
    chosen = next((variant for variant in facts.variants if variant.get("chosen")), {})
    times = {f"batch {size}": value for size, value in (chosen.get("p50_ms") or {}).items() if value is not None}
    if not times:
        return None
    return render("latency.html", deploy=None, requests=None, variant=chosen.get("variant"), bars=_bars(times))


def _service_latency(deploy: Mapping[str, Any]) -> Html:
    measured = deploy.get("latency_ms") or {}
    times = {title: measured[name] for name, title in _QUANTILES.items() if measured.get(name) is not None}
    bars = _bars(times) if times else []
    return render("latency.html", deploy=deploy, requests=measured.get("requests"), variant=None, bars=bars)


def _bars(milliseconds: Mapping[str, float]) -> list[tuple[str, float, str, str]]:
    slowest = max(milliseconds.values()) or 1.0
    return [(name, 100 * value / slowest, f"{number(value, 3)} ms", "") for name, value in milliseconds.items()]
