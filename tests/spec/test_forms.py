from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.spec import forms
from pipeline.spec.config import parse_config
from pipeline.spec.errors import ConfigError


@pytest.mark.parametrize(
    ("form", "given", "taken"),
    [
        (forms.Cpu, 2, "2"),
        (forms.Cpu, "", ""),
        (forms.CpuRequest, "1.5", "1.5"),
        (forms.CpuRequest, "500m", "500m"),
        (forms.Bytes, "0.5Gi", "0.5Gi"),
        (forms.Bytes, 1024, "1024"),
        (forms.Label, True, "true"),
        (forms.LabelKey, "nvidia.com/gpu.present", "nvidia.com/gpu.present"),
        (forms.Host, "*.example", "*.example"),
        (forms.Gateway, "infra/edge", "infra/edge"),
        (forms.Egress, 443, "443"),
        (forms.Egress, "10.0.0.0/8:4318", "10.0.0.0/8:4318"),
        (forms.Egress, "fd00::/8:443", "fd00::/8:443"),
        (forms.Toleration, "pool=gpus:NoSchedule", "pool=gpus:NoSchedule"),
        (forms.Storage, "pvc://claim/path", "pvc://claim/path"),
        (forms.Text, 8, "8"),
    ],
)
def test_what_kubernetes_takes_is_taken_as_text(form: Any, given: Any, taken: str) -> None:
    assert TypeAdapter(form).validate_python(given) == taken


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (forms.Cpu, "half"),
        (forms.CpuRequest, ""),
        (forms.CpuRequest, "2Gi"),
        (forms.Bytes, "512m"),
        (forms.Bytes, "0.1Gi"),
        (forms.Bytes, "512Mi "),
        (forms.BytesRequest, ""),
        (forms.Label, "a b"),
        (forms.Label, "a" * 64),
        (forms.LabelKey, "a key"),
        (forms.LabelKey, ""),
        (forms.Name, "My_Claim"),
        (forms.Namespace, ""),
        (forms.Namespace, "a.b"),
        (forms.Host, "http://a"),
        (forms.Gateway, "a/b/c"),
        (forms.Egress, "10.0.0.5/8:443"),
        (forms.Egress, "0"),
        (forms.Egress, "70000"),
        (forms.Egress, "somewhere:443"),
        (forms.Toleration, "pool=gpus:NoSchedul"),
        (forms.Storage, "ftp://a/b"),
        (forms.Variable, "A-B"),
    ],
)
def test_what_the_api_would_refuse_or_warn_of_is_refused(form: Any, given: str) -> None:
    with pytest.raises(ValidationError, match="write it as"):
        TypeAdapter(form).validate_python(given)


def test_the_mend_is_told_of_the_word_that_is_wrong() -> None:
    body = {"name": "m", "task": "t.py:T", "codec": "c.py:C", "cluster": {"memory": "512m"}}
    with pytest.raises(ConfigError, match=r"`cluster.memory`: write it as whole bytes, as in 512Mi.*found '512m'"):
        parse_config(body, "test")
    with pytest.raises(ConfigError, match=r"`jobs.project`: write it as what fits \^/\.\+ "):
        parse_config({**body, "cluster": {}, "jobs": {"project": "x"}}, "test")
