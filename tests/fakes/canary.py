"""Secrets that no other text contains, and the search for them in whatever was written."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(slots=True)
class Canaries:
    """Each by the place that takes it; `find` names place and finding, never a text twice."""

    by_place: dict[str, str] = field(default_factory=dict)

    def new(self, place: str) -> str:
        """For `place`; of no characters that any encoding here escapes."""
        self.by_place[place] = f"canary-{secrets.token_hex(16)}"
        return self.by_place[place]

    def find(self, written: dict[str, Any]) -> list[str]:
        """`place in name` for each secret that is in what was written under that name: as it is,
        in base64, in hexadecimal, or escaped as in URLs."""
        found = []
        for name, content in written.items():
            data = content if isinstance(content, bytes) else _text(content).encode()
            for place, secret in self.by_place.items():
                if any(form in data for form in _forms(secret)):
                    found.append(f"{place} in {name}")
        return found


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below the folder, by their path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _text(content: Any) -> str:
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()


def _forms(secret: str) -> set[bytes]:
    raw = secret.encode()
    # Base64 of a text that contains it: three forms, by where it begins; their outer characters
    # depend on what is beside it.
    inside = {base64.b64encode(b"\0" * at + raw)[4 * bool(at) : -4] for at in range(3)}
    inside = {form[3:] if form.startswith(b"AAA") else form for form in inside}
    return {raw, raw.hex().encode(), quote(secret, safe="").encode(), *inside}
