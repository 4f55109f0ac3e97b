"""POST /v1/responses: an answer streamed, whole, or made in the background."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import aclosing
from string import hexdigits
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.errors import InvalidRequest, RequestError
from octavo_engine.protocol.endpoints import PLACE_DIGITS, PLACE_HEADER
from octavo_engine.server.generation.structured import note_validity
from octavo_engine.server.http.errors import HttpError, internal_error, not_supported
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.chat.counting import count_prompt
from octavo_engine.server.openai.chat.prepare import prepare_chat
from octavo_engine.server.openai.chat.session import ChatSession
from octavo_engine.server.openai.responses import shapes
from octavo_engine.server.openai.responses.answer import ResponseBuilder, frame
from octavo_engine.server.openai.responses.bodies import InputTokensRequest, ResponsesRequest
from octavo_engine.server.openai.responses.items import answer_of, listed, new_id
from octavo_engine.server.openai.responses.log import EventLog
from octavo_engine.server.openai.responses.request import read_turn
from octavo_engine.server.openai.responses.store import StoredTurn
from octavo_engine.server.openai.responses.truncation import fitted
from octavo_engine.server.routers.item_events import ItemEvents
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.openai.chat.prepare import PreparedChat
    from octavo_engine.server.openai.chat.session import ChatDelta
    from octavo_engine.server.openai.responses.request import ResponseTurn
    from octavo_engine.server.openai.responses.shapes import Event

logger = logging.getLogger("octavo.server")

# Fields that every tool of a response has, whether the request had them or not.
_TOOL = {"type": "function", "description": None, "parameters": None, "strict": None}
STORE_OFF = "this server keeps no responses (--no-response-store)"


async def create_response(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(ResponsesRequest)
    _check_store(request, service)
    owner = owner_of(exchange, service.guard)
    turn = read_turn(request, _before(service, request.previous_response_id, owner))
    try:
        if request.truncation == "auto":
            await fitted(service, turn, request.max_output_tokens)
        prepared = await prepare_chat(exchange, service, turn.chat, prefix="resp", kind="responses")
        work = _Work(service, exchange, request, turn, prepared, owner)
        if request.background:
            await work.in_background(exchange, streams=bool(request.stream))
            return
        async with exchange.while_present():
            await (work.streamed(exchange) if request.stream else work.whole(exchange))
    except RequestError as error:
        turn.rename(error)
        raise


def _check_store(request: ResponsesRequest, service: Service) -> None:
    is_on = service.settings.response_store
    if not is_on and request.previous_response_id is not None:
        raise not_supported("previous_response_id", f"{STORE_OFF}; send the whole conversation")
    if not request.background:
        return
    if not is_on:
        raise not_supported("background", STORE_OFF)
    if request.store is False:
        raise InvalidRequest("background needs store: it is fetched later", param="background")


def _before(service: Service, id_: str | None, owner: bytes) -> tuple[Any, ...]:
    if id_ is None:
        return ()
    stored = service.responses.get(id_, owner)
    if stored is None:
        raise HttpError(
            400,
            f"Previous response with id '{id_[:128]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if stored.response.status not in ("completed", "incomplete"):
        raise InvalidRequest(
            f"previous_response_id: that response is {stored.response.status}; only a response "
            "with an answer can be continued",
            param="previous_response_id",
        )
    return tuple(stored.messages)


async def count_input_tokens(exchange: Exchange, service: Service) -> None:
    """Of the prompt that the same fields would make for /v1/responses."""
    given = await exchange.json(InputTokensRequest)
    fields = {name: getattr(given, name) for name in InputTokensRequest.__struct_fields__}
    request = ResponsesRequest(**fields | {"input": given.input if given.input is not None else ""})
    _check_store(request, service)
    before = _before(service, request.previous_response_id, owner_of(exchange, service.guard))
    turn = read_turn(request, before)
    try:
        service.model.check_name(request.model)
        check_task("generate", service.engine.info)
        count = await count_prompt(exchange, service, turn.chat)
    except RequestError as error:
        turn.rename(error)
        raise
    answer = shapes.InputTokens(object="response.input_tokens", input_tokens=count)
    await exchange.reply(msgspec.json.encode(answer))


class _Work:
    """One response from its request to its end."""

    def __init__(
        self, service: Service, exchange: Exchange, request: ResponsesRequest, turn: ResponseTurn,
        prepared: PreparedChat, owner: bytes,
    ) -> None:  # fmt: skip
        self._service = service
        self._turn = turn
        # A resumed stream goes on as the response that it began as.
        id_ = prepared.id if exchange.resume is not None else new_id("resp", place_of(exchange))
        self._prepared = prepared = dataclasses.replace(prepared, id=id_)
        self._session = ChatSession(service, prepared)
        keeps = service.settings.response_store and request.store is not False
        self._answer = ResponseBuilder(_response(request, prepared, keeps=keeps))
        # What the request has as raw JSON: its items are listed as they were sent.
        items = listed(exchange.fields["input"]) if keeps else []
        self._stored = StoredTurn(self._answer.response, owner, items, turn.said)

    async def whole(self, exchange: Exchange) -> None:
        self._answer.begin()
        await self._run_through()
        response, prepared = self._answer.response, self._prepared
        texts = [
            part.text
            for item in response.output
            if isinstance(item, shapes.OutputMessage)
            for part in item.content
        ]
        await note_validity(exchange, prepared.request, prepared.reading.grammar, texts)
        await exchange.reply(msgspec.json.encode(response))

    async def streamed(self, exchange: Exchange) -> None:
        exchange.last_words = self._last_words
        answer, events = self._answer, ItemEvents(exchange, self._prepared, self._session.usage)

        async def put(delta: ChatDelta) -> None:
            if not exchange.started:
                # Written at once: the response is still empty.
                events.add([frame(event) for event in answer.begin()])
                await exchange.open_stream()
            for choice in delta.replayed:
                events.add(map(frame, answer.read(choice)))
            for choice in delta.choices:
                events.add(map(frame, answer.read(choice)), choice.token_ids)
            if delta.finished:
                events.add(map(frame, answer.end(self._session.usage)))
                self._keep()
                await exchange.close(events.take(frame(answer.last())))
            elif frames := events.take():
                await exchange.write(frames)

        await self._session.run(OutputSink(put), stream=True)

    async def in_background(self, exchange: Exchange, *, streams: bool) -> None:
        """The answer is that it is queued, or its events as they come."""
        response = self._answer.response
        response.status = "queued"
        if not self._service.responses.put(self._stored):
            raise InvalidRequest(
                "input is larger than all stored responses may be "
                "(--max-stored-response-bytes); send it without background",
                param="input",
            )
        payload = msgspec.json.encode(response)
        if streams:
            self._stored.log = EventLog()
        self._service.admission.enter()  # a server that drains waits for it
        self._stored.task = asyncio.create_task(self._alone(), name=f"octavo-{response.id}")
        self._stored.task.add_done_callback(lambda _: self._service.admission.leave())
        if self._stored.log is None:
            await exchange.reply(payload)
            return
        async with exchange.while_present():  # a client that leaves may come back: it goes on
            await read_log(exchange, self._stored.log, 0)

    async def _alone(self) -> None:
        """Nobody listens: how it ends is in the response."""
        response = self._answer.response
        try:
            self._log(self._answer.begin())
            await self._run_through()
            self._log([self._answer.last()])
        except asyncio.CancelledError:
            response.status, response.output = "cancelled", []
            self._log([self._answer.last()])
            self._keep()
        except RequestError as error:
            self._turn.rename(error)
            self._fail(error)
        except Exception:
            logger.exception("Unhandled error in request", extra={"response_id": response.id})
            self._fail(internal_error())
        finally:
            if self._stored.log is not None:
                self._stored.log.close()

    async def _run_through(self) -> None:
        """Its events are logged where they can be read later."""

        async def put(delta: ChatDelta) -> None:
            for choice in delta.choices:
                self._log(self._answer.read(choice))

        await self._session.run(OutputSink(put), stream=self._stored.log is not None)
        self._log(self._answer.end(self._session.usage))
        self._keep()

    def _log(self, events: list[Event]) -> None:
        if self._stored.log is not None:
            self._stored.log.add(list(map(frame, events)))

    def _fail(self, error: RequestError) -> None:
        self._log(self._answer.fail(error))
        self._keep()

    def _keep(self) -> None:
        """As it is now, unless it is too large: then `store` says that it was not kept."""
        response, responses = self._answer.response, self._service.responses
        if not response.store:
            return
        self._stored.messages = [*self._turn.said, answer_of(response.output)]
        response.store = responses.put(self._stored)

    def _last_words(self, error: RequestError) -> bytes:
        """Of a stream that fails."""
        events = self._answer.fail(error)
        self._keep()
        return _frames(events)


async def read_log(exchange: Exchange, log: EventLog, start: int) -> None:
    """The events from one on, as the answer to a request."""
    async with aclosing(log.follow(start)) as pieces:
        async for frames in pieces:
            if not exchange.started:
                await exchange.open_stream()
            await exchange.write(frames)
    if not exchange.started:
        await exchange.open_stream()
    await exchange.close()


def _frames(events: list[Event]) -> bytes:
    return b"".join(map(frame, events))


def place_of(exchange: Exchange) -> str:
    """What a router wants ids to begin with, so that it finds this engine by them again."""
    place = exchange.header(PLACE_HEADER.encode())
    is_one = len(place) == PLACE_DIGITS and not set(place) - set(hexdigits.lower())
    return place if is_one else ""


def _format(given: dict[str, Any] | None) -> dict[str, Any]:
    if not given:
        return {"type": "text"}
    if given.get("type") == "json_schema":
        return {"description": None, **given, "strict": given.get("strict") is True}
    return given


def _response(
    request: ResponsesRequest, prepared: PreparedChat, *, keeps: bool
) -> shapes.ResponseObject:
    """Before anything was said."""
    text, reasoning, params = request.text, request.reasoning, prepared.job.params
    return shapes.ResponseObject(
        id=prepared.id,
        object="response",
        created_at=prepared.created,
        completed_at=None,
        status="in_progress",
        background=bool(request.background),
        error=None,
        incomplete_details=None,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=prepared.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=shapes.ReasoningSettings(
            effort=None if reasoning is None else reasoning.effort, summary=None
        ),
        safety_identifier=request.safety_identifier,
        service_tier="default",
        store=keeps,
        temperature=params.temperature,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        text=shapes.TextSettings(
            format=_format(None if text is None else text.format),
            verbosity=(text and text.verbosity) or "medium",
        ),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[{**_TOOL, **tool} for tool in request.tools or []],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        usage=None,
        user=request.user,
    )
