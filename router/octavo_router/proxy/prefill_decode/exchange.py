"""An exchange whose prompt may be computed by another engine than the one that answers.

    place ──► compute the prompt there ──► connect ──► send, with where its cache lies ──► answer
                       │ no engine, no room, no answer in time           │ not to be fetched
                       └─────────────────► connect ──► send, as the client wrote it ──► answer

Whatever goes wrong there costs time and nothing else: the answering engine computes the prompt.
That holds until it has begun to answer: it may find only then that the other one is gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from octavo_router.flow.retry import Failure
from octavo_router.proxy import heads
from octavo_router.proxy.exchange import ProxyExchange
from octavo_router.proxy.exchange_state import ExchangeState
from octavo_router.proxy.failures import (
    FAILURE_OF,
    RESULT_OF,
    failure_on,
    refused_for,
    verdict_on,
)
from octavo_router.proxy.prefill_decode.engine_call import EngineCall
from octavo_router.proxy.prefill_decode.kv_transfer import (
    NotHandedOver,
    Opening,
    opening_of,
    prompt_question,
    with_cache,
)
from octavo_router.routing.outcome import AttemptResult, Outcome

if TYPE_CHECKING:
    from octavo_router.http.client_connection import ClientConnection
    from octavo_router.http.request_head import RequestHead
    from octavo_router.proxy.account import RequestAccount
    from octavo_router.proxy.interfaces import ExchangeHost
    from octavo_router.proxy.paths import ProxiedPath
    from octavo_router.proxy.prefill_decode.engine_call import EngineReply
    from octavo_router.proxy.upstreams import Upstream
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.request import RouteRequest

# States of a stream whose engine may still be fetching the prompt's cache.
_BEFORE_FIRST_EVENT: Final = (ExchangeState.AWAITING_HEAD, ExchangeState.RELAYING_EVENTS)


class PrefillDecodeExchange(ProxyExchange):
    """Of a pool whose policy is prefill-decode."""

    __slots__ = (
        "_client_body", "_computes_locally", "_fetches", "_held", "_prompt", "_prompt_call",
        "_prompt_sent_at",
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
    ) -> None:
        super().__init__(proxy, connection, head, body, path, request, account)
        self._client_body = body  # as the client wrote it; `_body` may say where the cache lies
        # The prompt could not be computed elsewhere, and that is not tried again.
        self._computes_locally = False
        # while the prompt is computed
        self._prompt: Lease | None = None
        self._prompt_call: EngineCall | None = None
        self._prompt_sent_at = 0.0
        # while the cache is fetched
        # The answering engine was sent the cache's location, and has not begun to answer.
        self._fetches = False
        self._held = b""  # what it streamed

    def _reach(self, upstream: Upstream, now: float) -> None:
        self._body, self._fetches, self._held = self._client_body, False, b""
        dispatcher, lease = self._proxy.dispatcher, self._account.lease
        assert lease is not None
        if (
            self._computes_locally
            or not dispatcher.wants_prompt(lease)
            or (question := prompt_question(self._client_body, self._request)) is None
            or (prompt := dispatcher.place_prompt(lease)) is None
        ):
            super()._reach(upstream, now)
            return
        there = self._proxy.upstreams.of(prompt.endpoint)
        lease.decision.prompt_at = there.lines.authority
        self._state = ExchangeState.CONNECTING
        deadline = now + self._proxy.first_token_s(self._request)
        self._connection.deadline = min(deadline, self._total_at)
        self._prompt, self._prompt_sent_at = prompt, now
        head = self._head
        self._prompt_call = EngineCall(
            heads.request_bytes(
                head, there.lines, self._answer.request_id, question, forward=head.forward
            ),
            self._on_reply,
        )
        self._prompt_call.start(there)

    def _on_reply(self, reply: EngineReply) -> None:
        try:
            if reply.loss is not None:
                self._proxy.note_loss(self._prompt, reply.problem)
                failure = FAILURE_OF[reply.loss]
                result = RESULT_OF[failure]
                if failure is Failure.LOST and self._note_death(self._prompt, self._prompt_sent_at):
                    self._refuse_quarantined(result)
                    return
            else:
                result, _ = verdict_on(reply.status, reply.body)
            if result is AttemptResult.OK:
                try:
                    self._body = with_cache(self._client_body, reply.body)
                except NotHandedOver as error:
                    self._proxy.note_loss(self._prompt, str(error))
                    result = AttemptResult.BAD_ANSWER
            self._continue(result, reply.body)
        except Exception:
            self.broke()

    def _refuse_quarantined(self, result: AttemptResult) -> None:
        """The engine that died over the prompt was the second one."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.finish(Outcome(result))
        error = self._proxy.quarantine.refusal(self._key)
        self._give_up(error or refused_for(Failure.LOST), "quarantined")

    def _continue(self, result: AttemptResult, answer: bytes = b"") -> None:
        """The prompt is computed, or it is left to the engine that answers."""
        proxy, account, prompt = self._proxy, self._account, self._prompt
        lease = account.lease
        assert prompt is not None and lease is not None
        self._prompt = self._prompt_call = None
        now = time.monotonic()
        took_s = now - self._prompt_sent_at
        is_ok = result is AttemptResult.OK
        prompt_tokens, output_tokens, cached_tokens = proxy.find_usage(answer)
        prompt.finish(
            Outcome(
                result, took_s if is_ok else None, took_s, cached_tokens, prompt_tokens,
                output_tokens,
            )
        )  # fmt: skip
        proxy.count_prompt(self._request.pool, result)
        if is_ok:
            self._fetches = True
            lease.first_token()  # nothing of the prompt is left to do there
        else:
            self._computes_locally = True
            lease.decision.prompt_at = ""
        upstream = proxy.upstreams.known(lease.endpoint)
        if upstream is None:  # it went meanwhile, and was sent nothing
            self._fail(Failure.CONNECT)
            return
        account.attempt_at = now
        super()._reach(upstream, now)

    # -- the cache is not to be had after all

    def _end_whole(self) -> None:
        status = self._upstream_head.status
        if self._fetches and failure_on(status) is Failure.ERROR_5XX:
            self._compute_locally(f"status {status} instead of fetching a prompt's cache")
        else:
            super()._end_whole()

    def _relay_events(self, data: bytes) -> None:
        if not self._fetches:
            super()._relay_events(data)
            return
        self._held += data
        opening = opening_of(self._held)
        if opening is Opening.FAILED:
            self._compute_locally("an error instead of fetching a prompt's cache")
        elif opening is Opening.ANSWERS:
            self._release_held()

    def _end_events(self) -> None:
        if self._fetches:
            self._release_held()
        if self._state is ExchangeState.RELAYING_EVENTS:
            super()._end_events()

    def _release_held(self) -> None:
        held, self._held, self._fetches = self._held, b"", False
        super()._relay_events(held)

    def _compute_locally(self, problem: str) -> None:
        """Sends the answering engine the request again, as the client wrote it.

        It is not to blame: mostly the other engine has died. What it had begun with is cancelled,
        or has failed, without a token; so nothing runs twice, and the retry budget is not charged.
        """
        proxy, account = self._proxy, self._account
        lease = account.lease
        assert lease is not None
        self._abort_upstream()
        proxy.note_loss(lease, problem)
        proxy.count_unfetched(self._request.pool)
        self._computes_locally = True
        self._relay = None
        lease.decision.prompt_at = ""
        now = time.monotonic()
        account.ask_again(now)
        self._reach(proxy.upstreams.of(lease.endpoint), now)

    def on_deadline(self, now: float) -> None:
        call = self._prompt_call
        if now >= self._total_at:
            super().on_deadline(now)
            return
        if call is None:
            # A stream that has not begun: an answer that comes whole may just be a long one.
            is_stuck = self._fetches and self._request.stream
            if is_stuck and self._state in _BEFORE_FIRST_EVENT:
                try:
                    self._compute_locally("a prompt's cache was not fetched in time")
                except Exception:
                    self.broke()
            else:
                super().on_deadline(now)
            return
        try:
            call.cancel()
            self._proxy.note_loss(self._prompt, "a prompt was not computed in time")
            self._continue(AttemptResult.TIMEOUT)
        except Exception:
            self.broke()

    def _abort_upstream(self) -> None:
        call, self._prompt_call = self._prompt_call, None
        if call is not None:
            call.cancel()
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.finish()
        super()._abort_upstream()
