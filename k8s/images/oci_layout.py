"""OCI image layouts on disk, reproducible byte for byte: no times, no owners, sorted files."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.system.files import digest_bytes

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

_EPOCH = "1970-01-01T00:00:00Z"


@dataclass(frozen=True)
class Blob:
    """A blob, for its OCI descriptor."""

    media_type: str
    digest: str  # sha256:…
    size: int

    def descriptor(self, **fields: Any) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size, **fields}


@dataclass(frozen=True)
class Layer:
    blob: Blob
    diff_id: str  # digest of the uncompressed layer


@dataclass(frozen=True)
class Layout:
    """A directory of blobs named by their digests."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Layout:
        if path.exists():  # left by an interrupted attempt
            shutil.rmtree(path)
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_bytes(canonical_json({"imageLayoutVersion": "1.0.0"}))
        return cls(path)

    def file(self, digest: str) -> Path:
        algorithm, _, value = digest.partition(":")
        return self.path / "blobs" / algorithm / value

    def read(self, digest: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.file(digest).read_bytes())
        return body

    def add_json(self, media_type: str, body: Mapping[str, Any]) -> Blob:
        content = canonical_json(body)
        blob = Blob(media_type, f"sha256:{digest_bytes(content)}", len(content))
        self.file(blob.digest).write_bytes(content)
        return blob

    def add_layer(self, folder: Path, at: str) -> Layer:
        """Add a layer with the files of a folder under the path `at`, in one pass over the files."""
        partial = self.path / "blobs" / "layer"
        with partial.open("wb") as file:
            writer = _HashingWriter(file)
            _write_tar(writer, folder, at)
        blob = Blob(LAYER, f"sha256:{writer.digest.hexdigest()}", partial.stat().st_size)
        partial.rename(self.file(blob.digest))
        return Layer(blob, blob.digest)

    def add_image(
        self, layers: Sequence[Layer], architecture: str, annotations: Mapping[str, str], run: Mapping[str, Any]
    ) -> Blob:
        """Add an image for one architecture; `run` are further fields of its configuration, such as the user."""
        config = {
            "architecture": architecture,
            "config": {"Labels": dict(annotations), **run},
            "created": _EPOCH,
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.add_json(CONFIG, config).descriptor(),
            "layers": [layer.blob.descriptor() for layer in layers],
            "annotations": dict(annotations),
        }
        return self.add_json(MANIFEST, manifest)

    def add_index(self, images: Mapping[str, Blob], annotations: Mapping[str, str]) -> Blob:
        """Add an index over the images of several architectures."""
        manifests = [
            blob.descriptor(platform={"architecture": architecture, "os": "linux"})
            for architecture, blob in sorted(images.items())
        ]
        body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests, "annotations": dict(annotations)}
        return self.add_json(INDEX, body)

    def name(self, root: Blob, reference: str) -> None:
        """Write index.json, by which tools find the image under this name."""
        entry = root.descriptor(annotations={"org.opencontainers.image.ref.name": reference})
        (self.path / "index.json").write_bytes(
            canonical_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})
        )


def canonical_json(body: Mapping[str, Any]) -> bytes:
    """Return JSON in one form, so that equal content has equal digests."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class _HashingWriter(io.RawIOBase):
    """Writes to a file and computes the digest of the written bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write_tar(target: _HashingWriter, folder: Path, at: str) -> None:
    paths = sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).parts)
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for depth in range(1, len(Path(at).parts) + 1):
            tar.addfile(_tar_entry("/".join(Path(at).parts[:depth]), tarfile.DIRTYPE))
        for path in paths:
            name = f"{at}/{path.relative_to(folder).as_posix()}"
            if path.is_dir():
                tar.addfile(_tar_entry(name, tarfile.DIRTYPE))
                continue
            with path.open("rb") as file:
                tar.addfile(_tar_entry(name, tarfile.REGTYPE, path.stat().st_size), file)


def _tar_entry(name: str, kind: bytes, size: int = 0) -> tarfile.TarInfo:
    """Return an entry without owner and time that every user can read."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    entry.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    entry.mtime = entry.uid = entry.gid = 0
    return entry
