"""The pictures of a conversation: found in its messages, prepared, put into its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.core.media.budget import ByteBudget
from octavo_engine.core.media.prompt import PromptMedia, expand
from octavo_engine.core.media.sources import PICTURE_PART, picture_url
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.gather import all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.picture_sources import PictureSources
    from octavo_engine.core.media.prepare import PreparedPicture
    from octavo_engine.core.media.workers import PictureWorkers
    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.server.openai.chat.conversation import RenderedPrompt
    from octavo_engine.server.openai.schemas import ChatMessageBody
    from octavo_engine.server.service import Service


def picture_urls(messages: Sequence[ChatMessageBody]) -> list[tuple[str, str]]:
    """(field, URL) of each picture in order. Raises InvalidRequest."""
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if part.type == PICTURE_PART:
                field = f"messages[{index}].content[{number}].image_url"
                found.append((field, picture_url(field, part.image_url)))
    return found


async def with_pictures(
    workers: PictureWorkers,
    sources: PictureSources,
    messages: Sequence[ChatMessageBody],
    ids: list[int],
    limits: RequestLimits,
) -> tuple[list[int], PromptMedia | None]:
    """The rendered prompt with its pictures. Raises RequestError."""
    urls = picture_urls(messages)
    most = limits.max_images if workers.max_images is None else workers.max_images
    if len(urls) > most:
        raise InvalidRequest(
            f"messages hold {len(urls)} pictures; at most {most} may be sent in one request",
            param="messages",
        )
    if not urls:
        return ids, None
    budget = ByteBudget(limits.max_body_bytes)  # what a request could bring itself

    async def prepared(field: str, url: str) -> PreparedPicture:
        data = await sources.read(url, field, budget)
        return await workers.prepare(data, field, num_pictures=len(urls))

    pictures = await all_of(prepared(*each) for each in urls)
    expanded, media = expand(ids, pictures, workers.tokens)
    return expanded, media


async def counted_with_pictures(
    service: Service, messages: Sequence[ChatMessageBody], prompt: RenderedPrompt
) -> RenderedPrompt:
    """The prompt as it would run, for endpoints that count it. Raises RequestError."""
    workers = service.engine.pictures
    if workers is None:
        return prompt
    ids, _ = await with_pictures(
        workers, service.picture_sources, messages, prompt.ids, service.settings.limits
    )
    return prompt._replace(ids=ids)
