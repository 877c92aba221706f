"""Base classes of sections and records, and types that check what the Kubernetes API would reject."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from pipeline.system.errors import ConfigError, PipelineError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]  # what every generator takes
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    # Built at first use: `pipe --help` validates nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    # Settings that cannot change a step's result, so that changing them runs nothing again.
    OPERATIONAL: ClassVar[frozenset[str]] = frozenset()

    @property
    def operational(self) -> frozenset[str]:
        """Return the operational settings, with those that are operational beside the other settings as they are."""
        return self.OPERATIONAL

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans for numbers: pydantic accepts true as 1, and `epochs: yes` would train one epoch."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise PydanticCustomError("truth", "input should not be true or false")
        return value


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the class of a section's field; None for a single setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


PIPE = "pipe-road"  # name of the package, and of its version in the environment of a run


class Frozen(BaseModel):
    """An immutable record that rejects unknown fields."""

    SCHEMA: ClassVar[int] = 0  # the newest `schema_version` of its files, if they name theirs

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def parse(cls, raw: bytes, where: object, remedy: str, error: type[PipelineError] = PipelineError) -> Self:
        """Return the record that a file holds; a file of a newer version of pipe is not called damaged."""
        problem: Mapping[str, Any] = {}
        try:
            record = cls.model_validate_json(raw)
            if getattr(record, "schema_version", 0) <= cls.SCHEMA:
                return record
        except ValidationError as invalid:
            problem = invalid.errors()[0]
        raise error(f"{where}: {cls.describe(raw, problem, remedy)}")

    @classmethod
    def describe(cls, raw: bytes, problem: Mapping[str, Any], remedy: str) -> str:
        """Return what is wrong with a file, and how to fix it."""
        fields: Any = None
        with contextlib.suppress(ValueError):
            fields = json.loads(raw)
        fields = fields if isinstance(fields, dict) else {}
        name, schema = ".".join(map(str, problem.get("loc", ()))), fields.get("schema_version")
        newer = f"{name} is unknown here" if problem.get("type") == "extra_forbidden" else ""
        if isinstance(schema, int) and schema > cls.SCHEMA > 0:
            newer = f"schema {schema}, this one reads {cls.SCHEMA}"
        if newer:
            environment = fields.get("environment")
            writer = environment.get(PIPE) if isinstance(environment, dict) else None
            version = f"{writer}; " if isinstance(writer, str) else ""
            return f"written by a newer version of pipe ({version}{newer}); to fix it: pip install --upgrade {PIPE}"
        reason = f"{name}: {problem['msg']}".removeprefix(": ") if raw.strip(b"\0 \n") else "it is empty"
        return f"damaged: {reason}; to fix it: {remedy}"


_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)(k|Ki|M|Mi|G|Gi|T|Ti)?", re.ASCII)
_DNS = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
_KEY = rf"({_DNS}/)?[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?"


def _text(value: Any) -> Any:
    """Convert to text: YAML reads `cpu: 2` and `pool: true` as number and boolean, Kubernetes needs strings."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _invalid(text: str, form: str) -> PydanticCustomError:
    return PydanticCustomError("form", "write it as {form} (found {text})", {"form": form, "text": repr(text)})


def _matches(pattern: str, form: str, limit: int = 253, *, unset: bool = False) -> Callable[[str], str]:
    """Return a validator for the pattern; with `unset`, an empty text is valid."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if not (unset and not text) and (len(text) > limit or not compiled.fullmatch(text)):
            raise _invalid(text, form)
        return text

    return check


def _whole_bytes(text: str) -> str:
    """Require whole bytes: the API server warns of fractions, such as those with the suffix `m`."""
    match = _BYTES.fullmatch(text)
    if text and (match is None or Decimal(match[1]) * _SCALE[match[2] or ""] % 1):
        raise _invalid(text, "whole bytes, as in 512Mi or 2Gi")
    return text


def count_bytes(text: str) -> int:
    """Return the number of bytes in a setting, such as 2Gi."""
    match = _BYTES.fullmatch(text)
    assert match, text
    return int(Decimal(match[1]) * _SCALE[match[2] or ""])


def _check_egress(text: str) -> str:
    network, _, port = text.rpartition(":")
    try:
        ipaddress.ip_network(network or "0.0.0.0/0")
        fits = port.isdecimal() and 1 <= int(port) <= 65535 and ("/" in network or not network)
    except ValueError:
        fits = False
    if not fits:
        raise _invalid(
            text, "a port, or a network and a port, as in 443 or 10.0.0.0/8:4318 (no bits behind the prefix)"
        )
    return text


_CPU = (r"\d+(\.\d{1,3})?|\d+m", "CPUs or thousandths of one, as in 2 or 500m")
_TAINT = rf"{_KEY}(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?"


_AsText = BeforeValidator(_text)
# So that rendered files do not depend on the order in pipe.yaml.
InKeyOrder = AfterValidator(lambda values: dict(sorted(values.items())))
Text = Annotated[str, _AsText]
Cpu = Annotated[str, _AsText, AfterValidator(_matches(*_CPU, unset=True))]
CpuRequest = Annotated[str, _AsText, AfterValidator(_matches(*_CPU))]
Bytes = Annotated[str, _AsText, AfterValidator(_whole_bytes)]
Label = Annotated[
    str,
    _AsText,
    AfterValidator(
        _matches(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", "a label: letters, digits, - _ and .", 63, unset=True)
    ),
]
LabelKey = Annotated[str, AfterValidator(_matches(_KEY, "a label's name, as in pool or nvidia.com/gpu.present"))]
Name = Annotated[str, AfterValidator(_matches(_DNS, "an object's name: small letters, digits, - and .", unset=True))]
Namespace = Annotated[
    str,
    AfterValidator(_matches(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", "a namespace's name: small letters, digits and -", 63)),
]
Host = Annotated[
    str, AfterValidator(_matches(rf"(\*\.)?{_DNS}", "a host name, as in digits.example or *.example", unset=True))
]
Gateway = Annotated[str, AfterValidator(_matches(rf"([a-z0-9-]+/)?{_DNS}", "NAME or NAMESPACE/NAME", 317, unset=True))]
Storage = Annotated[
    str,
    AfterValidator(
        _matches(
            r"(pvc|s3|gs|oci|https)://\S+", "pvc://CLAIM/PATH, or s3://, gs://, oci:// or https://…", 4096, unset=True
        )
    ),
]
Toleration = Annotated[
    str, AfterValidator(_matches(_TAINT, "a taint, as in pool=gpus:NoSchedule (or PreferNoSchedule, NoExecute)", 400))
]
Egress = Annotated[str, _AsText, AfterValidator(_check_egress)]
Variable = Annotated[str, AfterValidator(_matches(r"[A-Za-z_]\w*", "a variable's name: letters, digits and _"))]


_UNIT_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_interval(text: str, option: str) -> int:
    """Return the seconds of an interval."""
    match = re.fullmatch(r"([0-9]{1,6})\s*(s|m|min|h|d)", text.strip())
    if not match or not int(match[1]):
        raise ConfigError(f"{option} {text}: write it as 30s, 10min, 1h or 1d")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def parse_share(text: str) -> float:
    """Parse a fraction written as `10%` or `0.1`; return it from 0 to 1."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 2.0
    if share > 1:
        raise ValueError(f"{text!r} is not a fraction; write it as 10% or 0.1, at most 100%")
    return share
