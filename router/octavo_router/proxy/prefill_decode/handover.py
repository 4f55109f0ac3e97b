"""The prompt of one request, computed by another engine than the one that answers.

    place ──► compute the prompt there ──► connect ──► send, with where its cache lies ──► answer
                       │ no engine, no room, no answer in time           │ not to be fetched
                       └─────────────────► connect ──► send, as the client wrote it ──► answer

Two engines of ours are sent the request side by side: the one that answers fetches the blocks while
the other one computes them, and computes itself what does not come.

Whatever goes wrong there costs time and nothing else: the answering engine computes the prompt.
That holds until it has begun to answer: it may find only then that the other one is gone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from octavo_router.flow.retry import Failure
from octavo_router.proxy import heads
from octavo_router.proxy.failures import FAILURE_OF, RESULT_OF, failure_on, verdict_on
from octavo_router.proxy.prefill_decode.engine_call import EngineCall
from octavo_router.proxy.prefill_decode.kv_transfer import (
    NotHandedOver,
    Opening,
    opening_of,
    prompt_question,
    with_cache,
    with_engine,
)
from octavo_router.routing.outcome import AttemptResult, Outcome

if TYPE_CHECKING:
    from octavo_router.http.request_head import RequestHead
    from octavo_router.proxy.account import RequestAccount
    from octavo_router.proxy.interfaces import ExchangeHost
    from octavo_router.proxy.prefill_decode.engine_call import EngineReply
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.request import RouteRequest


class HandoverUser(Protocol):
    """The exchange whose prompt it is."""

    def send_after_prompt(self) -> None:
        """The prompt is computed, or left to the engine that answers: see `PromptHandover.body`."""

    def prompt_has_killed(self, lease: Lease, sent_at: float) -> bool:
        """Notes that the engine died; whether the request is refused from now on."""

    def refuse_quarantined(self) -> None:
        """The engine that died over the prompt was the second one."""

    def broke(self) -> None: ...


class PromptHandover:
    """Of a request to a pool whose policy is prefill-decode; over all of its attempts."""

    __slots__ = (
        "_account", "_call", "_client_body", "_computes_locally", "_exchange", "_head", "_held",
        "_is_beside", "_prompt", "_proxy", "_request", "_sent_at", "body", "fetches",
    )  # fmt: skip

    def __init__(
        self,
        exchange: HandoverUser,
        proxy: ExchangeHost,
        head: RequestHead,
        body: bytes,
        request: RouteRequest,
        account: RequestAccount,
    ) -> None:
        self._exchange = exchange
        self._proxy = proxy
        self._head = head
        self._request = request
        self._account = account
        self._client_body = body  # as the client wrote it
        self.body = body  # for the answering engine; may say where the cache lies
        # The prompt could not be computed elsewhere, and that is not tried again.
        self._computes_locally = False
        # while the prompt is computed
        self._prompt: Lease | None = None
        self._call: EngineCall | None = None
        self._sent_at = 0.0
        self._is_beside = False  # the answering engine has the request already
        # while the cache is fetched
        # The answering engine was sent the cache's location, and has not begun to answer.
        self.fetches = False
        self._held = b""  # what it streamed

    # -- the prompt

    def place(self, now: float) -> bool:
        """Begins an attempt: whether another engine is to compute the prompt first; see `send`.

        Where both engines can, it computes from now on, and `body` says where.
        """
        self.body, self.fetches, self._held = self._client_body, False, b""
        dispatcher, lease = self._proxy.dispatcher, self._account.lease
        assert lease is not None
        if (
            self._computes_locally
            or not dispatcher.wants_prompt(lease)
            or (question := prompt_question(self._client_body, self._request)) is None
            or (prompt := dispatcher.place_prompt(lease)) is None
        ):
            return False
        there = self._proxy.upstreams.of(prompt.endpoint)
        lease.decision.prompt_at = there.lines.authority
        self._prompt, self._sent_at = prompt, now
        head, request_id = self._head, self._request.request_id.encode()
        self._call = EngineCall(
            heads.request_bytes(head, there.lines, request_id, question, forward=head.forward),
            self._on_reply,
        )
        self._is_beside = lease.endpoint.kv_follows and prompt.endpoint.kv_follows
        if not self._is_beside:
            return True
        self.body = with_engine(self._client_body, prompt.endpoint.kv_address)
        lease.first_token()  # nothing of the prompt is to be done there
        self.send()
        return False

    def send(self) -> None:
        """Then `send_after_prompt` of the exchange follows, unless it is cancelled."""
        assert self._call is not None and self._prompt is not None
        self._call.start(self._proxy.upstreams.of(self._prompt.endpoint))

    @property
    def is_computing(self) -> bool:
        """The request waits for it."""
        return self._call is not None and not self._is_beside

    def time_out(self) -> None:
        assert self._call is not None
        self._call.cancel()
        self._proxy.note_loss(self._prompt, "a prompt was not computed in time")
        self._end(AttemptResult.TIMEOUT)

    def answered(self) -> None:
        """The whole answer is there. What the other engine has not replied to is not waited for."""
        if self._call is not None:
            self._proxy.count_prompt(self._request.pool, "answered_first")
        self.cancel()

    def cancel(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.finish()

    def _on_reply(self, reply: EngineReply) -> None:
        exchange, prompt = self._exchange, self._prompt
        assert prompt is not None
        try:
            if reply.loss is not None:
                self._proxy.note_loss(prompt, reply.problem)
                failure = FAILURE_OF[reply.loss]
                result = RESULT_OF[failure]
                if (
                    failure is Failure.LOST
                    and exchange.prompt_has_killed(prompt, self._sent_at)
                    and not self._is_beside
                ):
                    self._prompt = self._call = None
                    prompt.finish(Outcome(result))
                    exchange.refuse_quarantined()
                    return
            else:
                result, _ = verdict_on(reply.status, reply.body)
            if result is AttemptResult.OK and not self._is_beside:
                try:
                    self.body = with_cache(self._client_body, reply.body)
                except NotHandedOver as error:
                    self._proxy.note_loss(prompt, str(error))
                    result = AttemptResult.BAD_ANSWER
            self._end(result, reply.body)
        except Exception:
            exchange.broke()

    def _end(self, result: AttemptResult, answer: bytes = b"") -> None:
        """The prompt is computed, or it is left to the engine that answers."""
        proxy, prompt, lease = self._proxy, self._prompt, self._account.lease
        assert prompt is not None and lease is not None
        self._prompt = self._call = None
        took_s = time.monotonic() - self._sent_at
        is_ok = result is AttemptResult.OK
        prompt_tokens, output_tokens, cached_tokens = proxy.find_usage(answer)
        prompt.finish(
            Outcome(
                result, took_s if is_ok else None, took_s, cached_tokens, prompt_tokens,
                output_tokens,
            )
        )  # fmt: skip
        proxy.count_prompt(self._request.pool, result.label)
        if self._is_beside:  # the answering engine sees for itself what became of it
            if not is_ok:
                self._computes_locally = True
                lease.decision.prompt_at = ""
            return
        if is_ok:
            self.fetches = True
            lease.first_token()  # nothing of the prompt is left to do there
        else:
            self._computes_locally = True
            lease.decision.prompt_at = ""
        self._exchange.send_after_prompt()

    # -- its cache, which may not be to be had after all

    def is_unfetched(self, status: int) -> bool:
        return self.fetches and failure_on(status) is Failure.ERROR_5XX

    def hold(self, data: bytes) -> Opening:
        """What the answering engine streams, until that shows whether it has the cache."""
        self._held += data
        return opening_of(self._held)

    def release(self) -> bytes:
        """What was held: the answer has begun."""
        held, self._held, self.fetches = self._held, b"", False
        return held

    def forgo(self, problem: str) -> None:
        """The answering engine computes the prompt from now on.

        The fault is not its own: mostly the other engine has died.
        """
        lease = self._account.lease
        assert lease is not None
        self._proxy.note_loss(lease, problem)
        self._proxy.count_prompt(self._request.pool, "not_fetched")
        self._computes_locally = True
        lease.decision.prompt_at = ""
