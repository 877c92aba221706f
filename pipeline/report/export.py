"""Sections of the export, package and deploy steps: ONNX parity, variants, formats, image and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.contract.results import Body, Facts, mappings
from pipeline.report.charts import parse_range
from pipeline.system.wording import milliseconds, number, size

_TIMED_BATCHES = {"1": "p50, batch 1", "32": "p50, batch 32"}
_QUANTILES = {"p50": "median", "p95": "95 %", "p99": "99 %", "max": "slowest"}


def parity(facts: Facts) -> Body | None:
    body = facts.parity
    if not body:
        return None
    onnx_bytes = next((variant.get("bytes") for variant in facts.variants if variant.get("variant") == "fp32"), None)
    return {
        "parity": body,
        "onnx_bytes": onnx_bytes or body.get("onnx_bytes"),
        "runs": mappings(body.get("runs")),
        "elsewhere": mappings(body.get("coverage")),
        "left_out": list(body.get("left_out") or ()),
        "padding": body.get("padding"),
    }


def variants(facts: Facts) -> Body | None:
    if not facts.variants:
        return None
    fp32 = next((variant for variant in facts.variants if variant.get("variant") == "fp32"), facts.variants[0])
    batches = [key for key in _TIMED_BATCHES if any(key in (variant.get("p50_ms") or {}) for variant in facts.variants)]
    names = (str(variant["metric"].get("name")) for variant in facts.variants if variant.get("metric"))
    return {
        "metric": next(names, "metric"),
        "times": [_TIMED_BATCHES[key] for key in batches],
        "rows": [_variant(variant, fp32, batches) for variant in facts.variants],
    }


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
        "difference": parse_range(body.get("difference")),
        "max_abs_error": body.get("max_abs_error"),
        "size": size(own_bytes) + share,
        "times": [milliseconds(times.get(key)) for key in timed],
        "passed": body.get("passed"),
        "details": details,
    }


def formats(facts: Facts) -> Body | None:
    return {"formats": facts.formats} if facts.formats else None


def package(facts: Facts) -> Body | None:
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
    return {"rows": [(title, facts.image.get(key)) for key, title in names.items()]}


def latency(facts: Facts) -> Body | None:
    """Return the latency of the deployed service or, before there is one, of the exported file."""
    times = {title: facts.latency.get(name) for name, title in _QUANTILES.items()}
    chosen = next((variant for variant in facts.variants if variant.get("chosen")), {})
    if not facts.deploy:
        times = {f"batch {size}": value for size, value in (chosen.get("p50_ms") or {}).items()}
    measured = {name: value for name, value in times.items() if value is not None}
    if not measured and not facts.deploy:
        return None
    slowest = max(measured.values(), default=0.0) or 1.0
    return {
        "deploy": facts.deploy,
        "requests": facts.latency.get("requests"),
        "variant": chosen.get("variant"),
        "bars": [(name, 100 * value / slowest, milliseconds(value), "") for name, value in measured.items()],
    }
