"""`make audit`: what it reads of lock files, what it objects to, and that ours are in order."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from release import audit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOCK = """\
Jinja2==3.1.6 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cc
"""


def problems(text: str, requirements: Sequence[str] = ()) -> list[str]:
    packages = list(audit.locked(text, "f.txt"))
    return list(audit.findings(packages, map(Requirement, requirements)))


def test_a_lock_file_is_read():
    jinja2, colorama = audit.locked(LOCK, "f.txt")
    assert jinja2 == audit.Locked("jinja2", "3.1.6", "", 2, "f.txt")
    assert colorama == audit.Locked("colorama", "0.4.6", 'sys_platform == "win32"', 1, "f.txt")


@pytest.mark.parametrize(
    ("text", "requirements", "problem"),
    [
        ("none-such==1", [], "f.txt: none-such has no hash"),
        ("none-such>=1 --hash=sha256:aa", [], "f.txt: none-such is not pinned to one version"),
        (LOCK, ["jinja2>=3.1.7"], "f.txt: jinja2 3.1.6 does not meet jinja2>=3.1.7"),
        ("", ["msgspec<0.1"], "installed: msgspec"),
    ],
)
def test_what_is_wrong_is_named(text: str, requirements: list[str], problem: str):
    (found,) = (each for each in problems(text, requirements) if "installed: jinja2" not in each)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("licence", "is_refused"),
    [
        ("GPL-3.0-or-later", True),
        ("GNU Affero General Public License v3", True),
        ("AGPL-3.0", True),
        ("GNU General Public License v2 (GPLv2)", True),
        ("LGPL-2.1", False),
        ("GNU Lesser General Public License v3", False),
        ("MPL-2.0 AND MIT", False),
        (audit.UNKNOWN, False),
    ],
)
def test_licences_that_bind_our_users_are_refused(
    monkeypatch: pytest.MonkeyPatch, licence: str, is_refused: bool
):
    monkeypatch.setattr(audit, "licence", lambda name: licence)
    assert bool(problems(LOCK)) == is_refused


def test_our_lock_files_are_in_order(capsys: pytest.CaptureFixture[str]):
    assert audit.main(["--offline"]) == 0
    shown = capsys.readouterr().out
    assert "jinja2" in shown
    assert "were not searched for: --offline" in shown


def test_a_known_vulnerability_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = "Found 1 known vulnerability in 1 package"
    done = subprocess.CompletedProcess([], 1, "jinja2 3.1.6 CVE-1\n", found + "\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert audit.vulnerabilities([tmp_path]) == found


def test_without_its_service_it_fails_and_says_what_was_not_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Whether pip-audit is missing or has no network."""
    lock = tmp_path / "f.txt"
    lock.write_text(LOCK)
    run = subprocess.run

    def unreachable(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip_audit", "--strict"]  # else unknown packages pass
        code = "import sys; sys.exit('ERROR: could not connect')"
        return run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    monkeypatch.setattr(subprocess, "run", unreachable)
    said = audit.vulnerabilities([lock])
    assert said == (
        "Known vulnerabilities were not checked, pip-audit failed: ERROR: could not connect"
    )
    assert audit.main([str(lock)]) == 1
