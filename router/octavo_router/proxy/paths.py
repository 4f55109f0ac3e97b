"""Which paths are proxied, and how their bodies are read. Whatever is not here is not let through.

A closed table: an engine has more routes than clients should reach (to drain it, to load adapters),
and new ones in later versions.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from octavo_router.proxy.stream_form import (
    CHUNKS,
    MESSAGE_BLOCKS,
    RESPONSE_ITEMS,
    StreamForm,
)
from octavo_router.residency.api import CHAT, COMPLETION, MESSAGES, OTHER, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ProxiedPath:
    """One row."""

    path: str  # `{id}` stands for one segment
    methods: tuple[str, ...] = ("POST",)
    _: KW_ONLY
    kind: int = OTHER  # what `scan` reads and makes keys of
    is_json: bool = True  # else the body is not looked at: an upload
    generates: bool = False  # its answers can be streamed, and must not be empty
    # How its streams are written, of which our engines tell the tokens, and can go on with them.
    resumes: StreamForm | None = None
    hands_over: bool = False  # vLLM's engines can share its work: prompt here, answer there
    keeps: bool = False  # its engine may keep the answer, or go on from one that it keeps
    salts: bool = False  # its engine may answer from the KV cache of other prompts
    is_kept: bool = False  # about such an answer, named by its id: there is no model, and no body


_ROWS: Final = (
    ProxiedPath(
        "/v1/chat/completions", kind=CHAT, generates=True, salts=True, resumes=CHUNKS,
        hands_over=True,
    ),
    ProxiedPath(
        "/v1/completions", kind=COMPLETION, generates=True, salts=True, resumes=CHUNKS,
        hands_over=True,
    ),
    ProxiedPath("/v1/chat/completions/batch", generates=True, salts=True),
    ProxiedPath("/v1/chat/completions/render"),
    ProxiedPath("/v1/completions/render"),
    ProxiedPath("/inference/v1/generate", generates=True, salts=True),
    ProxiedPath("/generative_scoring", salts=True),
    ProxiedPath(
        "/v1/responses", kind=RESPONSES, generates=True, salts=True, resumes=RESPONSE_ITEMS,
        keeps=True,
    ),
    ProxiedPath(
        "/v1/messages", kind=MESSAGES, generates=True, salts=True, resumes=MESSAGE_BLOCKS
    ),
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
    ProxiedPath("/v1/responses/input_tokens"),
    ProxiedPath("/v1/audio/transcriptions", is_json=False),
    ProxiedPath("/v1/audio/translations", is_json=False),
)  # fmt: skip

_KEPT: Final = (
    ProxiedPath("/v1/responses/{id}", ("GET", "DELETE"), is_json=False, is_kept=True),
    ProxiedPath("/v1/responses/{id}/cancel", is_json=False, is_kept=True),
    ProxiedPath("/v1/responses/{id}/input_items", ("GET",), is_json=False, is_kept=True),
)

# What lies in one engine's folder. Which one, nobody could tell once that engine was replaced.
_ONE_ENGINES: Final = re.compile(r"/v1/(files|batches|messages/batches)(/|$)")

PROXIED: Final[Mapping[str, ProxiedPath]] = MappingProxyType({row.path: row for row in _ROWS})
UPLOADS: Final = frozenset(row.path for row in _ROWS if not row.is_json)
_BY_ENDING: Final = {row.path.partition("{id}")[2]: row for row in _KEPT}
_RESPONSES: Final = "/v1/responses/"


def is_one_engines(path: str) -> bool:
    """Files and batches, OpenAI's and Anthropic's, which no router can lead to."""
    return _ONE_ENGINES.match(path) is not None


def kept_path(path: str) -> tuple[ProxiedPath | None, str]:
    """The row of a path with an id in it, and the id."""
    if not path.startswith(_RESPONSES):
        return None, ""
    id_, slash, rest = path.removeprefix(_RESPONSES).partition("/")
    return (_BY_ENDING.get(slash + rest) if id_ else None), id_


def describes_proxied(path: str) -> bool:
    """Whether a path of an OpenAPI document, with `{…}` for an id, is let through."""
    return path in PROXIED or re.sub(r"\{\w+\}", "{id}", path) in {row.path for row in _KEPT}
