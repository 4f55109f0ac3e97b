"""A bundle is whole or refused: what is in it, the same bytes again, and every altered byte."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING

import pytest
import yaml

from octavo import cli
from octavo.bundle.contents import of_kind, read
from octavo.bundle.errors import BundleError
from octavo.bundle.layout import image_tar
from tests.fakes import images

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return made(tmp_path)


def made(tmp_path: Path, *more: str) -> Path:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "sub" / "model.safetensors").write_bytes(bytes(range(256)) * 300)
    (model / ".octavo-status.json").write_text("{}")
    release = images.release(tmp_path / "release")
    to = tmp_path / "octavo.bundle"
    argv = ["--release", str(release), "--model", f"tiny={model}", "--to", str(to), *more]
    assert cli.main(["bundle", "create", *argv]) == 0
    return to


def test_it_has_all_that_was_named(bundle: Path):
    _, items = read(bundle)
    assert [(item.kind, f"{item.repository}:{item.tag}") for item in items] == [
        ("image", "octavo/engine-cpu:0.1.0"),
        ("image", "octavo/operator:0.1.0"),
        ("image", "octavo/router:0.1.0"),
        ("chart", "octavo/charts/octavo:0.1.0"),
        ("values", "octavo/values:0.1.0"),
        ("sbom", "octavo/engine-cpu:0.1.0.sbom"),
        ("sbom", "octavo/operator:0.1.0.sbom"),
        ("sbom", "octavo/router:0.1.0.sbom"),
        ("model", "octavo/models/tiny:0.1.0"),
    ]
    (model,) = of_kind(items, "model")
    titles = [model.title(layer) for layer in model.layers]
    assert titles == ["config.json", "sub/model.safetensors"]


def test_values_pin_each_image_to_its_digest(bundle: Path):
    reader, items = read(bundle)
    (values,) = of_kind(items, "values")
    pinned = yaml.safe_load(reader.blob(values.layers[0]).whole())
    router = next(item for item in items if item.repository == "octavo/router")
    assert pinned["router"]["image"]["digest"] == router.manifest.digest
    assert set(pinned) == {"engines", "operator", "router"}


def test_sboms_are_of_their_images(bundle: Path):
    reader, items = read(bundle)
    digests = {item.repository: item.manifest.digest for item in of_kind(items, "image")}
    for bill in of_kind(items, "sbom"):
        subject = reader.manifest(bill.manifest)["subject"]
        assert subject["digest"] == digests[bill.repository]


def test_layers_that_images_share_are_there_once(bundle: Path):
    reader, items = read(bundle)
    bases = {image.layers[0].digest for image in of_kind(items, "image")}
    assert len(bases) == 1
    assert bases <= reader.blobs.keys()


def test_the_same_contents_are_the_same_bytes(tmp_path: Path):
    release = images.release(tmp_path / "release")
    made = [tmp_path / "a", tmp_path / "b"]
    for to in made:
        assert cli.main(["bundle", "create", "--release", str(release), "--to", str(to)]) == 0
    assert made[0].read_bytes() == made[1].read_bytes()


def test_no_altered_byte_passes(bundle: Path, tmp_path: Path):
    """Of the content; what tar fills blocks with has no meaning, and changes none."""
    whole = bundle.read_bytes()
    _, expected = read(bundle)
    copy = tmp_path / "altered"
    refused = 0
    for place in range(0, len(whole), 997):
        copy.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            _, items = read(copy)
        except BundleError as error:
            assert str(error).startswith(str(copy))
            refused += 1
        else:
            assert items == expected
            assert whole[place] == 0, "only padding may differ"
    assert refused > 20


def test_every_byte_of_the_index_and_of_each_small_file_counts(bundle: Path, tmp_path: Path):
    whole = bundle.read_bytes()
    with tarfile.open(bundle) as tar:
        small = [info for info in tar if info.isreg() and info.size < 5000]
    copy = tmp_path / "altered"
    for info in small:
        for place in range(info.offset_data, info.offset_data + info.size, 41):
            copy.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(BundleError):
                read(copy)


def test_a_truncated_bundle_is_refused(bundle: Path, tmp_path: Path):
    whole = bundle.read_bytes()
    with tarfile.open(bundle) as tar:
        end = max(info.offset_data + info.size for info in tar)
    copy = tmp_path / "short"
    for size in (0, 1, 512, 4000, end // 2, end - 1):
        copy.write_bytes(whole[:size])
        with pytest.raises(BundleError, match=r"truncated|not a bundle|altered"):
            read(copy)


def test_what_belongs_to_no_bundle_is_refused(bundle: Path):
    with tarfile.open(bundle, "a") as tar:
        info = tarfile.TarInfo("blobs/sha256/" + "0" * 64)
        tar.addfile(info)
    with pytest.raises(BundleError, match="altered"):
        read(bundle)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(bundle: Path, kind: bytes):
    with tarfile.open(bundle, "a") as tar:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(BundleError, match="which is not a file of a bundle"):
        read(bundle)


def test_another_bundle_than_the_named_one_is_refused(bundle: Path, capsys):
    reader, _ = read(bundle)
    assert cli.main(["bundle", "show", str(bundle), "--digest", reader.index.digest()]) == 0
    assert f"is whole: the bundle {reader.index.digest()}" in capsys.readouterr().out
    assert cli.main(["bundle", "show", str(bundle), "--digest", f"sha256:{'0' * 64}"]) == 1
    assert "get the right one" in capsys.readouterr().err


def test_a_layer_with_other_content_is_refused(tmp_path: Path, capsys):
    release = images.release(tmp_path / "release")
    images.docker_archive(release / "images" / "router.tar", "octavo/router:1", wrong=True)
    assert cli.main(["bundle", "create", "--release", str(release)]) == 1
    assert "has other content; save the image again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--model", "Tiny="], "cannot name a model"),
        (["--image", "{release}/octavo-0.1.0.tgz"], "not a bundle"),
        (["--image", "{release}/images/router.tar"], "is there twice"),
        (["--chart", "{release}/images/router.tar"], "is not a packed chart"),
        (["--sbom", "{release}/octavo-0.1.0.tgz"], "is not a JSON object"),
    ],
)
def test_what_cannot_be_packed_is_named(tmp_path: Path, capsys, argv: list[str], text: str):
    release = images.release(tmp_path / "release")
    words = [word.format(release=release) for word in argv]
    to = tmp_path / "out"
    argv = ["bundle", "create", "--release", str(release), "--to", str(to), *words]
    try:
        assert cli.main(argv) != 0
    except SystemExit as ended:
        assert ended.code == 2
    assert text in capsys.readouterr().err
    assert not to.exists()


def test_a_bundle_needs_images_and_a_chart(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bundle", "create", "--release", str(tmp_path)])
    assert "0 images and 0 charts were found" in capsys.readouterr().err


def test_images_may_be_layouts(bundle: Path, tmp_path: Path):
    """As `make release` writes them."""
    from octavo.bundle.contents import add_image
    from octavo.bundle.layout import OciLayout

    layout = OciLayout(tmp_path)
    saved = images.docker_archive(tmp_path / "router.tar", "docker.io/octavo/router:e2e")
    digest = add_image(layout, saved, "0.1.0").digest
    layout.write(tmp_path / "router.oci.tar")
    other = OciLayout(tmp_path)
    assert add_image(other, tmp_path / "router.oci.tar", "0.1.0").digest == digest
    _, items = read(bundle)
    assert digest in {item.manifest.digest for item in items}


def test_an_image_is_streamed_as_a_layout_of_its_own(bundle: Path, tmp_path: Path):
    reader, items = read(bundle)
    image = of_kind(items, "image")[0]
    path = tmp_path / "image.tar"
    path.write_bytes(b"".join(image_tar(reader, image.manifest, "docker.io/octavo/x:1")))
    with tarfile.open(path) as tar:
        names = tar.getnames()
        index = json.load(tar.extractfile("index.json"))  # type: ignore[arg-type]
    assert len(names) == 2 + 1 + len(image.parts)
    (named,) = index["manifests"]
    assert named["annotations"]["io.containerd.image.name"] == "docker.io/octavo/x:1"
    assert named["digest"] == image.manifest.digest
