"""The image that others are built on, by digest: what its tag means today is asked of its registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k8s.login import login_of
from k8s.reference import parse
from k8s.registry import Repository
from k8s.registry_talk import Talk
from pipeline.spec.errors import PipelineError

_ANSWER_SECONDS = 10  # nothing depends on the answer but how firmly the base is named


@dataclass(frozen=True)
class Base:
    name: str  # for the builder
    digest: str | None
    reason: str = ""  # why there is no digest


def resolve(name: str, env: Mapping[str, str]) -> Base:
    """A tag may mean another image tomorrow; what is built is built on the one that was asked for today."""
    try:
        reference = parse(name)
        if reference.digest:
            return Base(name, reference.digest)
        talk = Talk(reference, login_of(reference.host, env), tries=1, timeout_seconds=_ANSWER_SECONDS)
        digest = Repository(reference, None, talk).digest_of(reference.tag or "latest")
    except PipelineError as error:
        return Base(name, None, str(error))
    if digest is None:
        return Base(name, None, f"{reference.host} has no {reference.repository}:{reference.tag or 'latest'}")
    return Base(reference.at(digest), digest)
