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

    __slots__ = ("_asked", "_asking", "_asking_at", "_fetches", "_held", "_is_alone", "_prompt")

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
        self._asked = body  # as the client wrote it; `_body` may say where the cache lies
        self._is_alone = False  # the prompt could not be had elsewhere, and is not tried again
        # while the prompt is computed
        self._prompt: Lease | None = None
        self._asking: EngineCall | None = None
        self._asking_at = 0.0
        # while the cache is fetched
        self._fetches = False  # the answering engine was told of one, and has not begun to answer
        self._held = b""  # what it streamed

    def _reach(self, upstream: Upstream, now: float) -> None:
        self._body, self._fetches, self._held = self._asked, False, b""
        dispatcher, lease = self._proxy.dispatcher, self._account.lease
        assert lease is not None
        if (
            self._is_alone
            or not dispatcher.wants_prompt(lease)
            or (question := prompt_question(self._asked, self._request)) is None
            or (prompt := dispatcher.place_prompt(lease)) is None
        ):
            super()._reach(upstream, now)
            return
        there = self._proxy.upstreams.of(prompt.endpoint)
        lease.decision.prompt_at = there.lines.authority
        self._state = ExchangeState.CONNECTING
        deadline = now + self._proxy.first_token_s(self._request)
        self._connection.deadline = min(deadline, self._total_at)
        self._prompt, self._asking_at = prompt, now
        head = self._head
        self._asking = EngineCall(
            heads.request_bytes(
                head, there.lines, self._answer.request_id, question, forward=head.forward
            ),
            self._on_told,
        )
        self._asking.start(there)

    def _on_told(self, told: EngineReply) -> None:
        try:
            if told.loss is not None:
                self._proxy.note_loss(self._prompt, told.problem)
                failure = FAILURE_OF[told.loss]
                result = RESULT_OF[failure]
                if failure is Failure.LOST and self._note_death(self._prompt, self._asking_at):
                    self._go_on_to_nobody(result)
                    return
            else:
                result, _ = verdict_on(told.status, told.body)
            if result is AttemptResult.OK:
                try:
                    self._body = with_cache(self._asked, told.body)
                except NotHandedOver as error:
                    self._proxy.note_loss(self._prompt, str(error))
                    result = AttemptResult.BAD_ANSWER
            self._go_on(result, told.body)
        except Exception:
            self.broke()

    def _go_on_to_nobody(self, result: AttemptResult) -> None:
        """The engine that died over the prompt was the second one."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.finish(Outcome(result))
        error = self._proxy.quarantine.refusal(self._key)
        self._give_up(error or refused_for(Failure.LOST), "quarantined")

    def _go_on(self, result: AttemptResult, answer: bytes = b"") -> None:
        """The prompt is computed, or it is left to the engine that answers."""
        proxy, account, prompt = self._proxy, self._account, self._prompt
        lease = account.lease
        assert prompt is not None and lease is not None
        self._prompt = self._asking = None
        now = time.monotonic()
        took_s = now - self._asking_at
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
            self._is_alone = True
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
            self._compute_here(f"status {status} instead of fetching a prompt's cache")
        else:
            super()._end_whole()

    def _relay_events(self, data: bytes) -> None:
        if not self._fetches:
            super()._relay_events(data)
            return
        self._held += data
        opening = opening_of(self._held)
        if opening is Opening.FAILED:
            self._compute_here("an error instead of fetching a prompt's cache")
        elif opening is Opening.ANSWERS:
            self._let_go()

    def _end_events(self) -> None:
        if self._fetches:
            self._let_go()
        if self._state is ExchangeState.RELAYING_EVENTS:
            super()._end_events()

    def _let_go(self) -> None:
        held, self._held, self._fetches = self._held, b"", False
        super()._relay_events(held)

    def _compute_here(self, problem: str) -> None:
        """Asks the answering engine again, as the client wrote it.

        It is not to blame: mostly the other engine has died. What it had begun with is cancelled,
        or has failed, without a token; so nothing runs twice, and no budget is asked.
        """
        proxy, account = self._proxy, self._account
        lease = account.lease
        assert lease is not None
        self._abort_upstream()
        proxy.note_loss(lease, problem)
        proxy.count_unfetched(self._request.pool)
        self._is_alone = True
        self._relay = None
        lease.decision.prompt_at = ""
        now = time.monotonic()
        account.ask_again(now)
        self._reach(proxy.upstreams.of(lease.endpoint), now)

    def on_deadline(self, now: float) -> None:
        asking = self._asking
        if now >= self._total_at:
            super().on_deadline(now)
            return
        if asking is None:
            # A stream that has not begun: an answer that comes whole may just be a long one.
            is_stuck = self._fetches and self._request.stream
            if is_stuck and self._state in _BEFORE_FIRST_EVENT:
                try:
                    self._compute_here("a prompt's cache was not fetched in time")
                except Exception:
                    self.broke()
            else:
                super().on_deadline(now)
            return
        try:
            asking.cancel()
            self._proxy.note_loss(self._prompt, "a prompt was not computed in time")
            self._go_on(AttemptResult.TIMEOUT)
        except Exception:
            self.broke()

    def _abort_upstream(self) -> None:
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.finish()
        super()._abort_upstream()
