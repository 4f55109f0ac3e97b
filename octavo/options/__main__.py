"""Writes docs/settings.md: `python -m octavo.options` in a checkout."""

from __future__ import annotations

from pathlib import Path

from octavo.options.page import settings_page

if __name__ == "__main__":
    Path("docs/settings.md").write_text(settings_page(), encoding="utf-8")
