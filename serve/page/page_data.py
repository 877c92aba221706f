"""What the page's script works with: the form it shows, and the counters it polls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import orjson

from pipeline.spec.generation import Generation
from serve.served import Served

_MOST_EXAMPLE_BYTES = 256 << 10  # a larger one would make the page heavy; the signature is enough to make another

log = logging.getLogger(__name__)


def embedded(served: Served) -> str:
    """JSON that no content can lead out of its element."""
    told = {
        "model": served.name,
        "version": served.version,
        "digest": served.bundle.digest,
        "form": form(served),
    }
    text = orjson.dumps(told, default=str).decode()
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def form(served: Served) -> dict[str, Any]:
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
    if served.writer is not None:
        return words(served.writer.language.generation)
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


def _examples(served: Served) -> tuple[list[Any], list[Any]]:
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


def counters(models: Sequence[tuple[Served, bool]], *, ready: bool) -> dict[str, Any]:
    """The counters as the script polls them; rates and quantiles are differences of two of these."""
    return {"ready": ready, "models": [_counted(one, current) for one, current in models]}


def _counted(served: Served, current: bool) -> dict[str, Any]:
    series = served.series
    series.count()
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
