"""Changed files are seen whoever wrote them, and a change counts until it was taken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from octavo_common.file_watch import FileWatch

if TYPE_CHECKING:
    from pathlib import Path


class Refused(Exception):
    pass


class Files:
    """What a watch of one file calls; `refuses` so many loads."""

    def __init__(self, path: Path, *, refuses: int = 0) -> None:
        self.loads: list[str | None] = []
        self.refusals: list[str] = []
        self._path = path
        self._refuses = refuses
        self._watch = FileWatch(
            (str(path), ""),
            refusal=Refused,
            on_refusal=lambda error: self.refusals.append(str(error)),
        )

    def take(self, *, force: bool = False) -> bool:
        return self._watch.take(self._load, force=force)

    def _load(self) -> None:
        self.loads.append(self._path.read_text() if self._path.exists() else None)
        if len(self.loads) <= self._refuses:
            raise Refused("not yet")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    path.write_text("one")
    return path


def put_text(file: Path, text: str) -> None:
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)


def test_writes_replacements_and_removals_are_seen(file: Path):
    files = Files(file)
    assert not files.take()
    file.write_text("longer")
    assert files.take()
    assert not files.take()
    put_text(file, "longer")
    assert files.take()
    file.unlink()
    assert files.take()
    assert files.loads == ["longer", "longer", None]


def test_a_write_in_place_at_the_same_time_is_seen_by_its_size(file: Path):
    stat = os.stat(file)
    files = Files(file)
    file.write_text("longer")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files.take()


def test_what_was_refused_is_tried_again_without_a_change_of_the_files(file: Path):
    files = Files(file, refuses=2)
    assert not files.take()
    put_text(file, "two")
    assert [files.take() for _ in range(4)] == [False, False, True, False]
    assert files.loads == ["two"] * 3
    assert files.refusals == ["not yet"]  # once for each state of the files


def test_a_refusal_of_another_state_is_reported_again(file: Path):
    files = Files(file, refuses=2)
    for text in ("two", "three"):
        put_text(file, text)
        assert not files.take()
    assert files.refusals == ["not yet"] * 2


def test_by_force_everything_is_read_and_each_refusal_reported(file: Path):
    files = Files(file, refuses=2)
    assert [files.take(force=True) for _ in range(3)] == [False, False, True]
    assert files.refusals == ["not yet"] * 2
    assert not files.take()


def test_any_other_error_is_for_the_caller(file: Path):
    watch = FileWatch([str(file)], refusal=Refused, on_refusal=lambda error: None)
    put_text(file, "two")

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        watch.take(fail)
