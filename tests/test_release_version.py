"""`python -m release.version`: a release has one version, and its tag names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from release import version

if TYPE_CHECKING:
    from pathlib import Path

CHART = "charts/octavo/Chart.yaml"
ONE = {
    "pyproject.toml": "1.2.0",
    f"{CHART}: version": "1.2.0",
    f"{CHART}: appVersion": "1.2.0",
    "CHANGELOG.md": "1.2.0",
}


def test_ours_agree():
    assert version.problems(version.versions(version.ROOT)) == []


def test_versions_are_read_from_each_place(tmp_path: Path):
    (tmp_path / "charts" / "octavo").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / CHART).write_text('name: octavo\nversion: 1.2.0\nappVersion: "1.2.0"\n')
    log = tmp_path / "CHANGELOG.md"
    log.write_text("# Changelog\n\n## Unreleased\n\n## 1.2.0 (2026-01-02)\n\n## 1.1.0\n")
    assert version.versions(tmp_path) == ONE
    log.write_text("# Changelog\n\n## Unreleased\n")
    assert version.versions(tmp_path)["CHANGELOG.md"] == ""


@pytest.mark.parametrize("place", [place for place in ONE if place != "pyproject.toml"])
def test_a_place_that_differs_is_named(place: str):
    (problem,) = version.problems({**ONE, place: "1.1.0"}, "v1.2.0")
    assert problem == f"{place} has version 1.1.0, pyproject.toml has 1.2.0"


def test_the_tag_names_the_version():
    assert version.problems(ONE, "v1.2.0") == []
    for tag in ("v1.2.1", "1.2.0"):
        (problem,) = version.problems(ONE, tag)
        assert problem == f"The tag {tag} is not v1.2.0, the version in pyproject.toml"


def test_only_a_release_needs_a_section_in_the_changelog():
    without = {**ONE, "CHANGELOG.md": ""}
    assert version.problems(without) == []
    assert version.problems(without, "v1.2.0") == [
        "CHANGELOG.md has version none, pyproject.toml has 1.2.0"
    ]


def test_a_wrong_tag_ends_with_status_1(capsys: pytest.CaptureFixture[str]):
    assert version.main(["v0.0.0"]) == 1
    assert "The tag v0.0.0 is not" in capsys.readouterr().err
