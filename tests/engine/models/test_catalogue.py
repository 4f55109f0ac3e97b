"""docs/models.md: complete, true to the tables, and up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo_engine.models.catalogue import CATALOGUE, missing_architectures, models_page
from octavo_engine.models.families import FAMILIES
from tests.engine.models.classics import TWINS
from tests.engine.models.tiny import FAMILIES as TINY
from tests.engine.models.tiny import ON_DEVICES, architecture_of
from tests.engine.models.tiny_seeing import SEEING, seeing_model

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_tables_make() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == models_page(), "run python -m octavo_engine.models"


def test_other_pages_state_the_same_number() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(\d+) families", page)) == {str(len(CATALOGUE))}
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"all {len(ON_DEVICES)} tiny models" in page


def test_each_architecture_is_named_once() -> None:
    named = [own for entry in CATALOGUE for own in entry.architectures]
    assert len(named) == len(set(named))
    assert set(named) <= set(FAMILIES)
    assert missing_architectures() == set()


def test_each_family_says_which_class_it_is_tested_as() -> None:
    twins = {twin.architecture: twin.kind for twin in TWINS.values()}
    for entry in CATALOGUE:
        assert {twins.get(own, "") for own in entry.architectures} >= {entry.tested_as}


_TEXT = [entry for entry in CATALOGUE if entry.name != "Whisper"]


@pytest.mark.parametrize("entry", _TEXT, ids=lambda entry: entry.name)
def test_limits_of_devices_are_those_of_the_models(entry) -> None:
    names = [
        name
        for name, (kind, _) in TINY.items()
        if (TWINS[name].architecture if name in TWINS else architecture_of(kind))
        in entry.architectures
    ]
    seeing = {seeing_model(name).config["architectures"][0] for name in SEEING}
    assert names or seeing & set(entry.architectures)
    assert ("CPU only" in entry.limits) == (not set(names) <= set(ON_DEVICES))
