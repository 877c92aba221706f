"""What every section of `pipe.yaml` is made of.

The base of every record that is read from or written to a file.

Words in the form that the Kubernetes API takes: what it would refuse, or warn of, is said before it is asked.

A share of the requests, as people write it: `10%` or `0.1`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]  # what every generator takes
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    # Built at first use: `pipe --help` validates nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Python, and so pydantic, takes true for 1: `epochs: yes` would train one epoch."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("truth", "input should not be true or false")
        return value


class Frozen(BaseModel):
    """Cannot be changed, and refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)(k|Ki|M|Mi|G|Gi|T|Ti)?", re.ASCII)
_DNS = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
_KEY = rf"({_DNS}/)?[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?"


def _text(value: Any) -> Any:
    """YAML reads `cpu: 2` and `pool: true` as a number and a truth; Kubernetes wants their text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _wrong(text: str, form: str) -> PydanticCustomError:
    return PydanticCustomError("form", "write it as {form} (found {text})", {"form": form, "text": repr(text)})


def _of(pattern: str, form: str, limit: int = 253, *, unset: bool = False) -> Callable[[str], str]:
    """With `unset`, nothing may stand there."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if not (unset and not text) and (len(text) > limit or not compiled.fullmatch(text)):
            raise _wrong(text, form)
        return text

    return check


def _whole_bytes(text: str) -> str:
    """The API server warns of a part of a byte: what ends in `m` is a thousandth of one."""
    found = _BYTES.fullmatch(text)
    if text and (found is None or Decimal(found[1]) * _SCALE[found[2] or ""] % 1):
        raise _wrong(text, "whole bytes, as in 512Mi or 2Gi")
    return text


def _way_out(text: str) -> str:
    network, _, port = text.rpartition(":")
    try:
        ipaddress.ip_network(network or "0.0.0.0/0")
        fits = port.isdecimal() and 1 <= int(port) <= 65535 and ("/" in network or not network)
    except ValueError:
        fits = False
    if not fits:
        raise _wrong(text, "a port, or a network and a port, as in 443 or 10.0.0.0/8:4318 (no bits behind the prefix)")
    return text


def _given(text: str) -> str:
    if not text:
        raise _wrong(text, "a quantity, as in 500m or 512Mi")
    return text


_CPU = (r"\d+(\.\d{1,3})?|\d+m", "CPUs or thousandths of one, as in 2 or 500m")
_TAINT = rf"{_KEY}(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?"

_Words = BeforeValidator(_text)
Text = Annotated[str, _Words]
Cpu = Annotated[str, _Words, AfterValidator(_of(*_CPU, unset=True))]
CpuRequest = Annotated[str, _Words, AfterValidator(_of(*_CPU))]
Bytes = Annotated[str, _Words, AfterValidator(_whole_bytes)]
BytesRequest = Annotated[Bytes, AfterValidator(_given)]
Label = Annotated[
    str,
    _Words,
    AfterValidator(_of(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", "a label: letters, digits, - _ and .", 63, unset=True)),
]
LabelKey = Annotated[str, AfterValidator(_of(_KEY, "a label's name, as in pool or nvidia.com/gpu.present"))]
Name = Annotated[str, AfterValidator(_of(_DNS, "an object's name: small letters, digits, - and .", unset=True))]
Namespace = Annotated[
    str, AfterValidator(_of(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "a namespace's name: small letters, digits and -", 63))
]
Host = Annotated[
    str, AfterValidator(_of(rf"(\*\.)?{_DNS}", "a host name, as in digits.example or *.example", unset=True))
]
Gateway = Annotated[str, AfterValidator(_of(rf"([a-z0-9-]+/)?{_DNS}", "NAME or NAMESPACE/NAME", 317, unset=True))]
Storage = Annotated[
    str,
    AfterValidator(
        _of(r"(pvc|s3|gs|oci|https)://\S+", "pvc://CLAIM/PATH, or s3://, gs://, oci:// or https://…", 4096, unset=True)
    ),
]
Toleration = Annotated[
    str, AfterValidator(_of(_TAINT, "a taint, as in pool=gpus:NoSchedule (or PreferNoSchedule, NoExecute)", 400))
]
Egress = Annotated[str, _Words, AfterValidator(_way_out)]
Variable = Annotated[str, AfterValidator(_of(r"[A-Za-z_]\w*", "a variable's name: letters, digits and _"))]


def share_of(text: str) -> float:
    """From 0 to 1."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 2.0
    if share > 1:
        raise ValueError(f"{text!r} is no share; write it as in 10% or 0.1, at most 100%")
    return share
