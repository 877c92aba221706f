from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from pipeline.contract.bundle import PROVENANCE, open_bundle, statement
from pipeline.contract.signing import SIGNATURE, Trust, fingerprint, new_key, private_key, sign
from pipeline.override import sign_bundle
from pipeline.system.errors import BundleError, ConfigError, PipelineError
from pipeline.system.files import write_json

from .conftest import seal

PEM, SSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def trust(key: Path) -> Trust:
    return Trust(key.with_name("key.pub"))


@pytest.fixture
def signed(bundle: Path, key: Path) -> Path:
    raw = (bundle / "manifest.json").read_bytes()
    write_json(bundle / PROVENANCE, statement(open_bundle(bundle).manifest, raw, {}, {}, {}))
    sign(bundle, private_key(key))
    return bundle


def refused(bundle: Path, trust: Trust) -> str:
    with pytest.raises(PipelineError) as caught:
        open_bundle(bundle, trust)
    return str(caught.value)


def test_bundle_signed_by_a_trusted_key_opens(signed: Path, trust: Trust, key: Path) -> None:
    assert open_bundle(signed, trust) == open_bundle(signed)
    assert trust.check(signed, (signed / "manifest.json").read_bytes()) == fingerprint(private_key(key).public_key())
    before = (signed / SIGNATURE).read_bytes()
    sign(signed, private_key(key))
    assert (signed / SIGNATURE).read_bytes() == before, "one key, one bundle: one signature"


def test_second_key_adds_its_signature(signed: Path, key: Path, trust: Trust) -> None:
    new_key(key.with_name("second"))
    second = Trust(key.with_name("second.pub"))
    sign_bundle(signed, private_key(key.with_name("second")))
    assert open_bundle(signed, trust) == open_bundle(signed, second)
    sign_bundle(signed, private_key(key))
    assert open_bundle(signed, trust) == open_bundle(signed, second)
    assert len(json.loads((signed / SIGNATURE).read_text())["signatures"]) == 2


def test_signatures_of_a_bundle_that_changed_go(signed: Path, key: Path, trust: Trust) -> None:
    (signed / PROVENANCE).unlink()
    new_key(key.with_name("second"))
    sign_bundle(signed, private_key(key.with_name("second")))
    assert "is signed by" in refused(signed, trust)


def test_unsigned_bundle_is_refused_before_its_files_are_checked(bundle: Path, trust: Trust) -> None:
    (bundle / "model.onnx").unlink()
    assert "is not signed by a key of" in refused(bundle, trust)


def test_bundle_signed_by_another_key_is_refused_naming_both(signed: Path, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other")
    message = refused(signed, Trust(tmp_path / "other.pub"))
    assert "is signed by SHA256:" in message
    assert f"not by a key of {tmp_path}/other.pub" in message
    assert other not in message


def test_one_of_several_keys_is_enough(signed: Path, trust: Trust, tmp_path: Path) -> None:
    new_key(tmp_path / "other")
    both = tmp_path / "both"
    both.write_text((tmp_path / "other.pub").read_text() + trust.path.read_text())
    assert len(Trust(both).keys()) == 2
    open_bundle(signed, Trust(both))
    both.write_text(Trust(both).lines())
    open_bundle(signed, Trust(both))


def test_resealed_bundle_is_refused_with_and_without_a_key(signed: Path, trust: Trust) -> None:
    (signed / "codec.py").write_text("class Codec: evil = True\n")
    (signed / PROVENANCE).unlink()
    seal(signed)
    assert "was changed after it was signed" in refused(signed, trust)
    with pytest.raises(BundleError, match="was changed after it was signed"):
        open_bundle(signed)


def test_changed_or_removed_provenance_is_refused(signed: Path, trust: Trust) -> None:
    body = json.loads((signed / PROVENANCE).read_text())
    body["predicate"]["runDetails"] = {}
    write_json(signed / PROVENANCE, body)
    assert f"{PROVENANCE}: was changed after the bundle was signed" in refused(signed, trust)
    (signed / PROVENANCE).unlink()
    assert f"{PROVENANCE}: was changed after the bundle was signed" in refused(signed, trust)


def envelope(bundle: Path, **change: Any) -> None:
    path = bundle / SIGNATURE
    write_json(path, {**json.loads(path.read_text()), **change})


def test_forged_signature_is_refused(signed: Path, trust: Trust) -> None:
    body = json.loads((signed / SIGNATURE).read_text())
    (one,) = body["signatures"]
    raw = bytearray(base64.b64decode(one["sig"]))
    raw[3] ^= 1
    for sig in (base64.b64encode(bytes(raw)).decode(), "", "not base64"):
        envelope(signed, signatures=[{**one, "sig": sig}])
        assert "was not made by the key SHA256:" in refused(signed, trust)
    envelope(signed, signatures=[])
    assert "is signed by no key" in refused(signed, trust)


def test_forged_payload_is_refused(signed: Path, trust: Trust) -> None:
    """Even with the right digests, because the key signed other bytes."""
    whole = json.loads((signed / SIGNATURE).read_text())
    payload = json.loads(base64.b64decode(whole["payload"]))
    envelope(signed, payload=base64.b64encode(json.dumps(payload).encode()).decode())
    assert "was not made by the key" in refused(signed, trust)
    for change in ({"payload": "!"}, {"payload": base64.b64encode(b"[]").decode()}, {"payloadType": "text/plain"}):
        write_json(signed / SIGNATURE, {**whole, **change})
        assert "is not a signature of a bundle" in refused(signed, trust)
    (signed / SIGNATURE).write_text("{}")
    assert "manifest.sig.json: damaged: " in refused(signed, trust)


def test_new_key_is_private_and_overwrites_none(tmp_path: Path) -> None:
    found = new_key(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert fingerprint(Trust(tmp_path / "key.pub").keys()[0]) == found
    with pytest.raises(ConfigError, match="already exists; a key is never overwritten"):
        new_key(tmp_path / "key")


def write_private(path: Path, key: Any, kind: Any, lock: Any = None) -> Path:
    encryption = lock or serialization.NoEncryption()
    encoding = PEM
    path.touch(0o600)
    path.write_bytes(key.private_bytes(encoding, kind, encryption))
    return path


def test_openssh_keys_are_accepted(bundle: Path, tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    path = write_private(tmp_path / "id_ed25519", key, serialization.PrivateFormat.OpenSSH)
    public = tmp_path / "id_ed25519.pub"
    public.write_bytes(key.public_key().public_bytes(SSH, serialization.PublicFormat.OpenSSH) + b" ann@example\n")
    sign(bundle, private_key(path))
    assert open_bundle(bundle, Trust(public)).name == "pairs"


def test_a_key_with_a_passphrase_needs_it(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    lock = serialization.BestAvailableEncryption(b"open sesame")
    path = write_private(tmp_path / "key", key, serialization.PrivateFormat.PKCS8, lock)
    assert private_key(path, "open sesame").public_key() == key.public_key()
    for wrong in ("", "sesame"):
        with pytest.raises(ConfigError, match="set PIPE_KEY_PASSPHRASE if it has a passphrase"):
            private_key(path, wrong)


def test_private_key_that_others_can_read_is_refused(key: Path) -> None:
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read this private key"):
        private_key(key)
    with pytest.raises(ConfigError, match="has no private key, which signing needs"):
        private_key(Path(f"{key}.pub"))  # a public key, which all may read


def test_unsuitable_key_file_is_named(key: Path, tmp_path: Path) -> None:
    elliptic = ec.generate_private_key(ec.SECP256R1())
    path = write_private(tmp_path / "ec", elliptic, serialization.PrivateFormat.PKCS8)
    with pytest.raises(ConfigError, match="bundles are signed with ed25519 keys"):
        private_key(path)
    with pytest.raises(ConfigError, match=r"no\.key: cannot be read"):
        private_key(tmp_path / "no.key")
    text = elliptic.public_key().public_bytes(SSH, serialization.PublicFormat.OpenSSH).decode()
    for content, message in (
        (key.read_text(), "is a private key, which must stay secret"),
        ("", "has no public key"),
        (text, "has a key that is not ed25519"),
        ("ssh-ed25519 AAAA", "a public key in it cannot be read"),
    ):
        (tmp_path / "public").write_text(content)
        with pytest.raises(ConfigError, match=message):
            Trust(tmp_path / "public").keys()
    with pytest.raises(ConfigError, match=r"gone: cannot be read as a file of public keys"):
        Trust(tmp_path / "gone").keys()
