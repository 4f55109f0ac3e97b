"""`python -m octavo_router.config.docs` in a checkout: the settings' tables in docs/router.md."""

from __future__ import annotations

from pathlib import Path

from octavo_router.config.show import reference

PAGE = Path("docs/router.md")
BEGIN = "<!-- settings: made by `python -m octavo_router.config.docs` -->"
END = "<!-- end of settings -->"


def with_settings(page: str) -> str:
    """The page with what stands between the two marks made anew."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} must have the lines {BEGIN} and {END}, in this order")
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{tail}"


def main() -> None:
    PAGE.write_text(with_settings(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
