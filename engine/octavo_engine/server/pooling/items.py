"""From what clients send to what the model reads: texts, ids and conversations as PoolingItems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.core.pooling.async_pooling import PoolingItem
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.generation.prompts import COUNTED
from octavo_engine.server.openai.chat.conversation import rendered
from octavo_engine.tokenization.threads import off_loop
from octavo_engine.tokenization.tokenizer import check_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.server.pooling.bodies import PoolingFields, Side, TextFields
    from octavo_engine.server.service import Service
    from octavo_engine.tokenization.tokenizer import Tokenizer

Input = str | list[int]


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a text are kept, its special ones included; None: all or an error."""

    keep: int | None = None
    side: Side = "right"  # where tokens are lost

    @classmethod
    def of(cls, request: PoolingFields, max_model_len: int) -> Truncation:
        """Raises InvalidRequest (param "truncate_prompt_tokens")."""
        keep = request.truncate_prompt_tokens
        if keep == -1:
            keep = max_model_len
        if keep is not None and not 1 <= keep <= max_model_len:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or between 1 and the model's "
                f"{max_model_len}; got {keep}",
                param="truncate_prompt_tokens",
            )
        return cls(keep, request.truncation_side or "right")

    def apply(self, ids: list[int]) -> list[int]:
        if self.keep is None or len(ids) <= self.keep:
            return ids
        return ids[: self.keep] if self.side == "right" else ids[len(ids) - self.keep :]


async def text_items(
    service: Service, request: TextFields, *, prefix: str = ""
) -> list[PoolingItem]:
    """Of `input`, or one of `messages`. Raises InvalidRequest."""
    engine = service.engine
    cut = Truncation.of(request, engine.info.max_model_len)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("give either input or messages", param="input")
    most = None
    if cut.keep is None:
        # With the exact number the message says more, so only far more is refused unread.
        most = COUNTED * max(engine.info.max_model_len, service.settings.limits.max_embed_len)
    if request.input is None:
        prompt = await rendered(
            engine.tokenizer,
            request.conversation,
            service.settings.limits,
            trust_template=service.settings.trust_request_chat_template,
            add_special_tokens=bool(request.add_special_tokens),  # the template writes its own
            most=most,
        )
        return [PoolingItem(cut.apply(prompt.ids))]
    inputs = split_inputs(request.input, service.settings.limits.max_pooling_items)
    if prefix:
        inputs = [prefix + text if isinstance(text, str) else text for text in inputs]
    special = request.add_special_tokens is not False
    return await encoded(engine.tokenizer, inputs, special=special, cut=cut, most=most)


def split_inputs(given: str | list[str | int | list[int]], limit: int) -> list[Input]:
    """One entry a text. Raises InvalidRequest (param "input")."""
    if isinstance(given, str):
        return [_not_empty(given)]
    if not given:
        raise InvalidRequest("input is empty; it needs at least one text", param="input")
    if isinstance(given[0], int):
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) != len(given):
            raise _mixed()
        return [ids]
    check_count(len(given), limit, "input")
    inputs: list[Input] = []
    for item in given:
        if isinstance(item, int):
            raise _mixed()
        inputs.append(_not_empty(item))
    return inputs


def check_count(count: int, limit: int, param: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{param} must be at most {limit} texts; got {count}", param=param)


async def encoded(
    tokenizer: Tokenizer, inputs: Sequence[Input], *, special: bool, cut: Truncation,
    most: int | None = None,
) -> list[PoolingItem]:  # fmt: skip
    """Ids are taken as they are. Raises InvalidRequest; unread, where a text surely has more than
    `most` tokens."""

    texts = [text for text in inputs if isinstance(text, str)]

    def work() -> list[PoolingItem]:
        for text in texts if most is not None else ():
            check_length(tokenizer, text, most or 0, "input")
        # All texts at once: the tokenizer shares them out among the cores.
        read = iter(tokenizer.encode_batch(texts, add_special_tokens=special))
        items: list[PoolingItem] = []
        for each in inputs:
            if isinstance(each, str):
                ids = _fitting(tokenizer, each, next(read), special=special, cut=cut)
            else:
                ids = cut.apply(each)
            items.append(PoolingItem(ids))
        return items

    return await off_loop(work, sum(map(len, texts)))


def _fitting(
    tokenizer: Tokenizer, text: str, ids: list[int], *, special: bool, cut: Truncation
) -> list[int]:
    """The ids of a text, cut as prepared."""
    if cut.keep is None or len(ids) <= cut.keep or not special:
        return cut.apply(ids)
    # The special tokens around the text stay: a model that reads [CLS] must find it.
    inside = tokenizer.encode(text, add_special_tokens=False)
    room = cut.keep - (len(ids) - len(inside))
    begin = _place(inside, ids)
    if begin is None or room < 1:
        return cut.apply(ids)
    kept = Truncation(room, cut.side).apply(inside)
    return ids[:begin] + kept + ids[begin + len(inside) :]


def _place(inside: list[int], whole: list[int]) -> int | None:
    """Where the first list lies in the second."""
    size = len(inside)
    starts = range(len(whole) - size + 1)
    return next((at for at in starts if whole[at : at + size] == inside), None)


def _not_empty(text: Input) -> Input:
    if not text:
        raise InvalidRequest("input is empty; it needs at least one token", param="input")
    return text


def _mixed() -> InvalidRequest:
    return InvalidRequest("input mixes token ids with other items", param="input")
