"""Signatures and provenance in the registry, checked by an independent verifier after cosign's specifications."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from k8s.images.cosign import attest_image, image_digests, image_statement, open_image, sign_image, verify_image
from k8s.images.modelcar import write_modelcar
from k8s.images.oci_layout import Layout
from pipeline.contract.bundle import PROVENANCE, Bundle, open_bundle, statement, write_manifest
from pipeline.contract.signing import Trust, new_key, private_key
from pipeline.system.errors import BundleError, ConfigError, GateError
from pipeline.system.files import write_json

from ..registry_server import RegistryServer

METADATA = {
    "invocationId": "20260101-120000-a1b2",
    "startedOn": "2026-01-01T12:00:00+00:00",
    "finishedOn": "2026-01-01T12:01:00+00:00",
}
SIGNATURE = "dev.cosignproject.cosign/signature"


@pytest.fixture
def image(registry: RegistryServer, bundle: Bundle, tmp_path: Path) -> str:
    return push(registry, bundle, tmp_path / "car")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


def push(registry: RegistryServer, bundle: Bundle, folder: Path) -> str:
    reference = f"{registry.host}/twice:1"
    index = write_modelcar(bundle, folder, reference)
    _, repository = registry_image(registry)
    repository.push(Layout(folder), index.digest, "1")
    return f"{registry.host}/twice@{index.digest}"


def registry_image(registry: RegistryServer) -> Any:
    return open_image(f"{registry.host}/twice@sha256:{'0' * 64}")


def sign(image: str, bundle: Bundle, key: Path) -> dict[str, Any]:
    """Sign an image and attach its provenance, as `pipe sign` does."""
    reference, repository = open_image(image)
    digests = image_digests(reference.digest, repository)
    record = {"context": "c" * 64, "base": "python:3.11-slim", "base_digest": f"sha256:{'b' * 64}"}
    provenance = image_statement(f"{reference.host}/twice", digests, bundle, record, METADATA)
    for digest in digests:
        sign_image(reference, digest, repository, private_key(key))
        attest_image(digest, provenance, repository, private_key(key))
    return provenance


def layers(registry: RegistryServer, digest: str, suffix: str) -> list[tuple[Mapping[str, Any], bytes]]:
    """Read what is attached to an image as SIGNATURE_SPEC.md and ATTESTATION_SPEC.md of cosign describe it."""
    media_type, body = registry.manifests[f"{digest.replace(':', '-')}.{suffix}"]
    manifest = json.loads(body)
    assert media_type == manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
    config = json.loads(registry.blobs[manifest["config"]["digest"]])
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"] for layer in manifest["layers"]]}
    contents = [registry.blobs[layer["digest"]] for layer in manifest["layers"]]
    for layer, content in zip(manifest["layers"], contents, strict=True):
        assert layer["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert layer["size"] == len(content)
        assert SIGNATURE in layer["annotations"], "without it, cosign does not read the layer"
    return list(zip(manifest["layers"], contents, strict=True))


def public(key: Path) -> Ed25519PublicKey:
    loaded = load_pem_public_key(key.with_name(f"{key.name}.pub").read_bytes())
    assert isinstance(loaded, Ed25519PublicKey)
    return loaded


def cosign_verify(registry: RegistryServer, digest: str, key: Path) -> None:
    """Verify a signature as `cosign verify --key` does without a transparency log."""
    signatures = []
    for layer, payload in layers(registry, digest, "sig"):
        assert layer["mediaType"] == "application/vnd.dev.cosign.simplesigning.v1+json"
        critical = json.loads(payload)["critical"]
        assert critical["type"] == "cosign container image signature"
        assert critical["image"]["docker-manifest-digest"] == digest
        signatures.append((base64.b64decode(layer["annotations"][SIGNATURE]), payload))
    assert any(is_valid(public(key), signature, payload) for signature, payload in signatures)


def cosign_verify_attestation(registry: RegistryServer, digest: str, key: Path) -> dict[str, Any]:
    """Verify an attestation as `cosign verify-attestation --type slsaprovenance1 --key` does; return the statement."""
    for layer, content in layers(registry, digest, "att"):
        assert layer["mediaType"] == "application/vnd.dsse.envelope.v1+json"
        envelope = json.loads(content)
        kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"])
        assert kind == "application/vnd.in-toto+json"
        message = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
        if any(is_valid(public(key), base64.b64decode(one["sig"]), message) for one in envelope["signatures"]):
            body: dict[str, Any] = json.loads(payload)
            assert body["_type"] == "https://in-toto.io/Statement/v1"
            assert body["predicateType"] == layer["annotations"]["predicateType"] == "https://slsa.dev/provenance/v1"
            assert digest.removeprefix("sha256:") in [subject["digest"]["sha256"] for subject in body["subject"]]
            return body
    raise AssertionError("no attestation by this key")


def is_valid(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def test_signatures_and_provenance_are_those_that_cosign_reads(
    registry: RegistryServer, image: str, bundle: Bundle, key: Path
) -> None:
    provenance = sign(image, bundle, key)
    reference, repository = open_image(image)
    digests = image_digests(reference.digest, repository)
    assert len(digests) == 3, "the index and the image of each architecture: nodes verify what they pull"
    for digest in digests:
        cosign_verify(registry, digest, key)
        assert cosign_verify_attestation(registry, digest, key) == provenance


def test_the_provenance_names_run_bundle_base_and_sources(
    registry: RegistryServer, image: str, bundle: Bundle, key: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.path, copy)
    raw = (copy / "manifest.json").read_bytes()
    model = statement(bundle.manifest, raw, {"train": {"lr": 0.1}}, {"torch": "2.11"}, {"python": "3.11"})
    write_json(copy / PROVENANCE, model)
    predicate = sign(image, open_bundle(copy), key)["predicate"]
    build, details = predicate["buildDefinition"], predicate["runDetails"]
    digests = {item["name"]: item.get("digest", item.get("uri")) for item in build["resolvedDependencies"]}
    assert build["externalParameters"] == {"config": {"train": {"lr": 0.1}}}
    assert digests["bundle"] == {"sha256": bundle.digest}
    assert digests["python:3.11-slim"] == {"sha256": "b" * 64}
    assert (digests["checkpoint"], digests["torch"]) == ({"sha256": "c"}, "pkg:pypi/torch@2.11")
    assert (details["metadata"], details["builder"]["version"]) == (METADATA, {"python": "3.11"})
    assert build["internalParameters"] == {"verdict": "pass"}


def test_a_signed_image_is_verified_by_digest_and_by_tag(
    registry: RegistryServer, image: str, bundle: Bundle, key: Path
) -> None:
    trust = Trust(key.with_name("key.pub"))
    sign(image, bundle, key)
    sentences = list(verify_image(image, trust))
    assert sentences[0].startswith(f"{image} is signed by SHA256:")
    assert sentences[-1] == f"bundle {bundle.digest[:12]}: the gate's verdict is pass"
    assert list(verify_image(f"{registry.host}/twice:1", trust)) == sentences
    with pytest.raises(ConfigError, match="has no twice:2"):
        list(verify_image(f"{registry.host}/twice:2", trust))


def test_signing_again_adds_nothing_and_another_key_adds_its_own(
    registry: RegistryServer, image: str, bundle: Bundle, key: Path, tmp_path: Path
) -> None:
    digest = open_image(image)[0].digest
    sign(image, bundle, key)
    before = dict(registry.manifests)
    sign(image, bundle, key)
    assert registry.manifests == before
    new_key(tmp_path / "second")
    sign(image, bundle, tmp_path / "second")
    for signer in (key, tmp_path / "second"):
        cosign_verify(registry, digest, signer)
        cosign_verify_attestation(registry, digest, signer)
        assert list(verify_image(image, Trust(signer.with_name(f"{signer.name}.pub"))))


def test_an_image_that_no_trusted_key_signed_is_refused(image: str, bundle: Bundle, key: Path, tmp_path: Path) -> None:
    trust = Trust(key.with_name("key.pub"))
    with pytest.raises(BundleError, match="is not signed by a key of"):
        list(verify_image(image, trust))
    new_key(tmp_path / "other")
    sign(image, bundle, tmp_path / "other")
    with pytest.raises(BundleError, match="is not signed by a key of"):
        list(verify_image(image, trust))


def test_an_image_without_provenance_is_refused(image: str, key: Path) -> None:
    reference, repository = open_image(image)
    sign_image(reference, reference.digest, repository, private_key(key))
    with pytest.raises(BundleError, match="has no provenance signed by a key of"):
        list(verify_image(image, Trust(key.with_name("key.pub"))))


def test_provenance_of_another_kind_of_build_is_refused(image: str, bundle: Bundle, key: Path) -> None:
    reference, repository = open_image(image)
    sign_image(reference, reference.digest, repository, private_key(key))
    provenance = image_statement("twice", [reference.digest], bundle, {}, METADATA)
    provenance["predicate"]["buildDefinition"]["buildType"] = "https://example.com/another"
    attest_image(reference.digest, provenance, repository, private_key(key))
    with pytest.raises(BundleError, match="has no provenance signed by a key of"):
        list(verify_image(image, Trust(key.with_name("key.pub"))))


def test_signature_and_provenance_of_another_image_are_refused(
    registry: RegistryServer, image: str, bundle: Bundle, key: Path, tmp_path: Path
) -> None:
    sign(image, bundle, key)
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.path, copy)
    (copy / "card.md").write_text("# another\n")
    write_manifest(copy, bundle.name, "pass", bundle.manifest.ancestors)
    other = push(registry, open_bundle(copy), tmp_path / "other")
    signed, wanted = (open_image(name)[0].digest.replace(":", "-") for name in (image, other))
    trust = Trust(key.with_name("key.pub"))
    registry.manifests[f"{wanted}.sig"] = registry.manifests[f"{signed}.sig"]
    with pytest.raises(BundleError, match="is not signed by a key of"):
        list(verify_image(other, trust))
    reference, repository = open_image(other)
    sign_image(reference, reference.digest, repository, private_key(key))
    registry.manifests[f"{wanted}.att"] = registry.manifests[f"{signed}.att"]
    with pytest.raises(BundleError, match="has no provenance signed by a key of"):
        list(verify_image(other, trust))


def test_changed_provenance_is_refused(registry: RegistryServer, image: str, bundle: Bundle, key: Path) -> None:
    sign(image, bundle, key)
    tag = f"{open_image(image)[0].digest.replace(':', '-')}.att"
    media_type, body = registry.manifests[tag]
    manifest = json.loads(body)
    envelope = json.loads(registry.blobs[manifest["layers"][0]["digest"]])
    payload = base64.b64decode(envelope["payload"]).replace(b'"verdict":"pass"', b'"verdict":"fail"')
    content = json.dumps({**envelope, "payload": base64.b64encode(payload).decode()}).encode()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    registry.blobs[digest] = content
    manifest["layers"][0] |= {"digest": digest, "size": len(content)}
    changed = json.dumps(manifest).encode()
    registry.manifests[tag] = registry.manifests[f"sha256:{hashlib.sha256(changed).hexdigest()}"] = media_type, changed
    with pytest.raises(BundleError, match="has no provenance signed by a key of"):
        list(verify_image(image, Trust(key.with_name("key.pub"))))


def test_an_image_of_a_rejected_bundle_is_refused(
    registry: RegistryServer, bundle: Bundle, key: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.path, copy)
    write_manifest(copy, bundle.name, "fail", bundle.manifest.ancestors)
    rejected = open_bundle(copy)
    image = push(registry, rejected, tmp_path / "rejected")
    sign(image, rejected, key)
    with pytest.raises(GateError, match="the gate's verdict is 'fail'"):
        list(verify_image(image, Trust(key.with_name("key.pub"))))


@pytest.mark.skipif(shutil.which("cosign") is None, reason="cosign is not installed: only our verifier checks")
@pytest.mark.parametrize("signer", ["key", "other", ""])
@pytest.mark.parametrize("command", [["verify"], ["verify-attestation", "--type", "slsaprovenance1"]], ids=" ".join)
def test_cosign_accepts_what_the_trusted_key_signed_and_nothing_else(
    command: list[str], signer: str, image: str, bundle: Bundle, key: Path, tmp_path: Path
) -> None:
    new_key(tmp_path / "other")
    if signer:
        sign(image, bundle, tmp_path / signer)
    reference, repository = open_image(image)
    for digest in image_digests(reference.digest, repository):
        options = ["--key", f"{key}.pub", "--insecure-ignore-tlog", "--allow-http-registry"]
        argv = ["cosign", *command, *options, reference.at(digest)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode == 0) == (signer == "key"), done.stderr
        assert ("verified against the specified public key" in done.stderr) == (signer == "key")
