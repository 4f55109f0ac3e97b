"""The workflows under .github: their commands exist, and their actions are pinned to a version."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["jobs"]
    return found


def steps(file: Path) -> list[dict[str, str]]:
    return [step for job in jobs(file).values() for step in job["steps"]]


def commands(file: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps(file))


def test_there_are_two():
    assert [file.stem for file in FILES] == ["check", "release"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_commands_that_are_run_exist(file: Path):
    known = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = re.findall(r"\bmake ([\w-]+)", commands(file))
    assert targets
    assert set(targets) <= known
    for module in re.findall(r"python -m ([\w.]+)", commands(file)):
        assert find_spec(module), module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_actions_are_pinned_and_rights_are_few(file: Path):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(file):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
    for job in jobs(file).values():
        assert job["timeout-minutes"]
        assert job["runs-on"] != "ubuntu-latest"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shell_commands_contain_no_expressions(file: Path):
    """A tag's name in `${{ … }}` is shell code; in the environment it is not."""
    assert "${{" not in commands(file)


def test_a_change_is_checked_as_contributing_requires():
    run = commands(ROOT / ".github" / "workflows" / "check.yml")
    for target in ("check", "test-all", "audit"):
        assert f"make {target}" in run


def test_a_tag_makes_the_whole_release_and_publishes_it():
    run = commands(ROOT / ".github" / "workflows" / "release.yml")
    assert "make wheels" in run
    assert "make release" in run
    assert "octavo bundle load build/octavo.bundle --registry" in run
    assert "RELEASE_ARGS" not in run, "all of the images"


_GH = """#!/bin/sh
case "$2" in
  download) cp -n "$ASSETS"/*.whl "$7" ;;
  upload) shift 3; for file; do [ "$file" = --clobber ] || cp "$file" "$ASSETS"; done ;;
esac
"""


def test_what_is_attached_has_its_sums(tmp_path: Path):
    """The last commands are run, with a release that is a folder."""
    made, assets, programs = tmp_path / "build" / "release", tmp_path / "assets", tmp_path / "bin"
    for folder in (made / "images", made / "sbom", assets, programs):
        folder.mkdir(parents=True)
    names = ("octavo-cp311.whl", "images/router.oci.tar", "sbom/router.cdx.json",
             "SHA256SUMS", "SHA256SUMS.sig")  # fmt: skip
    for name in names:
        (made / name).write_text(name)
    with (made / "images" / "engine-cuda.oci.tar").open("wb") as huge:
        huge.truncate(2**31)
    (assets / "octavo-cp311.whl").write_text("of the first job")
    (assets / "octavo-cp313.whl").write_text("of the first job")
    (programs / "gh").write_text(_GH)
    (programs / "gh").chmod(0o755)
    platform = jobs(ROOT / ".github" / "workflows" / "release.yml")["platform"]["steps"]
    path = f"{programs}:{os.environ['PATH']}"
    for step in platform[-3:]:
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step["run"]], check=True, cwd=tmp_path,
            env={"PATH": path, "TAG": "v0.1.0", "ASSETS": str(assets)},
        )  # fmt: skip
    assert sorted(file.name for file in assets.iterdir()) == [
        "SHA256SUMS", "octavo-cp311.whl", "octavo-cp313.whl", "router.cdx.json", "router.oci.tar",
    ]  # fmt: skip
    assert (assets / "octavo-cp311.whl").read_text() == "octavo-cp311.whl"
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, check=True, cwd=assets)
    assert len((assets / "SHA256SUMS").read_text().splitlines()) == 4
