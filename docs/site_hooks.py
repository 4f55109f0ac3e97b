"""For the site: links to files beside the docs, which only a forge can show, become their names."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """`[words](../path)` becomes: words (`path`), or the path alone where that is the words."""
    return _OUTSIDE.sub(_name, markdown)


def _name(link: re.Match[str]) -> str:
    words, path = link[1], link[2]
    return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"
