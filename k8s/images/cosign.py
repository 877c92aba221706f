"""Signatures and SLSA provenance of images, stored beside them in the registry as cosign does.

The image `sha256:D` has its signatures in the layers of an image with the tag `sha256-D.sig`, and its in-toto
statements, each in a DSSE envelope, in those of `sha256-D.att`.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from k8s.images.oci_layout import CONFIG, MANIFEST, Layout, canonical_json
from k8s.images.registry import Reference, Repository, find_login, parse_reference
from pipeline.contract.bundle import BUILDER, PREDICATE, PROVENANCE, STATEMENT, Bundle, check_gate
from pipeline.contract.signing import Envelope, Trust, read_payload, sign_payload
from pipeline.system.errors import BundleError, ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
ENVELOPE = "application/vnd.dsse.envelope.v1+json"
STATEMENT_PAYLOAD = "application/vnd.in-toto+json"
SIGNATURE_ANNOTATION = "dev.cosignproject.cosign/signature"

_BUILD = f"{BUILDER}#package"
_CLAIM = "cosign container image signature"


def open_image(image: str) -> tuple[Reference, Repository]:
    """Return an image's reference, with the digest that its tag has now, and its repository."""
    reference = parse_reference(image)
    repository = Repository(reference, find_login(reference.host, os.environ))
    if not reference.digest:
        tag = reference.tag or "latest"
        if (digest := repository.digest_of(tag)) is None:
            raise ConfigError(f"{reference.host} has no {reference.repository}:{tag}; push it first")
        reference = replace(reference, digest=digest)
    return reference, repository


def image_digests(digest: str, repository: Repository) -> list[str]:
    """Return the digest of an image and, of an index, those of its images: nodes verify the one they pull."""
    return [digest, *(entry["digest"] for entry in repository.manifest(digest).get("manifests", ()))]


def image_statement(
    name: str, digests: Iterable[str], bundle: Bundle, record: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Return the SLSA provenance of an image with a bundle: its own build, and that of the model.

    `record` is what the package step has recorded of the image, `metadata` names the run and its times.
    """
    path = bundle.path / PROVENANCE  # a bundle may come without it
    model = json.loads(path.read_bytes())["predicate"] if path.is_file() else {}
    definition, builder = model.get("buildDefinition", {}), model.get("runDetails", {}).get("builder", {})
    inputs = {"bundle": bundle.digest, "context": record.get("context")}
    dependencies = [{"name": key, "digest": {"sha256": digest}} for key, digest in inputs.items() if digest]
    if record.get("base_digest"):
        dependencies.append({"name": record["base"], "digest": _by_algorithm(record["base_digest"])})
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": _by_algorithm(digest)} for digest in digests],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD,
                "externalParameters": definition.get("externalParameters", {}),
                "internalParameters": {"verdict": bundle.manifest.verdict},
                "resolvedDependencies": [*dependencies, *definition.get("resolvedDependencies", ())],
            },
            "runDetails": {"builder": {"id": f"{BUILDER}#pipe", **builder}, "metadata": dict(metadata)},
        },
    }


def _by_algorithm(digest: str) -> dict[str, str]:
    algorithm, _, value = digest.partition(":")
    return {algorithm: value}


def sign_image(reference: Reference, digest: str, repository: Repository, key: Ed25519PrivateKey) -> None:
    """Add the signature of a key to an image; the same key adds it once."""
    claim = {
        "critical": {
            "identity": {"docker-reference": f"{reference.host}/{reference.repository}"},
            "image": {"docker-manifest-digest": digest},
            "type": _CLAIM,
        },
        "optional": None,
    }
    payload = canonical_json(claim)
    signature = base64.b64encode(key.sign(payload)).decode()
    _attach(repository, _tag(digest, "sig"), PAYLOAD, payload, {SIGNATURE_ANNOTATION: signature})


def attest_image(digest: str, statement: Mapping[str, Any], repository: Repository, key: Ed25519PrivateKey) -> None:
    """Add an in-toto statement to an image, in an envelope with the signature of a key."""
    envelope = sign_payload(STATEMENT_PAYLOAD, canonical_json(statement), key)
    # cosign reads the annotation of every layer, although this signature is in the envelope.
    notes = {SIGNATURE_ANNOTATION: "", "predicateType": statement["predicateType"]}
    _attach(repository, _tag(digest, "att"), ENVELOPE, canonical_json(envelope.model_dump()), notes)


def verify_image(image: str, trust: Trust) -> Iterator[str]:
    """Yield one sentence for each check that passes: signature, provenance, and the verdict in it."""
    reference, repository = open_image(image)
    name = reference.at(reference.digest)
    yield f"{name} is signed by {_signer(reference.digest, name, repository, trust)}"
    statement, keyid = _provenance(reference.digest, name, repository, trust)
    yield f"its provenance is signed by {keyid}"
    build = statement["predicate"]["buildDefinition"]
    verdict = build["internalParameters"]["verdict"]
    check_gate(verdict, name)
    (bundle,) = (item["digest"]["sha256"] for item in build["resolvedDependencies"] if item["name"] == "bundle")
    yield f"bundle {bundle[:12]}: the gate's verdict is {verdict}"


def _signer(digest: str, name: str, repository: Repository, trust: Trust) -> str:
    """Return the id of the trusted key that signed the image."""
    for layer in _layers(repository, _tag(digest, "sig"), PAYLOAD):
        payload = repository.blob(layer["digest"])
        keyid = trust.signer(payload, layer.get("annotations", {}).get(SIGNATURE_ANNOTATION, ""))
        if keyid and _claims(payload, digest):
            return keyid
    raise BundleError(f"{name}: is not signed by a key of {trust.path}; `pipe sign --key FILE IMAGE` signs an image")


def _claims(payload: bytes, digest: str) -> bool:
    """Return whether a payload that a trusted key signed is a claim about this image."""
    try:
        critical = json.loads(payload)["critical"]
    except (ValueError, LookupError, TypeError):  # the key has signed something else
        return False
    return (critical.get("type"), critical.get("image", {}).get("docker-manifest-digest")) == (_CLAIM, digest)


def _provenance(digest: str, name: str, repository: Repository, trust: Trust) -> tuple[dict[str, Any], str]:
    """Return the provenance that a trusted key signed, and the id of the key."""
    for layer in _layers(repository, _tag(digest, "att"), ENVELOPE):
        try:
            envelope = Envelope.model_validate_json(repository.blob(layer["digest"]))
        except ValidationError:
            continue
        if envelope.payloadType != STATEMENT_PAYLOAD or not (keyid := trust.envelope_signer(envelope)):
            continue
        statement = read_payload(envelope) or {}
        if (statement.get("_type"), statement.get("predicateType")) != (STATEMENT, PREDICATE):
            continue
        is_ours = statement["predicate"]["buildDefinition"]["buildType"] == _BUILD
        if is_ours and _by_algorithm(digest) in [subject["digest"] for subject in statement["subject"]]:
            return statement, keyid
    raise BundleError(
        f"{name}: has no provenance signed by a key of {trust.path}; `pipe sign --key FILE IMAGE` attaches it"
    )


def _tag(digest: str, suffix: str) -> str:
    return f"{digest.replace(':', '-')}.{suffix}"


def _layers(repository: Repository, tag: str, media_type: str) -> list[dict[str, Any]]:
    digest = repository.digest_of(tag)
    layers = repository.manifest(digest)["layers"] if digest else []
    return [layer for layer in layers if layer["mediaType"] == media_type]


def _attach(repository: Repository, tag: str, media_type: str, content: bytes, annotations: Mapping[str, str]) -> None:
    """Add a layer to the image with this tag, after those of other keys."""
    earlier = _layers(repository, tag, media_type)
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout.make(Path(folder) / "layout")
        layer = layout.add(media_type, content).descriptor(annotations=dict(annotations))
        layers = [*(other for other in earlier if other != layer), layer]
        config = {
            "architecture": "",
            "config": {},
            "os": "",
            "rootfs": {"type": "layers", "diff_ids": [item["digest"] for item in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": layout.add_json(CONFIG, config).descriptor(),
            "layers": layers,
        }
        repository.push(layout, layout.add_json(MANIFEST, manifest).digest, tag)
