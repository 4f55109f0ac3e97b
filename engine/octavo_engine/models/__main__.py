"""`python -m octavo_engine.models` in a checkout: writes docs/models.md."""

from __future__ import annotations

from pathlib import Path

from octavo_engine.models.catalogue import models_page


def main() -> None:
    Path("docs/models.md").write_text(models_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
