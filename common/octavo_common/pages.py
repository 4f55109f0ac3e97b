"""HTML pages that need no other host, each with the policy that lets only its own script run."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final, NamedTuple

API_DOCS: Final = Path(__file__).with_name("api_docs.html")  # shows /openapi.json beside it


class InlinePage(NamedTuple):
    content: bytes
    headers: tuple[tuple[str, str], ...]  # the content type aside


def read_page(path: Path) -> InlinePage:
    """The page at `path`, whose scripts and styles are inline."""
    content = path.read_bytes()
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"
        for inline in re.findall(rb"<(?:script|style)>(.*?)</(?:script|style)>", content, re.S)
    )
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {allowed}; connect-src 'self'; "
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
