"""file: URLs below one folder, and nothing outside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from octavo_engine.core.media.budget import ByteBudget
from octavo_engine.core.media.local_files import LocalPictures
from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

OUTSIDE = "reads files below one folder only, and this is not in it"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`allowed`, beside it `secret.png`, and links of both kinds."""
    allowed = tmp_path / "allowed"
    (allowed / "deep").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(b"inside")
    (allowed / "deep" / "link.png").symlink_to(allowed / "a b.png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (allowed / "out.png").symlink_to(tmp_path / "secret.png")
    (allowed / "up").symlink_to(tmp_path)
    (allowed / "loop.png").symlink_to(allowed / "loop.png")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "b.png").write_bytes(b"secret")
    os.mkfifo(allowed / "pipe")
    return allowed


def read(folder: Path, url: str, most: int = 100) -> bytes:
    return LocalPictures(str(folder)).read(url, "field", ByteBudget(most))


def test_files_below_the_folder_are_read(folder: Path) -> None:
    for path in ("a%20b.png", "deep/link.png", "deep/../a b.png"):
        assert read(folder, f"file://{folder}/{path}") == b"inside"
    assert read(folder, f"file://localhost{folder}/a%20b.png") == b"inside"
    linked = folder.parent / "linked"
    linked.symlink_to(folder)
    assert read(linked, f"file://{linked}/a%20b.png") == b"inside"


@pytest.mark.parametrize(
    "path",
    [
        "out.png", "up/secret.png", "../secret.png", "deep/../../secret.png", "%2e%2e/secret.png",
        "..%2fsecret.png", "../allowed-not/b.png", "../missing.png", "../../../../etc/passwd",
    ],
)  # fmt: skip
def test_everything_else_is_refused_in_the_same_words(folder: Path, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(folder, f"file://{folder}/{path}")
    assert OUTSIDE in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "field")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://{}/missing.png", "cannot be read: No such file"),
        ("file://{}/deep", "is not a file"),
        ("file://{}/pipe", "is not a file"),
        ("file://{}/loop.png", "must look like file:///folder/picture.png"),
        ("file://elsewhere{}/a%20b.png", "must look like"),
        ("file:a%20b.png", "must look like"),
        ("file://{}/a%20b.png?x", "must look like"),
        ("file://{}/%00", "must look like"),
        ("file://{}/%ff", "must look like"),
        ("file://[{}/a", "must look like"),
    ],
)
def test_what_names_no_file_is_refused(folder: Path, url: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(folder, url.format(folder))
    assert message in caught.value.message


def test_sizes_are_bounded_for_all_pictures_together(folder: Path) -> None:
    budget = ByteBudget(11)
    files = LocalPictures(str(folder))
    url = f"file://{folder}/a%20b.png"
    assert files.read(url, "field", budget) == b"inside"
    with pytest.raises(InvalidRequest, match="have more than 11 bytes; send fewer or smaller"):
        files.read(url, "field", budget)
