"""`python -m octavo_engine.server` in a checkout: writes the pages of docs/ that tables make."""

from __future__ import annotations

from pathlib import Path

from octavo_engine.server.docs.pages import api_page, errors_page
from octavo_engine.server.routes import ROUTES


def derived() -> dict[Path, str]:
    """File → text."""
    return {Path("docs/errors.md"): errors_page(), Path("docs/api.md"): api_page(ROUTES)}


def main() -> None:
    for path, text in derived().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
