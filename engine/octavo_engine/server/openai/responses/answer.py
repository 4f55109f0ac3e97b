"""One response as it comes about: its items, and the events that describe each change.

created → in_progress → for each item: added, its parts and deltas, done → completed, incomplete or
failed. A response that is not streamed is made the same way, without its events.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.server.generation.logprobs import chat_logprobs
from octavo_engine.server.openai.chat.parts import ChatParts, PartDelta, PartEnded, PartStarted
from octavo_engine.server.openai.response_schemas import TokenLogprob
from octavo_engine.server.openai.responses import shapes
from octavo_engine.server.openai.responses.items import item_id

if TYPE_CHECKING:
    from octavo_engine.core.text.logprobs import DecodedLogprobs
    from octavo_engine.errors import RequestError
    from octavo_engine.server.generation.usage import Usage
    from octavo_engine.server.openai.chat.parts import ChatPart, Step
    from octavo_engine.server.openai.chat.session import ChoiceDelta
    from octavo_engine.server.openai.responses.shapes import (
        Event,
        ItemStatus,
        OutputItem,
        ResponseObject,
    )

_ID_BEGINS = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseBuilder:
    """Of one response; `response` is true after each call."""

    def __init__(self, response: ResponseObject) -> None:
        self.response = response
        self._parts = ChatParts()
        self._ids: list[str] = []
        self._num_events = 0
        self._finish_reason: str | None = None

    def begin(self) -> list[Event]:
        self.response.status = "in_progress"
        return [
            shapes.ResponseCreated(response=self.response, sequence_number=self._next()),
            shapes.ResponseInProgress(response=self.response, sequence_number=self._next()),
        ]

    def read(self, delta: ChoiceDelta) -> list[Event]:
        """Hot path: once per delta."""
        events = self._events(self._parts.read(delta))
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        return events

    def end(self, usage: Usage) -> list[Event]:
        """The last items are done, and `response` is as it will stay. See `last`."""
        events = self._events(self._parts.end())
        response = self.response
        if not response.output and self._finish_reason == "stop":
            events += self._events(self._parts.nothing())
        response.usage = usage_of(usage)
        response.completed_at = int(time.time())
        match self._finish_reason:
            case "length":
                response.status = "incomplete"
                response.incomplete_details = shapes.IncompleteDetails(reason="max_output_tokens")
            case "abort":
                response.status = "cancelled"
            case _:
                response.status = "completed"
        return events

    def last(self) -> Event:
        """The event that ends the stream."""
        number = self._next()
        if self.response.status == "completed":
            return shapes.ResponseCompleted(response=self.response, sequence_number=number)
        return shapes.ResponseIncomplete(response=self.response, sequence_number=number)

    def fail(self, error: RequestError) -> list[Event]:
        self.response.status = "failed"
        self.response.error = failure_of(error)
        return [
            shapes.StreamErrorEvent(
                code=error.code,
                message=error.message,
                param=error.param,
                sequence_number=self._next(),
            ),
            shapes.ResponseFailed(response=self.response, sequence_number=self._next()),
        ]

    # ── from steps to events ──

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _events(self, steps: list[Step]) -> list[Event]:
        events: list[Event] = []
        for step in steps:
            match step:
                case PartStarted(part):
                    self._begun(part, events)
                case PartDelta(part, text, logprobs):
                    events.append(self._more(part, text, logprobs))
                case PartEnded(part):
                    self._ended(part, events)
        return events

    def _begun(self, part: ChatPart, events: list[Event]) -> None:
        self._ids.append(item_id(_ID_BEGINS[part.kind], self.response.id, part.index))
        item = self._item(part, "in_progress", is_empty=True)
        self.response.output.append(item)
        at = part.index
        events.append(
            shapes.ItemAdded(output_index=at, item=item, sequence_number=self._next())
        )  # fmt: skip
        if part.kind != "call":
            events.append(
                shapes.PartAdded(
                    output_index=at, item_id=self._ids[at], content_index=0,
                    part=_content(part, is_empty=True), sequence_number=self._next(),
                )
            )  # fmt: skip

    def _more(self, part: ChatPart, text: str, logprobs: list[DecodedLogprobs]) -> Event:
        at, id_, number = part.index, self._ids[part.index], self._next()
        if part.kind == "call":
            return shapes.ArgumentsDelta(
                output_index=at, item_id=id_, delta=text, sequence_number=number
            )
        if part.kind == "reasoning":
            return shapes.ReasoningDelta(
                output_index=at, item_id=id_, content_index=0, delta=text, sequence_number=number
            )
        return shapes.OutputTextDelta(
            output_index=at, item_id=id_, content_index=0, delta=text,
            logprobs=_scores(logprobs), sequence_number=number,
        )  # fmt: skip

    def _ended(self, part: ChatPart, events: list[Event]) -> None:
        at, id_, number = part.index, self._ids[part.index], self._next()
        done: Event
        if part.kind == "call":
            done = shapes.ArgumentsDone(
                output_index=at, item_id=id_, name=part.name, arguments=part.text,
                sequence_number=number,
            )  # fmt: skip
        elif part.kind == "reasoning":
            done = shapes.ReasoningDone(
                output_index=at, item_id=id_, content_index=0, text=part.text,
                sequence_number=number,
            )  # fmt: skip
        else:
            done = shapes.OutputTextDone(
                output_index=at, item_id=id_, content_index=0, text=part.text,
                logprobs=_scores(part.logprobs), sequence_number=number,
            )  # fmt: skip
        events.append(done)
        if part.kind != "call":
            events.append(
                shapes.PartDone(
                    output_index=at, item_id=id_, content_index=0, part=_content(part),
                    sequence_number=self._next(),
                )
            )  # fmt: skip
        # Only what was cut off by the end of the answer is incomplete: all else has an end.
        item = self._item(part, "incomplete" if self._is_cut else "completed")
        self.response.output[at] = item
        events.append(shapes.ItemDone(output_index=at, item=item, sequence_number=self._next()))

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason in ("length", "abort")

    def _item(self, part: ChatPart, status: ItemStatus, *, is_empty: bool = False) -> OutputItem:
        id_ = self._ids[part.index]
        if part.kind == "call":
            arguments = "" if is_empty else part.text
            return shapes.FunctionCallItem(
                id=id_, status=status, call_id=part.call_id, name=part.name, arguments=arguments
            )
        content = _content(part)
        if isinstance(content, shapes.ReasoningText):
            return shapes.ReasoningItem(
                id=id_, status=status, summary=[], content=[] if is_empty else [content]
            )
        return shapes.OutputMessage(
            id=id_, status=status, role="assistant", content=[] if is_empty else [content]
        )


def frame(event: Event) -> bytes:
    """As it goes over the wire."""
    return b"event: %s\ndata: %s\n\n" % (
        str(event.__struct_config__.tag).encode(),
        msgspec.json.encode(event),
    )


def failure_of(error: RequestError) -> shapes.ResponseFailure:
    return shapes.ResponseFailure(code=error.code or "server_error", message=error.message)


def usage_of(usage: Usage) -> shapes.ResponseUsage:
    prompt, answer = usage.prompt_tokens, usage.completion_tokens
    return shapes.ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=shapes.InputTokensDetails(
            cached_tokens=usage.cached_tokens, cache_write_tokens=0
        ),
        output_tokens=answer,
        output_tokens_details=shapes.OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=prompt + answer,
    )


def _content(
    part: ChatPart, *, is_empty: bool = False
) -> shapes.OutputText | shapes.ReasoningText:  # fmt: skip
    text = "" if is_empty else part.text
    if part.kind == "reasoning":
        return shapes.ReasoningText(text=text)
    scores = [] if is_empty else _scores(part.logprobs)
    return shapes.OutputText(text=text, annotations=[], logprobs=scores)


def _scores(logprobs: list[DecodedLogprobs]) -> list[TokenLogprob]:
    if not logprobs:
        return []
    return msgspec.convert(chat_logprobs(logprobs, as_ids=False)["content"], list[TokenLogprob])
