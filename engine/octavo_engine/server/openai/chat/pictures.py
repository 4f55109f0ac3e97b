"""The pictures of a conversation: found in its messages, prepared, put into its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.core.media.prompt import PromptMedia, expand
from octavo_engine.core.media.sources import read_data_url
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.gather import all_of
from octavo_engine.server.openai.chat.conversation import PICTURE_PART

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.workers import PictureWorkers
    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.server.openai.chat.conversation import RenderedPrompt
    from octavo_engine.server.openai.schemas import ChatMessageBody
    from octavo_engine.server.service import Service
    from octavo_engine.state.media import MediaItem

DETAILS = ("auto", "low", "high", "original")  # accepted; a model has one way to look


def picture_urls(messages: Sequence[ChatMessageBody]) -> list[tuple[str, str]]:
    """(field, URL) of each picture in order. Raises InvalidRequest."""
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if part.type == PICTURE_PART:
                field = f"messages[{index}].content[{number}].image_url"
                found.append((field, _url(field, part.image_url)))
    return found


async def with_pictures(
    workers: PictureWorkers,
    messages: Sequence[ChatMessageBody],
    ids: list[int],
    limits: RequestLimits,
) -> tuple[list[int], PromptMedia | None]:
    """The rendered prompt with its pictures. Raises RequestError."""
    urls = picture_urls(messages)
    if len(urls) > limits.max_images:
        raise InvalidRequest(
            f"messages hold {len(urls)} pictures; at most {limits.max_images} may be sent in one "
            "request",
            param="messages",
        )
    if not urls:
        return ids, None
    files = [(read_data_url(url, field), field) for field, url in urls]
    items: list[MediaItem] = await all_of(workers.prepare(*file) for file in files)
    expanded, media = expand(ids, items, workers.spec)
    return expanded, media


async def counted_with_pictures(
    service: Service, messages: Sequence[ChatMessageBody], prompt: RenderedPrompt
) -> RenderedPrompt:
    """The prompt as it would run, for endpoints that count it. Raises RequestError."""
    workers = service.engine.pictures
    if workers is None:
        return prompt
    ids, _ = await with_pictures(workers, messages, prompt.ids, service.settings.limits)
    return prompt._replace(ids=ids)


def _url(field: str, value: dict[str, Any] | str | None) -> str:
    if isinstance(value, dict):
        detail = value.get("detail")
        if detail is not None and detail not in DETAILS:
            raise InvalidRequest(
                f"{field}.detail must be one of {', '.join(DETAILS)}", param=f"{field}.detail"
            )
        value = value.get("url")
        field = f"{field}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is required", param=field)
    return value
