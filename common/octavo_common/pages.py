"""HTML pages that need no other host, each with the policy that lets only its own scripts run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final, NamedTuple

_FOLDER: Final = Path(__file__).with_name("web")
API_DOCS: Final = _FOLDER / "api_docs.html"  # shows /openapi.json beside it
CSS: Final = "text/css; charset=utf-8"
JAVASCRIPT: Final = "text/javascript; charset=utf-8"
CHAT_FILES: Final = {  # of pages with a chat, which expect them under console/
    "chat.css": (_FOLDER / "chat.css", CSS),
    "chat.js": (_FOLDER / "chat.js", JAVASCRIPT),
    "markdown.js": (_FOLDER / "markdown.js", JAVASCRIPT),
}
_INLINE: Final = re.compile(rb"<(?:script|style)(?: type=\"module\")?>(.*?)</", re.DOTALL)


class InlinePage(NamedTuple):
    content: bytes
    headers: tuple[tuple[str, str], ...]  # the content type aside


def read_page(path: Path) -> InlinePage:
    """The page at `path`; its scripts and styles are inline or of the same server."""
    content = path.read_bytes()
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"
        for inline in re.findall(_INLINE, content)
    )
    policy = (
        f"default-src 'none'; script-src 'self' {allowed}; style-src 'self' {allowed}; "
        "connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return InlinePage(
        content,
        (
            ("content-security-policy", policy),
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
        ),
    )
