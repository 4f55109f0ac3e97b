"""The pictures or sounds of a conversation: found in its messages, prepared, put into its
prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.core.media.budget import ByteBudget
from octavo_engine.core.media.held import MAX_NAME_CHARS
from octavo_engine.core.media.prompt import PromptMedia, expand
from octavo_engine.core.media.sources import MEDIA_PARTS, picture_url, sound_data
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.gather import all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.core.media.prepare import PreparedPicture
    from octavo_engine.models.vision_config import MediaKind
    from octavo_engine.server.openai.chat.conversation import RenderedPrompt
    from octavo_engine.server.openai.schemas import ChatMessageBody
    from octavo_engine.server.service import Service


class SentMedia(NamedTuple):
    """A part of a message that holds a picture or a sound, or names one that was sent before."""

    field: str
    type: str
    value: Any  # an object or a URL; None and {}: it is named by its uuid alone
    uuid: str | None


def media_kind(service: Service) -> MediaKind | None:
    """What the model takes besides text."""
    workers = service.engine.pictures
    return None if workers is None else workers.kind


def media_parts(messages: Sequence[ChatMessageBody]) -> list[SentMedia]:
    """In their order. Raises InvalidRequest."""
    found = []
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            if part.type in MEDIA_PARTS:
                at = f"messages[{index}].content[{number}]"
                value = getattr(part, part.type)
                found.append(SentMedia(f"{at}.{part.type}", part.type, value, part.uuid))
                if part.uuid is not None and not 1 <= len(part.uuid) <= MAX_NAME_CHARS:
                    raise InvalidRequest(
                        f"{at}.uuid must have 1 to {MAX_NAME_CHARS} characters", param=f"{at}.uuid"
                    )
    return found


async def with_pictures(
    service: Service, messages: Sequence[ChatMessageBody], ids: list[int], owner: bytes
) -> tuple[list[int], PromptMedia | None]:
    """The rendered prompt with its pictures or sounds. `owner`: whose they are, for what is held.
    Raises RequestError."""
    workers, limits = service.engine.pictures, service.settings.limits
    parts = [] if workers is None else media_parts(messages)
    if workers is None or not parts:
        return ids, None
    most = limits.max_images if workers.max_images is None else workers.max_images
    if len(parts) > most:
        raise InvalidRequest(
            f"messages hold {len(parts)} {workers.spec.media.noun}; at most {most} may be sent in "
            "one request",
            param="messages",
        )
    budget = ByteBudget(limits.max_body_bytes)  # what a request could bring itself

    async def prepared(part: SentMedia) -> PreparedPicture:
        data = await _file(service, part, budget, owner)
        picture = await workers.prepare(data, part.field, num_pictures=len(parts))
        if part.uuid is not None:
            service.held_media.hold(owner, part.uuid, data)
        return picture

    pictures = await all_of(map(prepared, parts))
    expanded, media = expand(ids, pictures, workers.tokens)
    return expanded, media


async def counted_with_pictures(
    service: Service, messages: Sequence[ChatMessageBody], prompt: RenderedPrompt, owner: bytes
) -> RenderedPrompt:
    """The prompt as it would run, for endpoints that count it. Raises RequestError."""
    ids, _ = await with_pictures(service, messages, prompt.ids, owner)
    return prompt._replace(ids=ids)


async def _file(service: Service, part: SentMedia, budget: ByteBudget, owner: bytes) -> bytes:
    """Raises RequestError."""
    if part.uuid is not None and not part.value:
        return service.held_media.find(owner, part.uuid, part.field)
    if part.type == "input_audio":
        return sound_data(part.field, part.value)
    url = picture_url(part.field, part.value)
    return await service.picture_sources.read(url, part.field, budget, MEDIA_PARTS[part.type])
