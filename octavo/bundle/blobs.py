"""Content under its SHA-256: where the bytes are, and how an index describes them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bundle.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
REFERENCE = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"
MAX_JSON_BYTES = 8 * 2**20  # of a manifest or an index
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BlobContent:
    """Bytes in memory, or a range of a file. Iterating reads it from its start."""

    size: int
    data: bytes = b""
    path: Path | None = None
    offset: int = 0

    def __iter__(self) -> Iterator[bytes]:
        if self.path is None:
            yield self.data
            return
        left = self.size
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise BundleError(f"{self.path} is shorter than it was; copy it again")
                left -= len(block)
                yield block

    def whole(self) -> bytes:
        return b"".join(self)

    def digest(self) -> str:
        found = hashlib.sha256()
        for block in self:
            found.update(block)
        return f"sha256:{found.hexdigest()}"


def of_bytes(data: bytes) -> BlobContent:
    return BlobContent(len(data), data)


def of_file(path: Path) -> BlobContent:
    return BlobContent(path.stat().st_size, path=path)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What an index or a manifest says of a blob."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: Mapping[str, str] = field(default_factory=dict)
    artifact_type: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
            **({"artifactType": self.artifact_type} if self.artifact_type else {}),
            **({"platform": dict(self.platform)} if self.platform else {}),
            **({"annotations": dict(self.annotations)} if self.annotations else {}),
        }


def descriptor(document: object, where: str) -> Descriptor:
    """Raises BundleError for what is none."""
    match document:
        case {"mediaType": str(media_type), "digest": str(digest), "size": int(size)} if (
            DIGEST.fullmatch(digest) and size >= 0
        ):
            assert isinstance(document, dict)
            return Descriptor(
                media_type, digest, size, _strings(document.get("annotations")),
                _strings(document.get("platform")), str(document.get("artifactType") or ""),
            )  # fmt: skip
    raise BundleError(f"{where} has an invalid descriptor: {str(document)[:200]}")


def _strings(found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        return {}
    return {str(key): value for key, value in found.items() if isinstance(value, str)}


def to_json(document: object) -> bytes:
    """One form for one value, so that equal contents have equal digests."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def from_json(content: BlobContent, where: str) -> dict[str, Any]:
    """Raises BundleError where it is no JSON object."""
    if content.size > MAX_JSON_BYTES:
        raise BundleError(f"{where} is not a manifest: it has {content.size} bytes")
    try:
        document = json.loads(content.whole())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BundleError(f"{where} is not a JSON object; make or copy the bundle again")
    return document
