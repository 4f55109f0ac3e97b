"""A chat's answer as server-sent chunks: one a delta, none that is empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.server.generation.logprobs import chat_logprobs
from octavo_engine.server.generation.sse_writer import sse_sink
from octavo_engine.server.http.sse import DONE, Chunks
from octavo_engine.server.openai.chat.session import ChatSession, client_reason
from octavo_engine.server.routers.token_lines import TokenLines

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.chat.prepare import PreparedChat
    from octavo_engine.server.openai.chat.session import CallDelta, ChatDelta, ChoiceDelta
    from octavo_engine.server.service import Service


async def answer_stream(exchange: Exchange, service: Service, prepared: PreparedChat) -> None:
    writer = _EventWriter(exchange, service, prepared)
    await writer.session.run(sse_sink(exchange, writer), stream=True)


class _EventWriter:
    """From one request's deltas to its events."""

    def __init__(self, exchange: Exchange, service: Service, prepared: PreparedChat) -> None:
        request = prepared.request
        options = request.stream_options
        self.session = ChatSession(service, prepared)
        self.lines = TokenLines(
            prepared.job, self.session.usage, id=prepared.id, created=prepared.created,
            wanted=exchange.wants_tokens,
        )  # fmt: skip
        self._prepared = prepared
        self._chunks = Chunks(
            id=prepared.id,
            model=prepared.model,
            created=prepared.created,
            chat=True,
            role=prepared.role,
        )
        self._wants_ids = bool(request.return_token_ids)
        self._wants_sum = service.settings.force_include_usage or (
            options is not None and bool(options.include_usage)
        )
        self._wants_sums = options is not None and options.wants_sums
        # Chunks without text are sent too where they carry something else.
        self._is_verbose = bool(request.logprobs) or self._wants_ids or self._wants_sums
        self._sums = self.session.usage.copy()  # of what was written, an event after the other
        self._is_plain = prepared.reading.is_plain
        self._is_brief = self._is_plain and not self._is_verbose
        self._has_begun = False

    def events(self, delta: ChatDelta) -> bytes:
        """Hot path: once per delta."""
        frames: list[bytes] = []
        if self._wants_sums:
            self._sums.note_prompt(0, delta.output)
        if not self._has_begun:
            self._has_begun = True
            frames += self._opening(delta)
        for choice in delta.choices:
            self.lines.note(choice.index, choice.token_ids)
            if self._is_brief and choice.finish_reason is None:
                if choice.content:
                    head = self.lines.head(choice.index)
                    frames += (head, self._chunks.text(choice.index, choice.content))
            elif choice.says_something or (self._is_verbose and choice.token_ids):
                frames.append(self.lines.head(choice.index))
                frames.append(self._chunk(choice))
        return b"".join(frames)

    def is_last(self, delta: ChatDelta) -> bool:
        return delta.finished

    def end(self) -> bytes:
        if not self._wants_sum:
            return DONE
        return self._chunks.usage(self.session.usage.as_dict()) + DONE

    def _opening(self, delta: ChatDelta) -> list[bytes]:
        """The role of each choice that was not opened before, and what is echoed."""
        prepared = self._prepared
        frames: list[bytes] = []
        for index in range(prepared.job.params.n):
            if index in prepared.opened:
                continue
            head: dict[str, Any] = {}
            if index == 0 and self._wants_ids:
                head["prompt_token_ids"] = delta.output.prompt_token_ids
            if index == 0 and prepared.request.return_prompt_text:
                head["prompt_text"] = prepared.prompt
            if self._wants_sums:
                head["usage"] = self._sums.as_dict()
            frames.append(self.lines.head(index))
            frames.append(self._chunks.role(index, content=prepared.echo, **head))
        return frames

    def _chunk(self, choice: ChoiceDelta) -> bytes:
        logprobs = usage = None
        choice.finish_reason = client_reason(self._prepared, choice.finish_reason)
        if self._wants_sums:
            self._sums.note_answer(0, choice.index, choice.num_tokens)
            if choice.reasoning_tokens:
                self._sums.note_reasoning(choice.index, choice.reasoning_tokens)
            usage = self._sums.as_dict()
        if choice.logprobs is not None:
            logprobs = chat_logprobs(choice.logprobs, as_ids=self._prepared.as_ids)
        return self._chunks.delta(
            choice.index,
            choice,
            choice.content,
            delta=None if self._is_plain else self._delta(choice),
            logprobs=logprobs,
            token_ids=choice.token_ids if self._wants_ids else None,
            usage=usage,
        )

    def _delta(self, choice: ChoiceDelta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if choice.reasoning:
            delta["reasoning"] = choice.reasoning
        if choice.content:
            delta["content"] = choice.content
        if choice.calls and self._prepared.has_functions:  # there is one at most
            delta["function_call"] = _call(choice.calls[0])["function"]
        elif choice.calls:
            delta["tool_calls"] = [_call(call) for call in choice.calls]
        return delta


def _call(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
