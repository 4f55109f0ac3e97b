"""OCI image layouts in one tar file: the same bytes for the same contents."""

from __future__ import annotations

import io
import json
import tarfile
from typing import IO, TYPE_CHECKING, Any, Final

from octavo.bundle import compressed
from octavo.bundle.blobs import (
    CONFIG,
    DOCKER_MANIFEST,
    INDEX,
    MANIFEST,
    REFERENCE,
    BlobContent,
    Descriptor,
    descriptor,
    from_json,
    of_bytes,
    of_file,
    to_json,
)
from octavo.bundle.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

LAYOUT_FILE: Final = "oci-layout"
INDEX_FILE: Final = "index.json"
_BLOBS: Final = "blobs/sha256/"
LAYOUT: Final = to_json({"imageLayoutVersion": "1.0.0"})
_GZIP_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
_FOLDERS: Final = ("blobs", "blobs/sha256")


class OciLayout:
    """Blobs and what the index names, before they are written. `scratch`: for compressed layers."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.blobs: dict[str, BlobContent] = {}
        self.manifests: list[Descriptor] = []

    def add(self, content: BlobContent, media_type: str, **more: Any) -> Descriptor:
        """`more`: of the descriptor."""
        digest = content.digest()
        self.blobs.setdefault(digest, content)
        return Descriptor(media_type, digest, content.size, **more)

    def add_manifest(
        self,
        config: Descriptor,
        layers: Iterable[Descriptor],
        *,
        reference: str,
        artifact_type: str = "",
        platform: Mapping[str, str] | None = None,
        subject: Descriptor | None = None,
    ) -> Descriptor:
        """Named in the index by `reference`."""
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.as_json(),
            "layers": [layer.as_json() for layer in layers],
            **({"artifactType": artifact_type} if artifact_type else {}),
            **({"subject": _bare(subject).as_json()} if subject else {}),
        }
        added = self.add(
            of_bytes(to_json(manifest)), MANIFEST, annotations={REFERENCE: reference},
            platform=platform or {}, artifact_type=artifact_type,
        )  # fmt: skip
        self.manifests.append(added)
        return added

    def add_docker_archive(self, path: Path, reference: str) -> Descriptor:
        """An image as `docker save` writes it. Raises BundleError where its layers are not those
        that its configuration names."""
        try:
            with tarfile.open(path) as archive:
                (entry,) = _json_member(archive, "manifest.json")
                config_bytes = _member(archive, entry["Config"]).read()
                config = from_json(of_bytes(config_bytes), f"{path}: {entry['Config']}")
                diff_ids = config["rootfs"]["diff_ids"]
                if len(diff_ids) != len(entry["Layers"]):
                    raise BundleError(f"{path} does not have all layers; save the image again")
                layers = [
                    self._compress(_member(archive, name), diff_id, path)
                    for name, diff_id in zip(entry["Layers"], diff_ids, strict=True)
                ]
                platform = {"os": str(config["os"]), "architecture": str(config["architecture"])}
        except (
            tarfile.TarError, OSError, KeyError, TypeError, ValueError, EOFError, RecursionError,
        ) as error:  # fmt: skip
            raise BundleError(f"{path} is not an image as docker save writes it: {error}") from None
        return self.add_manifest(
            self.add(of_bytes(config_bytes), CONFIG), layers, reference=reference, platform=platform
        )

    def add_layout(self, path: Path) -> list[Descriptor]:
        """All that another layout has, as far as its digests are right."""
        other = LayoutReader(path)
        other.verify()
        for digest, content in other.blobs.items():
            self.blobs.setdefault(digest, content)
        self.manifests += other.manifests
        return other.manifests

    def merge_platforms(self) -> list[Descriptor]:
        """Images of one name become one index, of which each node takes what is for its processor.
        Returns what now is named. Raises BundleError where two are for the same processor."""
        merged: dict[str, list[Descriptor]] = {}
        for each in self.manifests:
            merged.setdefault(each.annotations[REFERENCE], []).append(each)
        self.manifests = [self._merge(name, images) for name, images in merged.items()]
        return self.manifests

    def _merge(self, name: str, images: list[Descriptor]) -> Descriptor:
        if len(images) == 1:
            return images[0]
        platforms = [platform_text(image) for image in images]
        if twice := sorted({each for each in platforms if platforms.count(each) > 1}):
            raise BundleError(f"{name} is there twice for {twice[0]}; name each image once")
        listed = [_bare(image, platform=image.platform) for image in images]
        listed.sort(key=platform_text)
        return self.add(_index(listed), INDEX, annotations={REFERENCE: name})

    def index(self) -> BlobContent:
        return _index(self.manifests)

    def write(self, path: Path, *, first: Mapping[str, bytes] | None = None) -> None:
        """The file is there whole, or not at all. `first`: more members, before all others."""
        small = {**(first or {}), LAYOUT_FILE: LAYOUT, INDEX_FILE: self.index().data}
        unfinished = path.with_name(f"{path.name}.part")
        try:
            with tarfile.open(unfinished, "w", format=tarfile.PAX_FORMAT) as tar:
                for name, data in small.items():
                    tar.addfile(_info(name, len(data)), io.BytesIO(data))
                for folder in _FOLDERS:
                    tar.addfile(_info(folder, 0, is_folder=True))
                for digest, content in sorted(self.blobs.items(), key=lambda e: (e[1].size, e[0])):
                    tar.addfile(_info(_blob_name(digest), content.size), _Stream(content))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _compress(self, layer: IO[bytes], diff_id: str, path: Path) -> Descriptor:
        """The same bytes for the same layer: no name and no time is in them."""
        target = self._scratch / diff_id.replace(":", "-")
        with target.open("wb") as raw:
            found = compressed.write_gzip(layer, raw)
        if found != diff_id:
            raise BundleError(
                f"{path}: the layer {diff_id} has other content; save the image again"
            )
        return self.add(of_file(target), _GZIP_LAYER)


class LayoutReader:
    """A layout in a tar file. Nothing is unpacked, and nothing is believed before `verify`."""

    def __init__(self, path: Path) -> None:
        """Raises BundleError for what is none."""
        self.path = path
        self.files: dict[str, BlobContent] = {}  # what is no blob
        self.blobs: dict[str, BlobContent] = {}
        try:
            size = path.stat().st_size
            with tarfile.open(path, "r:") as tar:
                for info in tar:
                    self._take(info, size)
        except tarfile.TarError as error:
            raise BundleError(
                f"{path} is not a bundle, or is altered or truncated ({error}); copy it again"
            ) from None
        if LAYOUT_FILE not in self.files or INDEX_FILE not in self.files:
            raise BundleError(
                f"{path} is not a bundle: it has no {INDEX_FILE}; octavo bundle create makes one"
            )
        self.index = self.files[INDEX_FILE]
        document = from_json(self.index, f"{path}: {INDEX_FILE}")
        found = document.get("manifests")
        if not isinstance(found, list):
            raise BundleError(f"{path}: {INDEX_FILE} names no manifests; make the bundle again")
        self.manifests = [descriptor(each, f"{path}: {INDEX_FILE}") for each in found]

    def blob(self, wanted: Descriptor) -> BlobContent:
        """Raises BundleError where it is missing or of another size."""
        content = self.blobs.get(wanted.digest)
        if content is None:
            raise BundleError(f"{self.path} lacks {wanted.digest}: it is truncated; copy it again")
        if content.size != wanted.size:
            raise BundleError(
                f"{self.path}: {wanted.digest} has {content.size} bytes, not {wanted.size}: the "
                "file is altered; copy it again"
            )
        return content

    def manifest(self, wanted: Descriptor) -> dict[str, Any]:
        return from_json(self.blob(wanted), f"{self.path}: {wanted.digest}")

    def images(self, wanted: Descriptor) -> list[Descriptor]:
        """The manifests of an index, one for each platform; a manifest is its own."""
        if wanted.media_type != INDEX:
            return [wanted]
        where = f"{self.path}: {wanted.digest}"
        found = self.manifest(wanted).get("manifests")
        if not isinstance(found, list) or not found:
            raise BundleError(f"{where} is not an index of images; make the bundle again")
        return [descriptor(each, where) for each in found]

    def parts(self, wanted: Descriptor) -> list[Descriptor]:
        """Configuration and layers of a manifest, or of all of an index, each once."""
        if wanted.media_type == INDEX:
            parts = [part for image in self.images(wanted) for part in self.parts(image)]
            return list({part.digest: part for part in parts}.values())
        document = self.manifest(wanted)
        where = f"{self.path}: {wanted.digest}"
        layers = document.get("layers")
        if not isinstance(layers, list):
            raise BundleError(f"{where} is not a manifest; make the bundle again")
        return [descriptor(each, where) for each in (document.get("config"), *layers)]

    def verify(self) -> int:
        """The number of blobs, after each has been read. Raises BundleError for the first that is
        missing, altered, or in no manifest."""
        for digest, content in self.blobs.items():
            if content.digest() != digest:
                raise BundleError(f"{self.path}: the content of {digest} is altered; copy it again")
        named: set[str] = set()
        for each in self.manifests:
            for image in self.images(each):
                if image.media_type not in (MANIFEST, DOCKER_MANIFEST):
                    raise BundleError(
                        f"{self.path}: {image.media_type} is not supported; make the bundle from "
                        "images of one platform each"
                    )
            for part in (each, *self.images(each), *self.parts(each)):
                self.blob(part)
                named.add(part.digest)
        if extra := sorted(self.blobs.keys() - named):
            raise BundleError(f"{self.path}: no manifest names {extra[0]}; copy the bundle again")
        return len(self.blobs)

    def _take(self, info: tarfile.TarInfo, size: int) -> None:
        if info.isdir() and info.name in _FOLDERS:
            return
        if not info.isreg() or info.sparse is not None:
            raise BundleError(f"{self.path} has {info.name!r}, which is not a file of a bundle")
        if info.offset_data + info.size > size:
            raise BundleError(f"{self.path} is truncated within {info.name}; copy it again")
        content = BlobContent(info.size, path=self.path, offset=info.offset_data)
        is_blob = info.name.startswith(_BLOBS)
        place = self.blobs if is_blob else self.files
        name = f"sha256:{info.name.removeprefix(_BLOBS)}" if is_blob else info.name
        if name in place:
            raise BundleError(f"{self.path} has {info.name!r} twice; copy or make it again")
        place[name] = content


def image_tar(reader: LayoutReader, image: Descriptor, name: str) -> Iterator[bytes]:
    """A layout of one image, which containerd imports by this name, as a stream. `image` may be an
    index: containerd takes what is for its platform."""
    named = Descriptor(
        image.media_type, image.digest, image.size,
        {REFERENCE: name.rpartition(":")[2], "io.containerd.image.name": name}, image.platform,
    )  # fmt: skip
    members = {LAYOUT_FILE: of_bytes(LAYOUT), INDEX_FILE: _index([named])}
    for part in (image, *reader.images(image), *reader.parts(image)):
        members[_blob_name(part.digest)] = reader.blob(part)
    for member, content in members.items():
        yield _info(member, content.size).tobuf()
        yield from content
        yield bytes(-content.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


class _Stream(io.RawIOBase):
    """Content as tarfile reads it."""

    def __init__(self, content: BlobContent) -> None:
        self._blocks = iter(content)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = next(self._blocks, b"")
        taken = self._rest[: len(buffer)]
        buffer[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)


def _info(name: str, size: int, *, is_folder: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o755 if is_folder else 0o644
    info.type = tarfile.DIRTYPE if is_folder else tarfile.REGTYPE
    return info


def _blob_name(digest: str) -> str:
    return f"{_BLOBS}{digest.partition(':')[2]}"


def _bare(subject: Descriptor, *, platform: Mapping[str, str] | None = None) -> Descriptor:
    return Descriptor(subject.media_type, subject.digest, subject.size, platform=platform or {})


def _index(manifests: Iterable[Descriptor]) -> BlobContent:
    listed = [each.as_json() for each in manifests]
    return of_bytes(to_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}))


def platform_text(image: Descriptor) -> str:
    """linux/arm64."""
    return f"{image.platform.get('os', '')}/{image.platform.get('architecture', '')}"


def _json_member(archive: tarfile.TarFile, name: str) -> Any:
    return json.loads(_member(archive, name).read())


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """A regular file, also by the links with which buildah names one layer twice."""
    member = archive.getmember(name)
    if member.issym():
        member = archive.getmember(member.linkname.removeprefix("../"))
    file = archive.extractfile(member)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file
