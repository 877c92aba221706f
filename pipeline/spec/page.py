"""What a codec may say of the service's page: how a person makes an instance there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.spec.errors import ConfigError
from pipeline.spec.frozen import Frozen

Side = Annotated[int, Field(ge=1, le=128)]


class Drawing(Frozen):
    """An instance is `height` lists of `width` grey values, from 0 for paper to `top` for ink: people draw it."""

    width: Side
    height: Side
    top: float = Field(gt=0, allow_inf_nan=False)
    fit: bool = False  # move and enlarge what is drawn until it fills the picture, as the model's samples do
    pen: float = Field(1.5, gt=0, le=16, allow_inf_nan=False)  # width of a stroke, in pixels of the picture


def drawing_of(codec: object, reference: str) -> Drawing | None:
    """The codec's `page`, where it has one."""
    page = getattr(codec, "page", None)
    if page is None or isinstance(page, Drawing):
        return page
    raise ConfigError(f"{reference}: page must be a pipeline.spec.page.Drawing, found {type(page).__name__}")
