"""The page's files. They load nothing from elsewhere, and headers make browsers enforce that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo_common.pages import CHAT_FILES, CSS, JAVASCRIPT
from octavo_router.http.messages import Inbound, Reply

if TYPE_CHECKING:
    from octavo_router.http.messages import Handler

_FOLDER: Final = Path(__file__).with_name("static")

FILES: Final = {
    "/": (_FOLDER / "index.html", "text/html; charset=utf-8"),
    "/console/console.css": (_FOLDER / "console.css", CSS),
    "/console/console.js": (_FOLDER / "console.js", JAVASCRIPT),
    "/console/draw.js": (_FOLDER / "draw.js", JAVASCRIPT),
    **{f"/console/{name}": asset for name, asset in CHAT_FILES.items()},
}
SECURITY = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


def routes() -> dict[tuple[str, str], Handler]:
    """Open even where keys are required: the files hold nothing of this router."""
    return {("GET", path): _serve(file, kind) for path, (file, kind) in FILES.items()}


def _serve(file: Path, kind: str) -> Handler:
    reply: list[Reply] = []  # read at the first request

    def serve(request: Inbound) -> Reply:
        if not reply:
            reply.append(Reply(200, file.read_bytes(), kind, SECURITY))
        return reply[0]

    return serve
