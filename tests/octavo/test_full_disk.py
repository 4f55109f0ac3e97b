"""On a disk without room, each command says so in one sentence, and leaves no half of anything."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

from octavo.fetch.errors import EXIT_CODES, FetchReason

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
OCTAVO = shlex.join([sys.executable, "-m", "octavo.cli"])
KIB = 64  # of the disk
_NAMESPACE = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--mount")


@cache
def can_mount() -> bool:
    command = [*_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def on_small_disk(folder: Path, script: str) -> tuple[list[str], str]:
    """Runs a script of the shell with a small disk at `folder`/disk, as only it sees it. Returns
    the lines of its output, and standard error."""
    if not can_mount():
        pytest.skip("needs root, or user namespaces")
    disk = folder / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={KIB}k tmpfs {shlex.quote(str(disk))}"
    done = subprocess.run(
        [*_NAMESPACE, "sh", "-c", f"{mount} && cd {shlex.quote(str(disk))} && {script}"],
        capture_output=True, text=True, check=False, timeout=120,
        env=os.environ | {"OCTAVO_HOME": str(folder / "home")},
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def model_folder(folder: Path, size: int) -> Path:
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(os.urandom(size))
    return source


def test_a_fetch_says_how_much_room_there_is_and_leaves_no_lock(tmp_path):
    source = model_folder(tmp_path, 4 * KIB * 1024)
    lines, _ = on_small_disk(
        tmp_path, f"{OCTAVO} fetch file://{source} --to m; echo code $?; ls -A m"
    )
    code = lines.index(f"code {EXIT_CODES[FetchReason.DISK_FULL]}")
    assert '"reason": "ModelDiskFull"' in lines[code - 1]
    assert not {".octavo-lock", ".octavo-complete.json", "model.safetensors"} & set(lines[code:])


FILL = "cat /dev/zero > zeros 2>/dev/null; "


def test_a_lock_that_a_full_disk_left_empty_keeps_nobody_waiting(tmp_path):
    source = model_folder(tmp_path, 1)
    fetch = f"{OCTAVO} fetch file://{source} --to m"
    lines, _ = on_small_disk(
        tmp_path, f"mkdir m; {FILL} {fetch}; echo code $?; ls -A m; rm zeros; {fetch}; echo code $?"
    )
    full, good = f"code {EXIT_CODES[FetchReason.DISK_FULL]}", "code 0"
    assert [line for line in lines if line.startswith("code ")] == [full, good]
    assert lines[lines.index(full) + 1] != ".octavo-lock"
    assert not any('"phase": "waiting"' in line for line in lines)


def test_a_home_without_room_is_named(tmp_path):
    lines, error = on_small_disk(
        tmp_path,
        f"mkdir home; {FILL} OCTAVO_HOME=$PWD/home {OCTAVO} up demo://smollm2; echo code $?",
    )
    assert lines[-1] == "code 2"
    assert error.count("\n") == 1 and "OCTAVO_HOME" in error and "No space left" in error


def test_run_batch_names_the_output_and_how_to_go_on(tmp_path):
    lines, error = on_small_disk(
        tmp_path,
        """for i in $(seq 400); do echo '{"custom_id": "'$i'", "method": "POST", "url": """
        """"/v1/completions", "body": {"prompt": "a", "max_tokens": 64}}'; done > ../in.jsonl; """
        f"{OCTAVO} run-batch m --device sim -i ../in.jsonl -o out.jsonl; echo code $?",
    )
    assert lines[-1] == "code 2"
    assert error.splitlines()[-1] == (
        "octavo: --output-file out.jsonl: No space left on device; free some space, and go on with "
        "--resume"
    )
