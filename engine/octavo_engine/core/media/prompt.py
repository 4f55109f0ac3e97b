"""Pictures in a prompt of token ids: each placeholder becomes as many as the picture has rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.errors import InvalidRequest
from octavo_engine.state.media import MediaItem, MediaSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.spec import PictureSpec


class PromptMedia(NamedTuple):
    """The pictures of one prompt."""

    spans: tuple[MediaSpan, ...]
    items: tuple[MediaItem, ...]  # each once


def expand(
    ids: Sequence[int], items: Sequence[MediaItem], spec: PictureSpec, *, param: str = "messages"
) -> tuple[list[int], PromptMedia]:
    """The prompt with its placeholders expanded. Raises InvalidRequest where there are not as many
    as pictures."""
    count = sum(token == spec.token_id for token in ids)
    if count != len(items):
        raise InvalidRequest(
            f"{param}: the prompt has places for {count} pictures, but {len(items)} were sent; "
            f"each needs one placeholder (token {spec.token_id}), which a chat template writes",
            param=param,
        )
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    pictures = iter(items)
    for token in ids:
        if token != spec.token_id:
            expanded.append(token)
            continue
        spans.append(MediaSpan(next(pictures).digest, len(expanded), spec.num_rows))
        expanded += [token] * spec.num_rows
    unique = {item.digest: item for item in items}
    return expanded, PromptMedia(tuple(spans), tuple(unique.values()))
