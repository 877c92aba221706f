from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.contract.config import parse_config
from pipeline.contract.settings import section
from pipeline.contract.settings.section import parse_share
from pipeline.system.errors import ConfigError


@pytest.mark.parametrize(
    ("form", "given", "taken"),
    [
        (section.Cpu, 2, "2"),
        (section.Cpu, "", ""),
        (section.CpuRequest, "1.5", "1.5"),
        (section.CpuRequest, "500m", "500m"),
        (section.Bytes, "0.5Gi", "0.5Gi"),
        (section.Bytes, 1024, "1024"),
        (section.Label, True, "true"),
        (section.LabelKey, "nvidia.com/gpu.present", "nvidia.com/gpu.present"),
        (section.Host, "*.example", "*.example"),
        (section.Gateway, "infra/edge", "infra/edge"),
        (section.Egress, 443, "443"),
        (section.Egress, "10.0.0.0/8:4318", "10.0.0.0/8:4318"),
        (section.Egress, "fd00::/8:443", "fd00::/8:443"),
        (section.Toleration, "pool=gpus:NoSchedule", "pool=gpus:NoSchedule"),
        (section.Storage, "pvc://claim/path", "pvc://claim/path"),
        (section.Text, 8, "8"),
    ],
)
def test_valid_kubernetes_values_become_text(form: Any, given: Any, taken: str) -> None:
    assert TypeAdapter(form).validate_python(given) == taken


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (section.Cpu, "half"),
        (section.CpuRequest, ""),
        (section.CpuRequest, "2Gi"),
        (section.Bytes, "512m"),
        (section.Bytes, "0.1Gi"),
        (section.Bytes, "512Mi "),
        (section.Label, "a b"),
        (section.Label, "a" * 64),
        (section.LabelKey, "a key"),
        (section.LabelKey, ""),
        (section.Name, "My_Claim"),
        (section.Namespace, ""),
        (section.Namespace, "a.b"),
        (section.Host, "http://a"),
        (section.Gateway, "a/b/c"),
        (section.Egress, "10.0.0.5/8:443"),
        (section.Egress, "0"),
        (section.Egress, "70000"),
        (section.Egress, "somewhere:443"),
        (section.Toleration, "pool=gpus:NoSchedul"),
        (section.Storage, "ftp://a/b"),
        (section.Variable, "A-B"),
    ],
)
def test_values_that_kubernetes_refuses_or_warns_about_are_refused(form: Any, given: str) -> None:
    with pytest.raises(ValidationError, match="write it as"):
        TypeAdapter(form).validate_python(given)


def test_error_names_the_invalid_setting_and_the_format() -> None:
    body = {"name": "m", "task": "t.py:T", "codec": "c.py:C", "cluster": {"memory": "512m"}}
    with pytest.raises(ConfigError, match=r"`cluster.memory`: write it as whole bytes, as in 512Mi.*found '512m'"):
        parse_config(body, "test")
    with pytest.raises(ConfigError, match=r"`train.compress`: write it as what fits \^\("):
        parse_config({**body, "cluster": {}, "train": {"compress": "disk"}}, "test")


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.1", 0.1), (" 2.5 % ", 0.025), ("100%", 1.0), ("1", 1.0), ("0", 0.0)]
)
def test_share_is_a_percentage_or_a_fraction(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "10", "101%", "-1%", "1e-1", "nan", "a tenth", "٣%"])
def test_invalid_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a fraction; write it as 10% or 0\.1"):
        parse_share(text)
