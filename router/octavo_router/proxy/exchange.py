"""One proxied request: admitted, placed, sent, answered; and what happens when any of it fails.

    start ──► wait for room ──► place ──► connect ──► send ──► relay ──► over
                                  ▲                              │
                                  └──── retry, or resume ◄───────┘

An exchange is the owner of its client's connection and the user of its engine's. It lives in
callbacks: no task, no timer, no closure for a request that nothing happens to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from octavo_common import failpoints
from octavo_router.errors import Rejected
from octavo_router.flow.admission import Ticket
from octavo_router.flow.quarantine import DeathWatch, digest_of, key_of
from octavo_router.flow.retry import Failure
from octavo_router.http.deadlines import NEVER
from octavo_router.proxy import failures, heads, streams
from octavo_router.proxy.client_response import ClientResponse
from octavo_router.proxy.events import error_events_of
from octavo_router.proxy.exchange_state import ExchangeState
from octavo_router.proxy.prefill_decode.handover import PromptHandover
from octavo_router.proxy.prefill_decode.kv_transfer import Opening
from octavo_router.proxy.resume import ENGINE_DEAD
from octavo_router.proxy.retry_state import NextAttempt, RetryState
from octavo_router.proxy.stream_form import DONE
from octavo_router.proxy.token_stream import MalformedStream
from octavo_router.residency.usage import NO_USAGE
from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Collection

    from octavo_router.adapters.fleet import AdapterWait
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.flow.admission import QueuedRequest
    from octavo_router.http.client_connection import ClientConnection
    from octavo_router.http.request_head import RequestHead
    from octavo_router.http.response_head import ResponseHead
    from octavo_router.http.upstream_connection import Loss, UpstreamConnection
    from octavo_router.http.upstream_pool import OnItsWay
    from octavo_router.proxy.account import RequestAccount
    from octavo_router.proxy.events import EventRelay
    from octavo_router.proxy.interfaces import ExchangeHost
    from octavo_router.proxy.paths import ProxiedPath
    from octavo_router.proxy.resume import StreamMemory
    from octavo_router.proxy.upstreams import Upstream
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.request import RouteRequest

logger = logging.getLogger("octavo.router")

_HELD_S: Final = 0.1  # between two looks whether a suspect request may go on
# Before a request goes on from an engine that died. Others may be dying of the same, and what was
# answered shows first, on the next engine, that it was not that.
_GONE_ON_S: Final = 0.1
_SUSPECT_S: Final = 0.25  # where nothing was answered
_ANSWERS: Final = (
    AttemptResult.OK,
    AttemptResult.REJECTED,
    AttemptResult.ERROR_5XX,
)  # the engine outlived it
_MAX_WHOLE_BYTES: Final = 2**20  # an answer that is no stream is kept until it is whole, up to this
# States of a stream whose engine may still be fetching the prompt's cache.
_BEFORE_FIRST_EVENT: Final = (ExchangeState.AWAITING_HEAD, ExchangeState.RELAYING_EVENTS)
_PROGRESS_S: Final = 10.0  # between signs of life to a client whose stream has to wait


class ProxyExchange:
    """See the module. Hot: one for each request."""

    __slots__ = (
        "_account", "_answer", "_body", "_connecting", "_connection", "_handover", "_head", "_key",
        "_loading", "_memory", "_num_relayed_before", "_path", "_pieces", "_proxy", "_relay",
        "_request", "_size", "_state", "_total_at", "_tries", "_turn", "_unproven_at", "_upstream",
        "_upstream_head", "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        proxy: ExchangeHost,
        connection: ClientConnection,
        head: RequestHead,
        body: bytes,
        path: ProxiedPath,
        request: RouteRequest,
        account: RequestAccount,
        *,
        hands_over: bool = False,
        memory: StreamMemory | None = None,
    ) -> None:
        """`hands_over`: another engine may compute the prompt. `memory`: of a stream that the
        client continues."""
        self._proxy = proxy
        self._connection = connection
        self._head = head
        self._body = body
        self._path = path
        self._request = request
        self._account = account
        self._answer = ClientResponse(connection, request.request_id.encode())
        self._total_at = account.total_at
        self._key = key_of(request.pool, path.path, body)  # for the quarantine
        self._unproven_at = ""  # the endpoint where an attempt has come to nothing yet
        self._num_relayed_before = 0  # tokens of the answer when it went there
        self._state = ExchangeState.WAITING
        self._waiting: QueuedRequest | None = None
        self._turn: asyncio.Task[None] | None = None
        # of the attempt; memory and tries: over all of them
        self._loading: AdapterWait | None = None
        self._connecting: OnItsWay | None = None
        self._upstream: UpstreamConnection | None = None
        self._upstream_head: ResponseHead  # once it is there
        self._pieces: list[bytes] = []
        self._size = 0
        self._relay: EventRelay | None = None
        self._memory = memory
        self._tries: RetryState | None = None
        self._handover = (
            PromptHandover(self, proxy, head, body, request, account) if hands_over else None
        )

    # -- arriving

    def start(self, entry: Ticket | QueuedRequest) -> None:
        """`entry` is what the gate gave."""
        self._connection.owner = self
        if isinstance(entry, Ticket):
            self._account.ticket = entry
            try:
                self._place(self._passed_over if self._memory is not None else ())
            except Exception:
                self.broke()
            return
        self._wait_for(entry)

    def _wait_for(self, entry: QueuedRequest) -> None:
        self._state = ExchangeState.WAITING
        self._waiting = entry
        self._expect_a_turn()
        self._turn = self._proxy.loop.create_task(self._wait(entry))

    def _expect_a_turn(self) -> None:
        """Until then a client that wants a stream gets signs of life."""
        gives_signs = self._state is ExchangeState.WAITING and self._request.stream
        sign_at = time.monotonic() + _PROGRESS_S if gives_signs else NEVER
        self._connection.deadline = min(sign_at, self._total_at)

    async def _wait(self, waiting: QueuedRequest) -> None:
        try:
            try:
                self._account.ticket = await waiting
            finally:
                self._waiting = self._turn = None
            self._account.record.queue_s += self._account.ticket.waited_s
            self._place(self._passed_over)
        except Rejected as error:
            self._give_up(error, "refused")
        except Exception:
            self.broke()

    # -- placing and sending

    def _place(self, exclude: Collection[Endpoint] = ()) -> None:
        """Chooses an endpoint and sends the request there, or gives up."""
        proxy, request = self._proxy, self._request
        now = request.placed_at = time.monotonic()
        others: list[Endpoint] = []
        if type(proxy.quarantine.watched.get(self._key)) is DeathWatch:
            if (error := proxy.quarantine.refusal(self._key)) is not None:
                self._give_up(error, "refused")
                return
            if (ids := proxy.quarantine.engines(self._key)) is not None:
                others = proxy.others(request, ids)
        passed_over = [*exclude, *others] if others else exclude
        if request.adapter and self._waits_for_adapter(passed_over):
            return
        lease = proxy.dispatcher.place(request, exclude=passed_over)
        if lease is None and others:
            lease = proxy.dispatcher.place(request, exclude=others)  # where it failed, if need be
        if lease is None and others:  # until those that have it have answered, or died
            self._place_later(NextAttempt(exclude, _HELD_S))
            return
        if lease is None:
            entry = proxy.hold(request, self._account, num_bytes=len(self._body))
            if entry is None:
                self._give_up(failures.no_endpoint(request.pool), "refused")
            else:
                self._wait_for(entry)
            return
        self._account.lease = lease  # whatever comes now, it is given back
        self._unproven_at = lease.endpoint.spec.id
        self._num_relayed_before = self._memory.num_tokens if self._memory is not None else 0
        proxy.quarantine.begin(self._key, self._unproven_at)
        upstream = proxy.upstreams.of(lease.endpoint)
        self._account.begin_attempt(lease, upstream.lines, now)
        self._reach(upstream, now)

    @property
    def _passed_over(self) -> Collection[Endpoint]:
        """Where it is not sent next."""
        if self._tries is not None:
            return self._tries.exclude(was_answered=self._was_answered)
        if self._memory is None or self._memory.is_untouched:
            return ()
        return self._proxy.passed_over(self._request, [], was_answered=True)[0]

    def _waits_for_adapter(self, exclude: Collection[Endpoint]) -> bool:
        """Whether no engine has its adapter: the request is placed once one does, or is refused."""
        adapters = self._proxy.adapters
        if adapters is None or not adapters.needed(self._request, exclude):
            return False
        self._state = ExchangeState.WAITING
        try:
            self._loading = adapters.wait(self._request, self._adapter_settled, exclude)
        except Rejected as error:
            if self._moves(error):
                return self._waits_for_adapter(exclude)
            self._give_up(error, "refused")
            return True
        self._expect_a_turn()
        return True

    def _adapter_settled(self, error: Rejected | None) -> None:
        self._loading = None
        try:
            if error is not None and not self._moves(error):
                self._give_up(error, "refused")
                return
            self._place(self._passed_over)
        except Exception:
            self.broke()

    def _moves(self, error: Rejected) -> bool:
        """Whether another revision may have the adapter that this one could not load."""
        adapters = self._proxy.adapters
        if adapters is None or not adapters.move(self._request, error):
            return False
        self._account.record.revision = self._request.revision
        return True

    def _reach(self, upstream: Upstream, now: float) -> None:
        handover = self._handover
        if handover is not None:
            is_elsewhere = handover.place(now)
            self._body = handover.body
            if is_elsewhere:
                self._state = ExchangeState.CONNECTING
                deadline = now + self._proxy.first_token_s(self._request)
                self._connection.deadline = min(deadline, self._total_at)
                handover.send()
                return
        self._connect(upstream, now)

    def send_after_prompt(self) -> None:
        """See HandoverUser."""
        lease = self._account.lease
        assert lease is not None and self._handover is not None
        upstream = self._proxy.upstreams.known(lease.endpoint)
        if upstream is None:  # it went meanwhile, and was sent nothing
            self._fail(Failure.CONNECT)
            return
        self._body = self._handover.body
        now = self._account.attempt_at = time.monotonic()
        self._connect(upstream, now)

    def _connect(self, upstream: Upstream, now: float) -> None:
        connection = upstream.pool.take(now)
        if connection is not None:
            self._send(connection)
            return
        self._state = ExchangeState.CONNECTING
        self._connection.deadline = self._total_at  # the pool has one of its own
        self._connecting = upstream.pool.connect(self)

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        try:
            self._send(connection)
        except Exception:
            self.broke()

    def _send(self, connection: UpstreamConnection) -> None:
        request, account = self._request, self._account
        lease, lines = account.lease, account.lines
        assert lease is not None
        self._upstream = connection
        self._state = ExchangeState.AWAITING_HEAD
        head, body, internal, is_resume = self._head, self._body, b"", False
        form = self._path.resumes
        if lease.endpoint.kind == "octavo" and request.stream and form is not None:
            memory = self._memory = self._memory or self._proxy.new_memory(
                form, wants_usage=account.wants_usage
            )
            internal = heads.STREAM_TOKENS
            is_resume = memory.can_resume
            if is_resume:
                internal += heads.RESUMED
                body = memory.resume_body(body)
        forward = head.forward
        if self._path.keeps:
            internal += lines.place
        if account.is_client_timed:
            internal += heads.time_left(self._total_at - time.monotonic())
        if account.trace is not None:
            parent = account.trace.attempt(lines.authority, is_resume=is_resume)
            forward = heads.with_traceparent(forward, parent)
        if request.explain:
            self._answer.explanation = heads.explanation(lease.decision)
        data = heads.request_bytes(
            head, lines, self._answer.request_id, body, forward=forward, internal=internal
        )
        if failpoints.IS_ON:
            failpoints.hit("router.connected")
        connection.send(self, data)
        if failpoints.IS_ON:
            failpoints.hit("router.sent")
        deadline = self._total_at
        if request.stream:  # a whole answer begins when it has ended: only the total bounds it
            deadline = min(deadline, account.attempt_at + self._proxy.first_token_s(request))
        self._connection.deadline = deadline
        if self._connection.is_paused:  # it has not taken what came before
            connection.pause()

    # -- the answer, from the engine

    def on_whole(self, head: ResponseHead, body: bytes) -> None:
        """Hot path: what nearly every answer that is no stream comes to."""
        self._upstream = None
        try:
            if (
                head.status == 200
                and (not self._path.generates or (head.is_json and body))
                and not self._answer.has_begun
            ):
                answer, account, connection = self._answer, self._account, self._connection
                answer.send_whole(head, account.lines, body)
                now = time.monotonic()
                self._state = ExchangeState.CLOSED
                record = account.record
                record.status, record.response_bytes = 200, len(body)
                usage = self._proxy.find_usage(body) if self._path.is_json else NO_USAGE
                account.close_whole(now, usage, guess=self._request.prompt_tokens)
                self._proxy.quarantine.answered(self._key)
                self._proxy.over(self, account)
                if self._handover is not None:
                    self._handover.answered()
                connection.finish(keep_alive=answer.keeps_alive)
                return
            self.on_head(head)
            if body and self._state.is_receiving:  # else it was no answer
                self.on_body(body)
        except Exception:  # the engine's connection has gone back: nothing else would notice
            self.broke()
            return
        if self._upstream_head is head and self._state.is_receiving:
            self.on_end()

    def on_head(self, head: ResponseHead) -> None:
        if failpoints.IS_ON:
            failpoints.hit("router.head")
        self._upstream_head = head
        self._pieces, self._size = [], 0
        self._state = ExchangeState.COLLECTING
        if head.status != 200:
            return
        if head.is_event_stream:
            self._state = ExchangeState.RELAYING_EVENTS
            self._account.itl = self._proxy.inter_token_latency(self._request.pool)
            if self._memory is None:
                self._relay = self._proxy.new_relay()
        elif self._path.generates and not head.is_json:
            self._fail(Failure.BAD_ANSWER)

    def on_body(self, data: bytes) -> None:
        if failpoints.IS_ON:
            failpoints.hit("router.body")
        now = time.monotonic()
        self._account.see_bytes(now)
        state = self._state
        if state is ExchangeState.RELAYING_EVENTS:
            self._relay_events(data)
            if self._unproven_at:
                self._look_for_tokens()
        elif state is ExchangeState.COLLECTING:
            self._pieces.append(data)
            self._size += len(data)
            if self._size > _MAX_WHOLE_BYTES:
                self._pass_on()
        else:
            self._answer.write(data)
        if self._state.is_receiving and not self._connection.is_paused:
            deadline = now + self._proxy.timeouts.progress_s
            self._connection.deadline = deadline if deadline < self._total_at else self._total_at

    def on_end(self) -> None:
        if failpoints.IS_ON:
            failpoints.hit("router.end")
        self._upstream = None
        try:
            if self._state is ExchangeState.RELAYING_EVENTS:
                self._end_events()
            elif self._state is ExchangeState.COLLECTING:
                self._end_whole()
            else:
                self._answer.end()
                self._finish(AttemptResult.OK, "ok")
        except Exception:
            self.broke()

    def on_lost(self, loss: Loss, problem: str) -> None:
        self._upstream = self._connecting = None
        try:
            self._proxy.note_loss(self._account.lease, problem)
            self._fail(failures.FAILURE_OF[loss])
        except Exception:
            self.broke()

    def _relay_events(self, data: bytes) -> None:
        handover = self._handover
        if handover is not None and handover.fetches:
            opening = handover.hold(data)
            if opening is Opening.FAILED:
                self._compute_locally("an error instead of fetching a prompt's cache")
                return
            if opening is not Opening.ANSWERS:
                return
            data = handover.release()
        self._relay_answer(data)

    def _relay_answer(self, data: bytes) -> None:
        memory, answer = self._memory, self._answer
        source = memory or self._relay
        assert source is not None
        try:
            clean = source.feed(data)
        except MalformedStream as error:
            self._proxy.note_loss(self._account.lease, str(error))
            self._fail(Failure.BAD_ANSWER)
            return
        if clean:
            answer.begin(self._upstream_head, self._account.lines)
            answer.write(clean)
        if memory is not None and memory.lost_with:
            if memory.problem:
                self._proxy.note_loss(self._account.lease, memory.problem)
            self._fail(streams.loss_of(memory))

    def _look_for_tokens(self) -> None:
        """The first ones of an attempt: its request has not killed the engine by beginning."""
        memory = self._memory
        if not streams.was_seen(memory, self._relay):
            return
        if memory is not None and memory.num_tokens <= self._num_relayed_before:
            return
        self._unproven_at = ""
        self._proxy.quarantine.answered(
            self._key, is_further=memory is not None and self._tries is not None
        )

    def _end_events(self) -> None:
        if self._handover is not None and self._handover.fetches:
            self._relay_answer(self._handover.release())
            if self._state is not ExchangeState.RELAYING_EVENTS:
                return
        if isinstance(end := streams.end_of(self._memory, self._relay), Failure):
            self._fail(end)
            return
        if end.rest:
            self._answer.write(end.rest)
        self._answer.end()
        self._finish(end.result, end.outcome)

    def _end_whole(self) -> None:
        head, answer = self._upstream_head, self._answer
        if self._handover is not None and self._handover.is_unfetched(head.status):
            self._compute_locally(f"status {head.status} instead of fetching a prompt's cache")
            return
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        code = failures.code_of(body) if head.status in (503, 504) else ""
        failure = failures.failure_on(head.status, code)
        retry_after = head.retry_after
        if head.status == failures.WRONG_POD:
            self._proxy.note_stranger(self._account.lease)
        if head.status == 404 and self._is_adapter_missing():
            failure, retry_after = Failure.NOT_ACCEPTED, b"0"  # once it is loaded there again
        is_dead = code == ENGINE_DEAD
        if failure is not None and self._repeat(failure, retry_after=retry_after, is_dead=is_dead):
            return
        if not body and head.status == 200 and self._path.generates:
            self._fail(Failure.BAD_ANSWER)
            return
        if answer.has_begun:  # the client was given a stream while it waited
            error = failures.refused_for(Failure.BAD_ANSWER)
            answer.write(error_events_of(body, error, self._path.path, answer.request_id.decode()))
            answer.end()
        else:
            answer.send_whole(head, self._account.lines, body)
        self._pieces = [body]
        self._finish(*failures.verdict_on(head.status, body))

    def _is_adapter_missing(self) -> bool:
        adapters, lease = self._proxy.adapters, self._account.lease
        return (
            adapters is not None
            and lease is not None
            and adapters.missing(lease.endpoint, self._request)
        )

    def _pass_on(self) -> None:
        """Too large to be kept: from here on it passes through as it comes."""
        self._answer.begin(self._upstream_head, self._account.lines)
        self._state = ExchangeState.PASSING_THROUGH
        self._answer.write(b"".join(self._pieces))
        self._pieces = []

    # -- failing

    def _compute_locally(self, problem: str) -> None:
        """Sends the answering engine the request again, as the client wrote it.

        What it had begun with is cancelled, or has failed, without a token; so nothing runs twice,
        and the retry budget is not charged.
        """
        lease = self._account.lease
        assert lease is not None and self._handover is not None
        self._abort_upstream()
        self._handover.forgo(problem)
        self._relay = None
        now = time.monotonic()
        self._account.ask_again(now)
        self._reach(self._proxy.upstreams.of(lease.endpoint), now)

    def prompt_has_killed(self, lease: Lease, sent_at: float) -> bool:
        """See HandoverUser."""
        return self._note_death(lease, sent_at)

    def refuse_quarantined(self) -> None:
        """See HandoverUser."""
        error = self._proxy.quarantine.refusal(self._key)
        self._give_up(error or failures.refused_for(Failure.LOST), "quarantined")

    def _fail(self, failure: Failure) -> None:
        """The attempt is lost: repeat, resume or report it to the client."""
        if self._repeat(failure):
            return
        memory = self._memory
        if memory is not None and memory.missing and not memory.is_untouched:
            self._answer.write(DONE)  # only the end was lost
            self._answer.end()
            self._finish(failures.RESULT_OF[failure], "ok")
            return
        self._give_up(failures.refused_for(failure), failure.value, failures.RESULT_OF[failure])

    def _repeat(self, failure: Failure, *, retry_after: bytes = b"", is_dead: bool = False) -> bool:
        """Tries again where that is safe and affordable. The old attempt is cancelled first.

        `is_dead`: the engine says that it has died. False: the client gets an error.
        """
        self._abort_upstream()
        if self._tries is None:
            self._tries = RetryState(self._proxy, self._path, self._request, self._account)
        is_death = failure is Failure.LOST or is_dead
        account = self._account
        is_suspect = is_death and self._note_death(
            account.lease, account.attempt_at, is_said=is_dead
        )
        self._end_watch()
        was_answered = self._was_answered
        following = self._tries.next(
            failure,
            self._memory,
            was_answered=was_answered,
            retry_after=retry_after,
            is_suspect=is_suspect,
            pause_s=(_GONE_ON_S if was_answered else _SUSPECT_S) if is_death else 0.0,
        )
        if following is None and is_suspect:
            error = self._proxy.quarantine.refusal(self._key)
            if error is not None:
                self._give_up(error, "quarantined", failures.RESULT_OF[failure])
                return True
        if following is None:
            return False
        self._relay = None
        if following.pause_s:
            self._place_later(following)
        else:
            self._state = ExchangeState.WAITING
            self._place(following.exclude)
        return True

    def _note_death(self, lease: Lease | None, sent_at: float, *, is_said: bool = False) -> bool:
        """An engine died, perhaps of this request: whether it is refused from now on."""
        memory = self._memory
        if lease is None or (memory is not None and memory.missing):  # it had nothing left to do
            return False
        is_said = is_said or (memory is not None and memory.lost_with == ENGINE_DEAD)
        quarantine, key = self._proxy.quarantine, self._key
        was_refused = quarantine.refusal(key) is not None
        is_refused = quarantine.lost(key, lease.endpoint, sent_at, is_said=is_said)
        if is_refused and not was_refused:
            digest = digest_of(self._body)
            self._proxy.note_quarantine(self._request, self._path.path, digest)
        return is_refused

    def _end_watch(self) -> None:
        """The attempt is over, without an answer."""
        id_, self._unproven_at = self._unproven_at, ""
        if id_:
            self._proxy.quarantine.end(self._key, id_)

    def _place_later(self, following: NextAttempt) -> None:
        self._state = ExchangeState.WAITING
        self._connection.deadline = self._total_at
        self._turn = self._proxy.loop.create_task(self._pause(following))

    async def _pause(self, following: NextAttempt) -> None:
        try:
            await asyncio.sleep(following.pause_s)
            self._turn = None
            self._place(following.exclude)
        except Exception:
            self.broke()

    @property
    def _was_answered(self) -> bool:
        """The client has seen a part of the answer; signs of life are none."""
        return self._state is ExchangeState.PASSING_THROUGH or streams.was_seen(
            self._memory, self._relay
        )

    def broke(self) -> None:
        """A mistake of ours must not leave a client waiting, nor anything reserved."""
        logger.exception(
            "Unhandled error in request", extra={"request_id": self._request.request_id}
        )
        if self._state.is_closed:
            if self._connection.owner is self:
                self._connection.owner = None
                self._connection.abort()
            return
        self._release_attempt()
        self._account.record.code = "internal_error"
        self._connection.owner = None
        self._connection.abort()
        self._close(AttemptResult.CLIENT_GONE, "broken", time.monotonic())

    def _give_up(
        self,
        error: Rejected,
        outcome: str,
        result: AttemptResult = AttemptResult.CLIENT_GONE,
    ) -> None:
        self._release_attempt()
        self._account.record.code = error.code
        is_delivered = self._answer.fail(error)
        self._finish(result, outcome, is_cut=not is_delivered)

    # -- the client

    def client_gone(self) -> None:
        if not self._state.is_closed:
            self._release_attempt()
            self._close(AttemptResult.CLIENT_GONE, "client_gone", time.monotonic())

    def client_paused(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()
            if self._account.lease is not None:
                self._account.lease.pause()

    def client_resumed(self) -> None:
        if self._account.lease is not None:
            self._account.lease.resume()
        if self._upstream is not None:
            self._upstream.resume()
            stalled_at = time.monotonic() + self._proxy.timeouts.progress_s
            self._connection.deadline = min(stalled_at, self._total_at)
        else:
            self._expect_a_turn()

    def client_too_slow(self) -> None:
        self._account.record.code = "client_too_slow"

    def probe(self) -> bytes:
        return self._answer.probe()

    def on_deadline(self, now: float) -> None:
        try:
            if now >= self._total_at:
                self._fail(Failure.DEADLINE)
            elif self._handover is not None and self._handover.is_computing:
                self._handover.time_out()
            elif self._is_stuck_fetching:
                self._compute_locally("a prompt's cache was not fetched in time")
            elif self._state is ExchangeState.WAITING:
                self._give_sign(now)
            elif self._state is ExchangeState.AWAITING_HEAD:
                self._fail(Failure.NO_HEADERS)
            elif self._state.is_receiving:
                self._fail(Failure.STALLED)
        except Exception:
            self.broke()

    @property
    def _is_stuck_fetching(self) -> bool:
        """A stream that has not begun: an answer that comes whole may just be a long one."""
        return (
            self._handover is not None
            and self._handover.fetches
            and self._request.stream
            and self._state in _BEFORE_FIRST_EVENT
        )

    def shut_down(self, error: Rejected) -> None:
        """The router ends before the request does."""
        if not self._state.is_closed:
            self._give_up(error, "refused")

    def _give_sign(self, now: float) -> None:
        """Sends a progress comment to a client whose stream has to wait."""
        if not self._answer.has_begun:
            self._answer.begin_events()
        self._answer.comment(self._proxy.progress(self._request.pool, now - self._account.began_at))
        self._connection.deadline = min(now + _PROGRESS_S, self._total_at)

    # -- ending

    def _finish(self, result: AttemptResult, outcome: str, *, is_cut: bool = False) -> None:
        """The answer is over, and written."""
        self._account.record.status = self._answer.status
        self._close(result, outcome, time.monotonic())
        if is_cut:
            self._connection.owner = None
            self._connection.abort()
        else:
            self._connection.finish(keep_alive=self._answer.keeps_alive)

    def _close(self, result: AttemptResult, outcome: str, now: float) -> None:
        """Everything is given back, once."""
        self._state = ExchangeState.CLOSED
        if self._handover is not None and result is AttemptResult.OK:
            self._handover.answered()
        elif self._handover is not None:
            self._handover.cancel()  # a prompt that is computed beside it
        if result in _ANSWERS:
            self._proxy.quarantine.answered(self._key)
        else:
            self._end_watch()
        account = self._account
        usage, num_events = streams.usage_of(self._memory, self._relay, self._proxy.find_usage)
        if usage is NO_USAGE and result is AttemptResult.OK and self._pieces and self._path.is_json:
            usage = self._proxy.find_usage(self._pieces[-1])
        account.record.response_bytes = self._answer.num_bytes
        account.close(result, outcome, now, usage, guess=(self._request.prompt_tokens, num_events))
        self._proxy.over(self, account)

    def _release_attempt(self) -> None:
        for each in (self._turn, self._waiting, self._loading, self._connecting):
            if each is not None:
                each.cancel()  # a task that waits may not have begun to
        self._turn = self._waiting = self._loading = self._connecting = None
        self._abort_upstream()

    def _abort_upstream(self) -> None:
        if self._handover is not None:
            self._handover.cancel()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()
