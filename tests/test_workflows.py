"""The workflows under .github: their commands exist, and their actions are pinned to a version."""

from __future__ import annotations

import re
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
    """The signature is not among it: a key that a workflow makes proves nothing."""
    run = commands(ROOT / ".github" / "workflows" / "release.yml")
    assert "make wheels" in run
    assert "make release" in run
    assert "octavo bundle load build/octavo.bundle --registry" in run
    assert "RELEASE_ARGS" not in run, "all of the images"
    removed, upload = run.splitlines()[-2:]
    assert removed == "rm build/release/SHA256SUMS.sig"
    assert upload.startswith(
        "find build/release -type f -size -2147483648c -exec gh release upload"
    )
