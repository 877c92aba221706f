"""The `rollout` section of `pipe.yaml`: how a bundle takes over from another one on a cluster."""

from __future__ import annotations

from pydantic import Field

from pipeline.spec.section import Natural, Positive, Section


class Rollout(Section):
    """How a new bundle takes over on a cluster."""

    canary: float = Field(
        0, ge=0, lt=100, description="percent of the requests that it gets at first; 0: all at once; `--canary` sets it"
    )
    auto: bool = Field(False, description="go on to 50 and 100 percent, or back, by what is measured; `--auto` sets it")
    observe_seconds: Positive = Field(60, description="how long each share is watched before it is judged")
    patience: Positive = Field(5, description="times a share is watched again where too few requests came to judge by")
    requests: Natural = Field(100, description="requests a share is judged by at least; 0: golden requests will do")
    margin: float = Field(0.01, ge=0, le=1, description="how much larger its share of failed requests may be")
    slow_margin: float = Field(
        0.05, ge=0, le=1, description="how much larger its share may be of requests slower than 95 % of the stable ones"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="with which both must be shown to stay below the margin")
    take_over: bool = Field(False, description="set fields anew that others have set, as by `kubectl edit`")
    wait_seconds: Natural = Field(120, description="longest wait for another deployment of this model to end")
    force_reason: str = Field("", description="deploy a bundle that failed its gate, with this reason on record")
