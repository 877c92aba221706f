"""Templates of the report, rendered by one Jinja environment: all values are escaped, undefined names are errors.

All templates know the macros of `macros.html` as `macros`, and those of `charts.html` as `draw`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report.charts import interval_text, px, small_interval
from pipeline.system.wording import number, percent, seconds, short, signed, size

_BETWEEN_TAGS = re.compile(r">\s*\n\s*<")


def render(template: str, **values: Any) -> Markup:
    """Render a file of `templates/`. Line breaks between two tags are layout of the template and are dropped."""
    return Markup(_BETWEEN_TAGS.sub("><", _environment().get_template(template).render(values)))  # noqa: S704


def read_asset(name: str) -> Markup:
    """Return the style or the script of the pages, which are ours and not escaped."""
    return Markup(Path(__file__).with_name(name).read_text())  # noqa: S704


def score(value: float | None, metric: str) -> str:
    return percent(value) if "accuracy" in metric else number(value)


def date(created: str) -> str:
    return created.replace("T", " ").partition("+")[0][:16] + (" UTC" if created.endswith("+00:00") else "")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (number, percent, seconds, short, signed, size, date, score, px, interval_text, small_interval):
        environment.filters[name.__name__] = name
    environment.globals["macros"] = environment.get_template("macros.html").module
    environment.globals["draw"] = environment.get_template("charts.html").module
    return environment
