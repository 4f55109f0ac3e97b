"""What a bundle holds: images, a chart, values that pin the images, SBOMs and models."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import yaml

from octavo.bundle.blobs import (
    CONFIG,
    EMPTY,
    REFERENCE,
    TITLE,
    Descriptor,
    from_json,
    of_bytes,
    of_file,
    to_json,
)
from octavo.bundle.errors import BundleError
from octavo.bundle.layout import INDEX_FILE, LAYOUT, LAYOUT_FILE, LayoutReader, OciLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SEAL_FILE: Final = "octavo-bundle.json"  # the digest of the index
MODEL: Final = "application/vnd.octavo.model.v1"
VALUES: Final = "application/vnd.octavo.values.v1"
SBOM: Final = "application/vnd.cyclonedx+json"
HELM_CONFIG: Final = "application/vnd.cncf.helm.config.v1+json"
HELM_CHART: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_YAML: Final = "application/yaml"
_FILE: Final = "application/octet-stream"
# Image → where the chart's values have it.
IMAGE_VALUES: Final = {
    "octavo/engine-cpu": ("engines", "cpu", "image"),
    "octavo/engine-cuda": ("engines", "cuda", "image"),
    "octavo/router": ("router", "image"),
    "octavo/operator": ("operator", "image"),
}
_NAME: Final = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_REFERENCE: Final = re.compile(rf"({_NAME.pattern}(?:/{_NAME.pattern})*):([\w][\w.-]{{0,127}})")


@dataclass(frozen=True, slots=True)
class Item:
    """One thing in a bundle."""

    kind: str  # image, chart, values, sbom, model
    repository: str
    tag: str
    manifest: Descriptor  # of an image for several platforms, an index
    images: tuple[Descriptor, ...]  # the manifests of that index; else the manifest itself
    parts: tuple[Descriptor, ...]  # configuration, then layers; of an index, of all of its images

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        return self.parts[1:]

    @property
    def name(self) -> str:
        """Its last word."""
        return self.repository.rpartition("/")[2]

    def title(self, layer: Descriptor) -> str:
        """Of a file. Raises BundleError where it is no relative path."""
        title = layer.annotations.get(TITLE, "")
        path = PurePosixPath(title)
        if not title or path.is_absolute() or ".." in path.parts or "\\" in title:
            raise BundleError(f"{self.repository} has a file with the invalid name {title!r}")
        return title


def image_name(archive: Path, tags: Sequence[str]) -> str:
    """octavo/router, of an image that is called docker.io/octavo/router:e2e."""
    for tag in tags:
        name = "/".join(tag.rpartition(":")[0].split("/")[-2:])
        if name in IMAGE_VALUES:
            return name
    raise BundleError(
        f"{archive} is none of {', '.join(IMAGE_VALUES)}, but {', '.join(tags) or 'has no name'}"
    )


def add_image(layout: OciLayout, archive: Path, version: str) -> Descriptor:
    """From an OCI layout in a tar file, or as `docker save` writes it."""
    if (tags := _docker_tags(archive)) is not None:
        return layout.add_docker_archive(archive, f"{image_name(archive, tags)}:{version}")
    added = layout.add_layout(archive)
    if len(added) != 1:
        raise BundleError(f"{archive} has {len(added)} images; give one file for each image")
    image_name(archive, [added[0].annotations.get(REFERENCE, "")])
    return added[0]


def _docker_tags(archive: Path) -> list[str] | None:
    """None for what is an OCI layout. Raises BundleError for what is no image."""
    try:
        with tarfile.open(archive) as tar:
            names = tar.getnames()
            if INDEX_FILE in names or "manifest.json" not in names:
                return None
            saved = tar.extractfile("manifest.json")
            (entry,) = json.load(saved) if saved is not None else []
            return [str(tag) for tag in entry.get("RepoTags") or []]
    except (tarfile.TarError, ValueError, AttributeError, EOFError, RecursionError) as error:
        raise BundleError(f"{archive} is not an image as docker save writes it: {error}") from None


def add_chart(layout: OciLayout, archive: Path) -> Descriptor:
    """As Helm pushes and pulls it. Raises BundleError for what is no chart."""
    chart = chart_metadata(archive)
    layer = layout.add(of_file(archive), HELM_CHART, annotations={TITLE: archive.name})
    config = layout.add(of_bytes(to_json(chart)), HELM_CONFIG)
    return layout.add_manifest(
        config, [layer], reference=f"octavo/charts/{chart['name']}:{chart['version']}"
    )


def chart_metadata(archive: Path) -> dict[str, Any]:
    """Chart.yaml of a packed chart."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for info in tar:
                if info.name.count("/") == 1 and info.name.endswith("/Chart.yaml"):
                    file = tar.extractfile(info)
                    found = yaml.safe_load(file.read()) if file is not None else None
                    if isinstance(found, dict) and {"name", "version"} <= found.keys():
                        return {**found, "version": str(found["version"])}
    except (tarfile.TarError, OSError, EOFError, yaml.YAMLError) as error:
        raise BundleError(
            f"{archive} is not a packed chart ({error}); helm package makes one"
        ) from None
    raise BundleError(f"{archive} has no Chart.yaml; helm package makes a chart")


def add_sbom(
    layout: OciLayout, file: Path, version: str, images: Sequence[Descriptor]
) -> Descriptor:
    """Of the image whose name is in the document; of several platforms, the one with its layer."""
    document = from_json(of_file(file), str(file))
    component = document.get("metadata", {}).get("component", {})
    name = str(component.get("name", ""))
    short = "/".join(name.split("/")[-2:])
    found = [each for each in images if each.annotations[REFERENCE].rpartition(":")[0] == short]
    suffix = ""
    if len(found) > 1:
        top = str(component.get("bom-ref", ""))
        found = [each for each in found if top in _layers_unpacked(layout, each)]
        suffix = f"-{found[0].platform['architecture']}" if found else ""
    if not found:
        raise BundleError(f"{file} describes {name or 'nothing'}, which is not in the bundle")
    layer = layout.add(of_file(file), SBOM, annotations={TITLE: file.name})
    return layout.add_manifest(
        _empty(layout), [layer], reference=f"{short}:{version}{suffix}.sbom", artifact_type=SBOM,
        subject=found[0],
    )  # fmt: skip


def _layers_unpacked(layout: OciLayout, image: Descriptor) -> list[str]:
    """Their digests, as the image's configuration and an SBOM name them."""
    config = from_json(layout.blobs[image.digest], image.digest)["config"]
    found: list[str] = from_json(layout.blobs[config["digest"]], config["digest"])["rootfs"][
        "diff_ids"
    ]
    return found


def add_model(layout: OciLayout, name: str, path: Path, version: str) -> Descriptor:
    """A file, or a folder with its files; what begins with a dot is left out."""
    if not _NAME.fullmatch(name):
        raise BundleError(
            f"{name} cannot name a model in a registry: use lower-case letters, digits, and . _ - "
            "between them"
        )
    files = {path.name: path} if path.is_file() else {
        file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*"))
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    }  # fmt: skip
    if not files:
        raise BundleError(f"{path} has no files of a model")
    layers = [
        layout.add(of_file(file), _FILE, annotations={TITLE: title})
        for title, file in files.items()
    ]
    return layout.add_manifest(
        _empty(layout), layers, reference=f"octavo/models/{name}:{version}", artifact_type=MODEL
    )


def add_values(layout: OciLayout, images: Iterable[Descriptor], version: str) -> Descriptor:
    """What pins each image of the chart to its digest."""
    values = yaml.safe_dump(digest_values(images), sort_keys=True).encode()
    layer = layout.add(of_bytes(values), _YAML, annotations={TITLE: "values.yaml"})
    return layout.add_manifest(
        _empty(layout), [layer], reference=f"octavo/values:{version}", artifact_type=VALUES
    )


def digest_values(images: Iterable[Descriptor]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for image in images:
        place = values
        for key in IMAGE_VALUES[image.annotations[REFERENCE].rpartition(":")[0]]:
            place = place.setdefault(key, {})
        place["digest"] = image.digest
    return values


def write(layout: OciLayout, path: Path) -> str:
    """Returns the digest by which the bundle is known."""
    index = layout.index()
    layout.write(path, first={SEAL_FILE: _seal(index.digest(), index.size)})
    return index.digest()


def read(path: Path, digest: str = "") -> tuple[LayoutReader, list[Item]]:
    """Everything in it, after all of it has been checked. Raises BundleError."""
    reader = LayoutReader(path)
    found = reader.index.digest()
    if digest and found != digest:
        raise BundleError(f"{path} is the bundle {found}, not {digest}; get the right one")
    seal = reader.files.get(SEAL_FILE)
    if seal is None or seal.whole() != _seal(found, reader.index.size):
        raise BundleError(f"{path}: {INDEX_FILE} is altered; copy the bundle again")
    if reader.files[LAYOUT_FILE].whole() != LAYOUT:
        raise BundleError(f"{path}: {LAYOUT_FILE} is altered; copy the bundle again")
    if extra := sorted(reader.files.keys() - {SEAL_FILE, INDEX_FILE, LAYOUT_FILE}):
        raise BundleError(f"{path} has {extra[0]!r}, which belongs to no bundle; copy it again")
    reader.verify()
    return reader, [_item(reader, each) for each in reader.manifests]


def of_kind(items: Iterable[Item], kind: str) -> list[Item]:
    return [item for item in items if item.kind == kind]


def values_for(reader: LayoutReader, items: Sequence[Item], place: Mapping[str, Any]) -> str:
    """The digests of the bundle, and where the images are: YAML for Helm."""
    (item,) = of_kind(items, "values")
    pinned = yaml.safe_load(reader.blob(item.layers[0]).whole())
    return yaml.safe_dump({**pinned, **place}, sort_keys=True)


def _item(reader: LayoutReader, manifest: Descriptor) -> Item:
    reference = manifest.annotations.get(REFERENCE, "")
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise BundleError(f"{reader.path} has the invalid name {reference!r}; make it again")
    parts = tuple(reader.parts(manifest))
    kinds = {CONFIG: "image", HELM_CONFIG: "chart"}
    artifacts = {MODEL: "model", VALUES: "values", SBOM: "sbom"}
    kind = kinds.get(parts[0].media_type) or artifacts.get(manifest.artifact_type)
    if kind is None:
        raise BundleError(f"{reader.path}: {reference} is neither image, chart, SBOM nor model")
    return Item(kind, match[1], match[2], manifest, tuple(reader.images(manifest)), parts)


def _seal(digest: str, size: int) -> bytes:
    return to_json({"index": {"digest": digest, "size": size}, "schemaVersion": 1})


def _empty(layout: OciLayout) -> Descriptor:
    return layout.add(of_bytes(b"{}"), EMPTY)
