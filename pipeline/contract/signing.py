"""Signatures of bundles with ed25519 keys: a DSSE envelope over manifest and provenance, next to them."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contract.settings.section import Frozen
from pipeline.system.errors import BundleError, ConfigError
from pipeline.system.files import digest_bytes, digest_file, write_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


SIGNATURE = "manifest.sig.json"
COVERED = ("manifest.json", "provenance.json")  # the manifest has the digests of all other files

_KIND = "application/vnd.pipe-road.bundle+json"
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_SSH = re.compile(r"^ssh-[^\n]*|^ecdsa-[^\n]*", re.MULTILINE)


class Signed(Frozen):
    keyid: str
    sig: str


class Envelope(Frozen):
    """A DSSE envelope; the payload that is signed is inside, in base64."""

    payload: str
    payloadType: str  # noqa: N815 - the name in the standard
    signatures: tuple[Signed, ...]

    @property
    def message(self) -> bytes:
        """The bytes that are signed: DSSE's encoding of type and payload; empty for a payload that is not base64."""
        try:
            return _pre_authentication_encoding(self.payloadType, base64.b64decode(self.payload, validate=True))
        except ValueError:
            return b""


@dataclass(frozen=True)
class Trust:
    """The public keys in a file, one of which must have signed a bundle; the file is read each time."""

    path: Path

    def check(self, directory: Path, manifest: bytes) -> str:
        """Return the id of the key that signed this manifest; raise an error if none did."""
        keys = {fingerprint(key): key for key in self.keys()}
        envelope = read_envelope(directory)
        if envelope is None:
            raise BundleError(
                f"{directory}: is not signed by a key of {self.path}, which is required; `pipe sign` signs a bundle"
            )
        check_cover(directory, manifest)
        known_signatures = [signature for signature in envelope.signatures if signature.keyid in keys]
        if not known_signatures:
            signers = ", ".join(signature.keyid for signature in envelope.signatures) or "no key"
            raise BundleError(f"{directory}: is signed by {signers}, not by a key of {self.path}")
        for signature in known_signatures:
            if not _is_made_by(keys[signature.keyid], envelope.message, signature.sig):
                raise BundleError(f"{directory / SIGNATURE}: was not made by the key {signature.keyid}")
        return known_signatures[0].keyid

    def keys(self) -> list[Ed25519PublicKey]:
        try:
            text = self.path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: cannot be read as a file of public keys: {error}") from error
        if "PRIVATE KEY" in text:
            raise ConfigError(f"{self.path}: is a private key, which must stay secret; give the .pub file")
        blocks = [*_PEM.findall(text), *_SSH.findall(text)]
        if not blocks:
            raise ConfigError(f"{self.path}: has no public key; `pipe sign --new-key FILE` makes a pair")
        return [_public(block, self.path) for block in blocks]

    def lines(self) -> str:
        """Return the keys, one per line."""
        return "".join(f"{_line(key)}\n" for key in self.keys())


def check_cover(directory: Path, manifest: bytes) -> None:
    """Check that a signature, if there is one, is over this manifest and this provenance."""
    envelope = read_envelope(directory)
    if envelope is None:
        return
    if envelope.payloadType != _KIND or (digests := read_payload(envelope)) is None:
        raise BundleError(f"{directory / SIGNATURE}: is not a signature of a bundle")
    if digests.get("manifest.json") != digest_bytes(manifest):
        raise BundleError(f"{directory}: was changed after it was signed; sign it again with `pipe sign`")
    for name in COVERED[1:]:
        digest = digest_file(directory / name) if (directory / name).is_file() else ""
        if digests.get(name, "") != digest:
            raise BundleError(f"{directory / name}: was changed after the bundle was signed; restore it, or sign again")


def read_envelope(directory: Path) -> Envelope | None:
    path = directory / SIGNATURE
    return Envelope.parse(path.read_bytes(), path, "sign again", BundleError) if path.is_file() else None


def sign(directory: Path, key: Ed25519PrivateKey, earlier: Envelope | None = None) -> str:
    """Sign a verified bundle and return the id of the key; the same keys and bundle give the same bytes.

    Signatures of other keys in an earlier envelope are kept if they are over the same bundle.
    """
    digests = {name: digest_file(directory / name) for name in COVERED if (directory / name).is_file()}
    payload = json.dumps(digests, sort_keys=True, separators=(",", ":")).encode()
    envelope = Envelope(payload=_base64(payload), payloadType=_KIND, signatures=())
    own = Signed(keyid=fingerprint(key.public_key()), sig=_base64(key.sign(envelope.message)))
    before = earlier.signatures if earlier is not None and earlier.payload == envelope.payload else ()
    others = (signed for signed in before if signed.keyid != own.keyid)
    write_json(directory / SIGNATURE, envelope.model_copy(update={"signatures": (*others, own)}).model_dump())
    return own.keyid


def new_key(path: Path) -> str:
    """Create a private key, readable by its owner only, and FILE.pub; existing files are never replaced."""
    serialization, ed25519 = _library()
    public = path.with_name(f"{path.name}.pub")
    if existing := [str(file) for file in (path, public) if file.exists()]:
        raise ConfigError(f"{existing[0]}: already exists; a key is never overwritten, name another file")
    key = ed25519.Ed25519PrivateKey.generate()
    body = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_text = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for file, content, mode in ((path, body, 0o600), (public, public_text, 0o644)):
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(content)
    return fingerprint(key.public_key())


def private_key(path: Path, passphrase: str = "") -> Ed25519PrivateKey:
    """Read a private key in PEM or OpenSSH format."""
    serialization, ed25519 = _library()
    try:
        raw = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if b"PRIVATE KEY" not in raw:
        raise ConfigError(f"{path}: has no private key, which signing needs; `pipe sign --new-key FILE` makes a pair")
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path}: others can read this private key; `chmod 600 {path}`, and make a new one")
    load = serialization.load_ssh_private_key if b"OPENSSH" in raw else serialization.load_pem_private_key
    try:
        key = load(raw, passphrase.encode() or None)
    except Exception as error:  # of several kinds: not a key, a missing or wrong passphrase, an old cipher
        raise ConfigError(
            f"{path}: the private key cannot be read ({error}); set PIPE_KEY_PASSPHRASE if it has a passphrase"
        ) from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{path}: bundles are signed with ed25519 keys; `pipe sign --new-key FILE` makes one")
    private: Ed25519PrivateKey = key
    return private


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return the fingerprint as `ssh-keygen -l` prints it."""
    blob = base64.b64decode(_line(key).split()[1])
    return "SHA256:" + _base64(sha256(blob).digest()).rstrip("=")


def _line(key: Ed25519PublicKey) -> str:
    serialization, _ = _library()
    raw: bytes = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return raw.decode()


def _public(block: str, path: Path) -> Ed25519PublicKey:
    serialization, ed25519 = _library()
    load = serialization.load_ssh_public_key if block.startswith(("ssh-", "ecdsa-")) else serialization.load_pem_public_key  # fmt: skip  # noqa: E501
    try:
        key = load(block.encode())
    except Exception as error:  # the library raises several kinds
        raise ConfigError(f"{path}: a public key in it cannot be read: {error}") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ConfigError(f"{path}: has a key that is not ed25519; remove it")
    public: Ed25519PublicKey = key
    return public


def _is_made_by(key: Ed25519PublicKey, message: bytes, signature: str) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature, validate=True), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_payload(envelope: Envelope) -> dict[str, Any] | None:
    """Return the payload of an envelope; None if it is not a JSON object."""
    try:
        payload = json.loads(base64.b64decode(envelope.payload, validate=True))
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None


def _pre_authentication_encoding(kind: str, payload: bytes) -> bytes:
    parts: Iterable[bytes] = (b"DSSEv1", b"%d" % len(kind), kind.encode(), b"%d" % len(payload), payload)
    return b" ".join(parts)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError("signatures need the package cryptography; `pip install 'pipe-road[sign]'`") from error
    return serialization, ed25519
