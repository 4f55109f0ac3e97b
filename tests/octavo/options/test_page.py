"""docs/settings.md is what the table of flags says."""

from __future__ import annotations

from octavo.options import flags
from octavo.options.page import OTHER_VARIABLES, settings_page
from tests.docs.pages import DOCS


def test_the_page_is_what_the_table_says():
    page = (DOCS / "settings.md").read_text()
    assert page == settings_page(), "run python -m octavo.options"


def test_every_variable_is_on_the_page():
    page = settings_page()
    for flag in (*flags.ENGINE_FLAGS, *flags.SERVER_FLAGS):
        assert f"`{flag.env}`" in page
    assert set(OTHER_VARIABLES) >= flags.OTHER_ENV
