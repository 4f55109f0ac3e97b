"""Images for several processors: one name and one digest, of which each node takes its own."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest
import yaml

from octavo import cli
from octavo.bundle.blobs import INDEX
from octavo.bundle.contents import of_kind, read
from octavo.bundle.layout import image_tar, platform_text
from tests.fakes import images
from tests.fakes.image_registry import ImageRegistry, serving

if TYPE_CHECKING:
    from pathlib import Path


def bundle(tmp_path: Path, *more: str) -> Path:
    release = tmp_path / "release"
    if not release.exists():
        images.release(release, ("amd64", "arm64"))
    to = tmp_path / "octavo.bundle"
    assert cli.main(["bundle", "create", "--release", str(release), "--to", str(to), *more]) == 0
    return to


def test_two_processors_are_one_image_of_one_digest(tmp_path: Path):
    reader, items = read(bundle(tmp_path))
    found = of_kind(items, "image")
    assert [f"{item.repository}:{item.tag}" for item in found] == [
        "octavo/engine-cpu:0.1.0", "octavo/operator:0.1.0", "octavo/router:0.1.0",
    ]  # fmt: skip
    for item in found:
        assert item.manifest.media_type == INDEX
        assert [platform_text(each) for each in item.images] == ["linux/amd64", "linux/arm64"]
    (values,) = of_kind(items, "values")
    pinned = yaml.safe_load(reader.blob(values.layers[0]).whole())
    assert pinned["router"]["image"]["digest"] == found[2].manifest.digest


def test_each_sbom_is_of_the_image_for_its_processor(tmp_path: Path):
    reader, items = read(bundle(tmp_path))
    by_tag = {item.tag: item for item in of_kind(items, "sbom") if item.name == "router"}
    assert set(by_tag) == {"0.1.0-amd64.sbom", "0.1.0-arm64.sbom"}
    router = next(item for item in items if item.repository == "octavo/router")
    for image in router.images:
        tag = f"0.1.0-{image.platform['architecture']}.sbom"
        assert reader.manifest(by_tag[tag].manifest)["subject"]["digest"] == image.digest


def test_a_registry_has_the_index_and_what_it_names(tmp_path: Path):
    made = bundle(tmp_path)
    reader, items = read(made)
    with serving(ImageRegistry()) as registry:
        to = str(tmp_path / "site")
        assert cli.main(["bundle", "load", str(made), "--registry", registry.host, "--to", to]) == 0
        for item in of_kind(items, "image"):
            assert (
                registry.manifests[item.repository, item.tag] == reader.blob(item.manifest).whole()
            )
            for image in item.images:
                stored = registry.manifests[item.repository, image.digest]
                assert stored == reader.blob(image).whole()
                for part in reader.parts(image):
                    assert (item.repository, part.digest) in registry.blobs


def test_containerd_gets_all_of_an_index(tmp_path: Path):
    reader, items = read(bundle(tmp_path))
    router = next(item for item in items if item.repository == "octavo/router")
    stream = b"".join(image_tar(reader, router.manifest, "docker.io/octavo/router:0.1.0"))
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        names = set(tar.getnames())
        file = tar.extractfile("index.json")
        assert file is not None
        (named,) = json.load(file)["manifests"]
    assert named["digest"] == router.manifest.digest
    wanted = [router.manifest, *router.images, *router.parts]
    assert {f"blobs/sha256/{each.digest.partition(':')[2]}" for each in wanted} <= names


def test_one_processor_may_be_enough(tmp_path: Path):
    both = bundle(tmp_path).stat().st_size
    made = bundle(tmp_path, "--platform", "linux/arm64")
    _, items = read(made)
    assert {platform_text(item.manifest) for item in of_kind(items, "image")} == {"linux/arm64"}
    assert len(of_kind(items, "sbom")) == 3
    assert made.stat().st_size < both


def test_a_processor_that_is_there_twice_is_refused(tmp_path: Path, capsys):
    release = images.release(tmp_path / "release", ("amd64", "arm64"))
    twice = release / "images" / "router-linux-arm64.tar"
    argv = ["bundle", "create", "--release", str(release), "--image", str(twice)]
    assert cli.main([*argv, "--to", str(tmp_path / "octavo.bundle")]) == 1
    assert "octavo/router:0.1.0 is there twice for linux/arm64" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["linux/amd64", "linux/arm64"])
def test_an_altered_byte_of_either_processor_is_refused(tmp_path: Path, kept: str, capsys):
    made = bundle(tmp_path)
    reader, items = read(made)
    router = next(item for item in items if item.repository == "octavo/router")
    image = next(each for each in router.images if platform_text(each) != kept)
    place = reader.blob(reader.parts(image)[1]).offset + 12
    data = bytearray(made.read_bytes())
    data[place] ^= 1
    made.write_bytes(data)
    assert cli.main(["bundle", "show", str(made)]) == 1
    assert "is altered" in capsys.readouterr().err
