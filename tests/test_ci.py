"""Continuous integration names flaky tests in a file that the next change must empty."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In place of make: tests of which one fails the first time, or all of them.
MAKE = """#!/bin/sh
case "$*" in
  *last-failed*) echo "=== 1 {again} in 1.00s ==="; test {again} = passed ;;
  test-all*) echo "FAILED tests/test_a.py::test_one - AssertionError: no"
             echo "=== 1 failed, 2 passed in 2.00s ==="; exit 1 ;;
esac
"""


def checkout(folder: Path, make: str) -> Path:
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    shutil.copy(ROOT / "Makefile", folder)
    for name, text in {"bin/make": make, ".venv/bin/python": "#!/bin/sh\nexit 1\n"}.items():
        file = folder / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    return folder


def continuous_integration(folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        [folder / ".ci" / "run"], env={"PATH": path}, capture_output=True, text=True, check=False
    )


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "-C", str(folder), "check-flaky"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_flaky_test_is_left():
    found = check(ROOT)
    assert found.returncode == 0, found.stdout


def test_what_passes_alone_is_named_and_must_be_mended_by_the_next_change(tmp_path: Path):
    folder = checkout(tmp_path, MAKE.format(again="passed"))
    assert check(folder).returncode == 0
    ran = continuous_integration(folder)
    assert ran.returncode == 0, ran.stderr
    assert "\nflaky: tests/test_a.py::test_one\n" in ran.stdout
    found = check(folder)
    assert found.returncode != 0
    assert "tests/test_a.py::test_one" in found.stdout
    assert ".ci/flaky.txt" in found.stderr


def test_what_fails_twice_is_red_and_not_flaky(tmp_path: Path):
    folder = checkout(tmp_path, MAKE.format(again="failed"))
    assert continuous_integration(folder).returncode != 0
    assert check(folder).returncode == 0
