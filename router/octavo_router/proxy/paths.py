"""Which paths are proxied, and how their bodies are read. Whatever is not here is not let through.

A closed table: an engine has more routes than clients should reach (to drain it, to load adapters),
and new ones in later versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from octavo_router.residency.api import CHAT, COMPLETION, OTHER

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ProxiedPath:
    """One row."""

    path: str
    kind: int = OTHER  # what `scan` reads and makes keys of
    is_json: bool = True  # else the body is not looked at: an upload
    generates: bool = False  # its answers can be streamed, and must not be empty
    resumes: bool = False  # our engines tell the tokens of its streams, and can go on with them


_ROWS: Final = (
    ProxiedPath("/v1/chat/completions", CHAT, generates=True, resumes=True),
    ProxiedPath("/v1/completions", COMPLETION, generates=True, resumes=True),
    ProxiedPath("/v1/responses", generates=True),
    ProxiedPath("/v1/messages", generates=True),
    ProxiedPath("/v1/messages/count_tokens"),
    ProxiedPath("/v1/embeddings"),
    ProxiedPath("/v1/rerank"),
    ProxiedPath("/v1/score"),
    ProxiedPath("/v2/rerank"),
    ProxiedPath("/v2/embed"),
    ProxiedPath("/rerank"),
    ProxiedPath("/score"),
    ProxiedPath("/pooling"),
    ProxiedPath("/classify"),
    ProxiedPath("/tokenize"),
    ProxiedPath("/detokenize"),
    ProxiedPath("/v1/audio/transcriptions", is_json=False),
    ProxiedPath("/v1/audio/translations", is_json=False),
)

PROXIED: Final[Mapping[str, ProxiedPath]] = MappingProxyType({row.path: row for row in _ROWS})
