from __future__ import annotations

from typing import Any

from pipeline.contract.results import Facts
from pipeline.contract.run import RunFile
from pipeline.report.training import experts


def facts(*lines: dict[str, Any]) -> Facts:
    file = RunFile(id="one", created="2026-01-01", wanted=("train",), config={}, environment={})
    return Facts(file=file, steps=tuple({"step": i + 1, "loss": 1.0, **line} for i, line in enumerate(lines)))


def line(peak: float, dropped: float, **more: Any) -> dict[str, Any]:
    values = {"load_max_over_mean": peak, "router_entropy": 0.75, "dropped_tokens": dropped}
    return {"experts": values, "expert_load_max_over_mean": {"layer_0": peak}, **more}


def test_balance_entropy_and_dropped_tokens_are_shown() -> None:
    shown = str(experts(facts(line(2.5, 1), line(1.5, 2))))
    assert "<dt>largest load over the mean, at last</dt><dd>1.5</dd>" in shown
    assert "75.0% of the maximum" in shown
    assert "<dt>dropped tokens</dt><dd>3</dd>" in shown
    assert "Largest load over the mean: mean of layers, worst layer by optimizer step" in shown
    assert "Tokens of each expert" not in shown


def test_last_loads_are_drawn_most_uneven_layer_first() -> None:
    shown = str(experts(facts(line(1.5, 0, expert_loads=[[5, 5], [1, 9]]))))
    places = [shown.index(f"<span>{name}</span>") for name in ("1.0", "1.1", "0.0", "0.1")]
    assert places == sorted(places)
    assert "width:11.1%" in shown


def test_model_without_experts_has_no_section() -> None:
    assert experts(facts({}, {})) is None
