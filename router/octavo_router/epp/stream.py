"""One ext_proc stream: the gateway's messages about one request, and the replies.

    request headers ─► request body ─► placed ─► response headers ─► response body ─► over
                  no body: placed at once          how the answer goes settles the lease

Where bodies are sent in full duplex, nothing is answered until the request is placed: then its
headers with their destination, then its body. Where they are buffered, each message gets one
answer, and the destination goes with the body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import (
    EXPLAIN_HEADER,
    REQUEST_ID_HEADER,
    SERVED_BY_HEADER,
)
from octavo_router.epp import messages
from octavo_router.epp.head import DESTINATION, PREFILLER
from octavo_router.epp.hints import NAMESPACE, read_failure, read_served, read_subset
from octavo_router.epp.placed_request import Placed
from octavo_router.epp.refusals import refusal, status_of
from octavo_router.epp.request_reader import no_endpoints
from octavo_router.epp.wire import ProtobufError
from octavo_router.errors import Rejected
from octavo_router.flow.admission import Ticket
from octavo_router.metrics.record import RequestRecord
from octavo_router.proxy.heads import explanation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_router.adapters.fleet import AdapterWait
    from octavo_router.epp.head import PickerHead
    from octavo_router.epp.messages import Pair, PickerMessage
    from octavo_router.epp.picker import Picker
    from octavo_router.epp.request_reader import PlaceableRequest
    from octavo_router.flow.admission import QueuedRequest
    from octavo_router.flow.tenant import Tenant
    from octavo_router.routing.decision import Decision
    from octavo_router.routing.request import RouteRequest

logger = logging.getLogger("octavo.router")

PIECE_BYTES: Final = 62_000  # of a request's body: gateways take 64 KiB at once

_DUPLEX: Final = (messages.FULL_DUPLEX_STREAMED, messages.GRPC)
_WHOLE: Final = (messages.BUFFERED, messages.BUFFERED_PARTIAL)


class _GoneError(Exception):
    """The gateway lost interest: its client went away."""


class PickerStream:
    """Runs one stream. Whatever way it ends, nothing stays reserved."""

    def __init__(
        self,
        picker: Picker,
        read: Callable[[], Awaitable[bytes | None]],  # None: nothing more will come
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._picker = picker
        self._read = read
        self._write = write
        self._reading: asyncio.Task[bytes | None] | None = None  # ahead, while it waits its turn
        self._protocol = messages.BodyProtocol()
        self._head: PickerHead | None = None
        self._tenant: Tenant | None = None
        self._subset: tuple[str, ...] | None = None
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._placed: Placed | None = None
        self._explanation = b""
        self._record = RequestRecord()
        self._is_refused = False
        self._began_at = time.monotonic()

    async def run(self) -> None:
        """Until the gateway is done, or has what its client gets. Raises ProtobufError."""
        try:
            while (data := await self._next()) is not None:
                message = messages.read_message(data)
                if message.is_observation:
                    return  # it does not act on what we say: there is nothing to pick
                try:
                    await self._take(message)
                except Rejected as error:
                    await self._refuse(error)
                    return
                except _GoneError:
                    return
        finally:
            self._close()

    async def _take(self, message: PickerMessage) -> None:
        kind, content = message.kind, message.content
        if kind == messages.RESPONSE_BODY:
            await self._take_response_body(content)
        elif kind == messages.REQUEST_BODY:
            await self._take_body(content)
        elif kind == messages.REQUEST_HEADERS:
            await self._take_headers(message)
        elif kind == messages.RESPONSE_HEADERS:
            await self._take_response_headers(message)
        elif kind == messages.REQUEST_TRAILERS:
            await self._take_trailers()
        elif kind == messages.RESPONSE_TRAILERS:
            self._end_answer()
            await self._write(messages.trailers_answer(kind))

    # -- the request

    async def _take_headers(self, message: PickerMessage) -> None:
        if self._head is not None:
            raise ProtobufError("the stream's request has headers already")
        if message.protocol is not None:
            self._protocol = message.protocol
        pairs, is_end = messages.read_headers(message.content)
        picker, record = self._picker, self._record
        head = self._head = picker.read_head(pairs)
        if not head.request_id:
            head.request_id, head.is_named_here = picker.new_request_id(), True
        record.request_id = head.request_id
        record.method, record.route = head.method, head.route
        record.traceparent = head.traceparent
        self._tenant = picker.gate.authenticate(head.authorization, head.tenant_hint)
        record.tenant = self._tenant.name
        # Who is behind the gateway cannot be seen: this machine's programs have no privilege here.
        head.explain = head.explain and picker.may_explain(head)
        self._subset = read_subset(message.metadata)
        if (head.content_length or 0) > picker.max_body_bytes:
            raise self._too_large()
        mode = self._protocol.request_body
        if is_end:
            await self._place(b"")
            await self._write(self._headers_answer(None))
        elif mode in _WHOLE:
            await self._write(
                messages.headers_answer(
                    messages.REQUEST_HEADERS,
                    remove_headers=[*head.unwanted, DESTINATION.encode()],
                )
            )
        elif mode not in _DUPLEX:
            picker.warn_of_mode(mode)
            head.is_json = False  # its body will not be seen in time
            await self._place(b"")
            await self._write(self._headers_answer(None))

    async def _take_body(self, content: bytes) -> None:
        mode = self._protocol.request_body
        if self._placed is not None:
            # Behind what was placed: a body that was not requested goes on as it is.
            await self._write(
                messages.streamed_answer(messages.REQUEST_BODY, content)
                if mode in _DUPLEX
                else messages.body_answer(messages.REQUEST_BODY)
            )
            return
        body, is_end = messages.read_body(content)
        self._num_bytes += len(body)
        if self._num_bytes > self._picker.max_body_bytes:
            raise self._too_large()
        self._chunks.append(body)
        if mode in _DUPLEX:
            if is_end:
                await self._place_streamed(has_trailers=False)
            return
        if mode == messages.BUFFERED_PARTIAL and not is_end:
            raise self._too_large()  # the gateway has cut it
        placeable = await self._place(b"".join(self._chunks))
        self._chunks.clear()
        await self._write(
            messages.body_answer(
                messages.REQUEST_BODY,
                placeable.body if placeable.is_rewritten else None,
                set_headers=self._request_headers(placeable if placeable.is_rewritten else None),
                metadata=self._destination(),
                clear_route_cache=True,
            )
        )

    async def _take_trailers(self) -> None:
        if self._placed is None:
            if self._protocol.request_body not in _DUPLEX:
                raise Rejected(400, "invalid_json", "The body is empty; send a JSON object.")
            await self._place_streamed(has_trailers=True)
        await self._write(messages.trailers_answer(messages.REQUEST_TRAILERS))

    async def _place_streamed(self, *, has_trailers: bool) -> None:
        placeable = await self._place(b"".join(self._chunks))
        self._chunks.clear()
        await self._write(self._headers_answer(placeable))
        body = placeable.body
        for at in range(0, len(body) or 1, PIECE_BYTES):
            stop = at + PIECE_BYTES
            piece = messages.streamed_piece(
                body[at:stop], is_end=stop >= len(body) and not has_trailers
            )
            await self._write(messages.streamed_answer(messages.REQUEST_BODY, piece))

    async def _place(self, body: bytes) -> PlaceableRequest:
        """Finds an endpoint, after waiting for its turn where that must be. Raises Rejected."""
        picker, record, head = self._picker, self._record, self._head
        if head is None or self._tenant is None:
            raise Rejected(400, "bad_request", "The gateway sent a body without headers.")
        tenant = self._still_allowed(head, self._tenant)
        placeable = picker.asker.ask(head, body, self._subset, tenant.limits)
        request = placeable.request
        request.tenant = tenant.name
        record.model, record.is_known_model = placeable.model, placeable.is_known
        record.pool, record.revision = request.pool, request.revision
        record.is_stream = request.stream
        record.request_bytes = len(body)
        ticket = None
        if placeable.must_queue:
            deadline = self._began_at + picker.config.timeouts.total_s
            entry = picker.gate.admit(request, tenant, num_bytes=len(body), deadline=deadline)
            ticket = entry if isinstance(entry, Ticket) else await self._wait(entry)
        began_at = time.monotonic()
        lease = None
        try:
            await self._adapter_loaded(request)
            self._still_allowed(head, tenant)
            record.revision = request.revision
            watch = picker.watch(head, placeable)
            num_fallbacks = 0 if watch.digest else picker.config.epp.fallbacks
            lease = picker.dispatcher.place(request, num_fallbacks=num_fallbacks)
        finally:
            if lease is None and ticket is not None:
                ticket.release()
        if lease is None:
            raise no_endpoints("No engine is ready to serve this model.")
        record.pick_s = time.monotonic() - began_at
        record.queue_s = began_at - self._began_at if ticket is not None and ticket.cost else 0.0
        record.attempts = 1
        record.policy = lease.decision.policy
        record.predicted_tokens = lease.decision.matched_tokens
        record.endpoint = lease.endpoint.spec.address.authority
        record.endpoint_id = lease.endpoint.id
        prompt = picker.place_prompt(head, placeable, lease, self._subset)
        self._placed = Placed(
            picker.dispatcher, lease, ticket, record, self._began_at, watch, prompt
        )
        if head.explain:
            line = explanation(lease.decision)
            self._explanation = line.partition(b": ")[2].rstrip(b"\r\n")
        return placeable

    def _still_allowed(self, head: PickerHead, tenant: Tenant) -> Tenant:
        """Whose key it is now: it may have been revoked since the headers came, while the body
        arrived or the request waited. Raises Rejected."""
        if not tenant.is_revoked:
            return tenant
        return self._picker.gate.authenticate(head.authorization, head.tenant_hint)

    async def _adapter_loaded(self, request: RouteRequest) -> None:
        """Waits until an engine has its adapter, where this router does the loading. Raises
        Rejected."""
        adapters = self._picker.adapters
        if adapters is None or not request.adapter:
            return
        adapters.note(request)
        while adapters.needed(request):
            settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def done(error: Rejected | None, settled: asyncio.Future[None] = settled) -> None:
                if settled.done():  # its gateway has left, and it is cancelled in a moment
                    return
                if error is None:
                    settled.set_result(None)
                else:
                    settled.set_exception(error)

            wait: AdapterWait | None = None
            try:
                wait = adapters.wait(request, done)
                async with asyncio.timeout(self._picker.config.timeouts.total_s):
                    await settled
            except TimeoutError:
                raise Rejected(
                    504, "deadline_exceeded", "The request exceeded its deadline."
                ) from None
            except Rejected as error:
                if not adapters.move(request, error):  # another revision may have it
                    raise
            finally:
                if wait is not None:
                    wait.cancel()

    async def _wait(self, entry: QueuedRequest) -> Ticket:
        """For its turn, or for the gateway's losing interest, whichever comes first."""
        try:
            if self._protocol.request_body not in _DUPLEX:
                # Where each message has a deadline, this one needs more than the usual.
                flow = self._picker.config.flow
                seconds = max(flow.queue_timeout_s, flow.hold_timeout_s) + 1.0
                await self._write(messages.more_time(seconds))
            while not entry.future.done():
                if self._reading is not None and self._reading.done():
                    if self._reading.result() is None:
                        raise _GoneError
                    await asyncio.wait((entry.future,))
                    break
                if self._reading is None:
                    self._reading = asyncio.ensure_future(self._read())
                await asyncio.wait(
                    (entry.future, self._reading), return_when=asyncio.FIRST_COMPLETED
                )
        except BaseException:
            entry.cancel()
            raise
        return await entry

    # -- what the gateway learns of the destination

    @property
    def _decision(self) -> Decision:
        placed = self._placed
        assert placed is not None
        assert placed.lease is not None
        return placed.lease.decision

    def _destination(self) -> dict[str, dict[str, str]]:
        decision = self._decision
        endpoints = (decision.endpoint, *decision.fallbacks)
        value = ",".join(endpoint.spec.address.authority for endpoint in endpoints)
        return {NAMESPACE: {DESTINATION: value}}

    def _request_headers(self, placeable: PlaceableRequest | None) -> list[Pair]:
        value = self._destination()[NAMESPACE][DESTINATION]
        pairs: list[Pair] = [(DESTINATION.encode(), value.encode())]
        if prompt_at := self._decision.prompt_at:
            pairs.append((PREFILLER, prompt_at.encode()))
        if self._head is not None and self._head.is_named_here:
            pairs.append((REQUEST_ID_HEADER.encode(), self._head.request_id.encode()))
        if placeable is not None:
            # Envoy sends what it streams without a length; other gateways keep this one.
            pairs.append((b"content-length", b"%d" % len(placeable.body)))
        return pairs

    def _headers_answer(self, placeable: PlaceableRequest | None) -> bytes:
        head = self._head
        assert head is not None
        wanted = self._request_headers(placeable)
        written = {name for name, _ in wanted}  # over whatever is there
        return messages.headers_answer(
            messages.REQUEST_HEADERS,
            set_headers=wanted,
            remove_headers=[name for name in head.unwanted if name not in written],
            metadata=self._destination(),
            clear_route_cache=True,
        )

    # -- the answer

    async def _take_response_headers(self, message: PickerMessage) -> None:
        pairs, is_end = messages.read_headers(message.content)
        placed, mode = self._placed, self._protocol.response_body
        set_headers: list[Pair] = []
        override = None
        if placed is not None:
            placed.served_by(read_served(message.metadata, pairs))
            status = _status(pairs)
            wants_body = self._picker.config.epp.response_bodies and status < 400
            if mode not in (messages.NONE, *_DUPLEX) and not wants_body:
                override = messages.NONE
            sees_body = not is_end and mode != messages.NONE and override is None
            failure = read_failure(message.attributes)
            placed.begin_answer(status, failure, sees_body=sees_body)
            set_headers.append((SERVED_BY_HEADER.encode(), self._record.endpoint.encode()))
            if self._explanation:
                set_headers.append((EXPLAIN_HEADER.encode(), self._explanation))
        if is_end:
            self._end_answer()
        await self._write(
            messages.headers_answer(
                messages.RESPONSE_HEADERS, set_headers=set_headers, response_body_mode=override
            )
        )

    async def _take_response_body(self, content: bytes) -> None:
        """Hot path: once per piece of an answer."""
        placed = self._placed
        if placed is not None:
            body, is_end = messages.read_body(content)
            placed.piece(body)
            if is_end:
                placed.end(is_whole=True)
        if self._protocol.response_body in _DUPLEX:
            await self._write(messages.streamed_answer(messages.RESPONSE_BODY, content))
        else:
            await self._write(_PASS_ON)

    def _end_answer(self) -> None:
        if self._placed is not None:
            self._placed.end(is_whole=True)

    # -- its end

    async def _refuse(self, error: Rejected) -> None:
        record = self._record
        self._is_refused = True
        record.status, record.code, record.outcome = status_of(error), error.code, "refused"
        path = self._head.path if self._head is not None else error.path
        await self._write(refusal(error, path, record.request_id))

    def _close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        record = self._record
        if self._placed is not None:
            self._placed.end(is_whole=False)
            if self._placed.was_quarantined and self._placed.lease is not None:
                request, watch = self._placed.lease.request, self._placed.watch
                path = self._head.path if self._head is not None else ""
                self._picker.note_quarantine(request, path, watch.digest)
        elif not record.outcome:
            record.outcome = "client_gone"
        if self._head is not None or self._is_refused:
            record.duration_s = record.duration_s or time.monotonic() - self._began_at
            self._picker.report(record)

    async def _next(self) -> bytes | None:
        reading, self._reading = self._reading, None
        return await (reading if reading is not None else self._read())

    def _too_large(self) -> Rejected:
        limit = self._picker.max_body_bytes
        return Rejected(413, "body_too_large", f"The body must not be larger than {limit} bytes.")


_PASS_ON: Final = messages.body_answer(messages.RESPONSE_BODY)


def _status(pairs: list[Pair]) -> int:
    for name, value in pairs:
        if name == b":status" and value.isdigit():
            return int(value)
    return 0
