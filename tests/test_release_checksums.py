"""What is signed verifies, and nothing else does; the usual tools read the same files."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from release import checksums

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    private = tmp_path / "release.key"
    return private, checksums.make_key(private)


@pytest.fixture
def dist(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    folder = tmp_path / "dist"
    (folder / "images" / "blobs").mkdir(parents=True)
    (folder / "octavo.whl").write_bytes(b"wheel")
    (folder / "images" / "blobs" / "layer one").write_bytes(b"layer")
    assert checksums.sign(folder, keys[0]) == 2
    return folder


def test_what_was_signed_verifies(dist: Path, keys: tuple[Path, Path]) -> None:
    assert checksums.problems(dist, keys[1]) == []


def test_signing_again_gives_the_same_bytes(dist: Path, keys: tuple[Path, Path]) -> None:
    before = [(dist / name).read_bytes() for name in (checksums.SUMS, checksums.SIGNATURE)]
    checksums.sign(dist, keys[0])
    assert before == [(dist / name).read_bytes() for name in (checksums.SUMS, checksums.SIGNATURE)]


def test_sha256sum_reads_the_sums(dist: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", checksums.SUMS], cwd=dist, check=True)


def test_each_difference_is_named(dist: Path, keys: tuple[Path, Path]) -> None:
    (dist / "octavo.whl").write_bytes(b"Wheel")
    (dist / "images" / "blobs" / "layer one").unlink()
    (dist / "extra").write_bytes(b"")
    assert checksums.problems(dist, keys[1]) == [
        "images/blobs/layer one is missing; download it again",
        "extra is not listed in SHA256SUMS; remove it",
        "octavo.whl differs from its checksum; download it again",
    ]


def test_sums_that_were_written_anew_are_refused(dist: Path, keys: tuple[Path, Path]) -> None:
    (dist / "octavo.whl").write_bytes(b"Wheel")
    name = checksums.digest(dist / "octavo.whl")
    old = (dist / checksums.SUMS).read_text().splitlines()
    (dist / checksums.SUMS).write_text(f"{old[0]}\n{name}  octavo.whl\n")
    (found,) = checksums.problems(dist, keys[1])
    assert "is not a signature" in found


def test_another_key_is_refused(dist: Path, tmp_path: Path) -> None:
    (found,) = checksums.problems(dist, checksums.make_key(tmp_path / "other.key"))
    assert "is not a signature" in found


@pytest.mark.parametrize("name", [checksums.SUMS, checksums.SIGNATURE])
def test_a_missing_file_of_ours_is_named(dist: Path, keys: tuple[Path, Path], name: str) -> None:
    (dist / name).unlink()
    assert checksums.problems(dist, keys[1]) == [f"{dist / name} is missing; download it again"]


def test_links_are_not_signed(dist: Path, keys: tuple[Path, Path]) -> None:
    (dist / "link").symlink_to("octavo.whl")
    with pytest.raises(SystemExit, match="is not a regular file"):
        checksums.sign(dist, keys[0])


def test_a_key_is_private_and_never_replaced(keys: tuple[Path, Path]) -> None:
    assert keys[0].stat().st_mode & 0o777 == 0o600
    with pytest.raises(SystemExit, match="exists"):
        checksums.make_key(keys[0])


def test_verify_ends_with_status_1(
    dist: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(dist), "--key", str(keys[1])]
    assert checksums.main(arguments) == 0
    (dist / "octavo.whl").write_bytes(b"")
    assert checksums.main(arguments) == 1
    assert "octavo.whl differs" in capsys.readouterr().err


def test_openssl_alone_verifies(dist: Path, keys: tuple[Path, Path]) -> None:
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", str(keys[1]),
               "-in", checksums.SUMS, "-sigfile", checksums.SIGNATURE]  # fmt: skip
    subprocess.run(command, cwd=dist, check=True)


@pytest.mark.parametrize("command", ["sign", "verify"])
def test_missing_openssl_is_named(
    dist: Path, keys: tuple[Path, Path], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(dist))
    key = keys[0] if command == "sign" else keys[1]
    with pytest.raises(SystemExit, match="install OpenSSL 3"):
        checksums.main([command, str(dist), "--key", str(key)])
