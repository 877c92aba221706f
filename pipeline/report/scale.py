"""From values to pixels: linear scales, round ticks, and the frame every SVG chart has in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.spec.html import Child, Html, el


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def drawing(title: str, text: str, parts: Child, width: float, height: float, kind: str | None = None) -> Html:
    """An SVG that says in words what it shows."""
    told = (el("title", title), el("desc", text))
    return el("svg", told, parts, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", class_=kind)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values within the range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return el("line", x1=px(x1), y1=px(y1), x2=px(x2), y2=px(y2), class_=kind)


def label(x: float, y: float, text: str, kind: str) -> Html:
    return el("text", text, x=px(x), y=px(y), class_=kind)


def tick_text(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}".replace("-", "−")


def px(value: float) -> str:
    return f"{value:.1f}"
