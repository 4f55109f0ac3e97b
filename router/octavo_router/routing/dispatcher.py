"""The dispatcher: places a request on an endpoint and accounts for it until it ends.

The one object that proxy and endpoint picker talk to. `place` decides and reserves in the same
breath, so that the next decision already sees this one. A lease is released exactly once, however
often and in whatever order its methods are called.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from octavo_router.residency.underway import names_of
from octavo_router.routing import pricing
from octavo_router.routing.decision import Decision, describe
from octavo_router.routing.estimate import TokenRates
from octavo_router.routing.filters import narrow
from octavo_router.routing.outcome import CLIENT_GONE, AttemptResult, Outcome
from octavo_router.routing.prefill_decode import PrefillDecode
from octavo_router.routing.side_keeper import SideKeeper
from octavo_router.routing.tier_hits import count_tier_hits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Change, Registry
    from octavo_router.residency.api import Underway
    from octavo_router.routing.health import EndpointHealth
    from octavo_router.routing.locality import Locality
    from octavo_router.routing.policies import Policies
    from octavo_router.routing.request import RouteRequest
    from octavo_router.routing.shadow import Shadows

MIN_UNDERWAY_TOKENS = 64  # a shorter prompt is computed before the next one could profit


class PrefixIndex(Protocol):
    """The part of the residency index that decisions read."""

    def match(self, keys: bytes, slots: list[int]) -> list[int]: ...

    def assume(self, slot: int, keys: bytes, tokens_per_key: float) -> None: ...


class DispatchObserver(Protocol):
    """Counts what happens (metrics). Called once per placing and once per finish."""

    def placed(self, request: RouteRequest, decision: Decision) -> None: ...

    def finished(self, lease: Lease, outcome: Outcome) -> None: ...


class Lease:
    """A request's place at an endpoint. Ends with `finish`; whatever comes after that is ignored.

    `first_token` says that the prompt is computed. Call `finish` in a `finally`: its default is
    the client's going away, and the first call counts.
    """

    __slots__ = (
        "_dispatcher",
        "_generation",
        "_is_computing",
        "_is_over",
        "_is_paused",
        "_names",
        "_owes_prompt",
        "_uncached_tokens",
        "decision",
        "endpoint",
        "request",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: RouteRequest,
        decision: Decision,
        uncached_tokens: int,
        generation: int,
        names: tuple[bytes, ...],
        is_computing: bool,
    ) -> None:
        self.endpoint = decision.endpoint
        self.request = request
        self.decision = decision
        self._dispatcher = dispatcher
        self._uncached_tokens = uncached_tokens
        self._generation = generation
        self._names = names
        self._is_computing = is_computing
        self._owes_prompt = True
        self._is_over = False
        self._is_paused = False

    def first_token(self) -> None:
        """The prompt's work is done."""
        if self._owes_prompt:
            self._release_prompt()
            self._dispatcher._computed(self)

    def pause(self) -> None:
        """Its client does not read what it streams: it takes no seat until it does."""
        if self._is_over or self._is_paused or self._owes_prompt:
            return
        self._is_paused = True
        pricing.pause_sequence(self.endpoint, self._generation)
        if self._dispatcher.on_room is not None:
            self._dispatcher.on_room(self.request.pool)

    def resume(self) -> None:
        """Its client reads again."""
        if self._is_paused and not self._is_over:
            self._is_paused = False
            self._generation = pricing.resume_sequence(self.endpoint)

    def finish(self, outcome: Outcome = CLIENT_GONE) -> None:
        """It is over: everything is given back, health and metrics hear of it.

        An outcome with a time to the first token says `first_token` too.
        """
        if self._is_over:
            return
        if self._is_paused:
            self.resume()
        self._is_over = True
        if self._owes_prompt:
            self._owes_prompt = False
            pricing.release(self.endpoint, self._uncached_tokens, self._generation)
            if self._is_computing:
                self._dispatcher.underway.computed(self._names, self.endpoint)
            if outcome.ttft_s is not None:
                self._dispatcher._computed(self)
        else:
            pricing.release_sequence(self.endpoint, self._generation)
        self._dispatcher._finished(self, outcome)

    def _release_prompt(self) -> None:
        self._owes_prompt = False
        pricing.release_prompt(self.endpoint, self._uncached_tokens, self._generation)
        if self._is_computing:
            self._dispatcher.underway.computed(self._names, self.endpoint)

    @property
    def is_over(self) -> bool:
        return self._is_over


class Dispatcher:
    """See the module. Built by routing.build; `tick` wants to be called about once a second."""

    __slots__ = (
        "_clock", "_index", "decisions", "health", "locality", "num_picks", "observer",
        "on_adapter_idle", "on_result", "on_room", "policies", "registry", "sample_every",
        "shadows", "sides", "token_rates", "underway",
    )  # fmt: skip

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        policies: Policies,
        *,
        underway: Underway,
        clock: Callable[[], float],
        health: EndpointHealth | None = None,
        locality: Locality | None = None,
        shadows: Shadows | None = None,
        observer: DispatchObserver | None = None,
        sample_every: int = 64,
        num_kept: int = 256,
    ) -> None:
        self.registry = registry
        self.policies = policies  # may be replaced at any time
        self.health = health
        self.locality = locality
        self.shadows = shadows
        self.observer = observer
        self.on_result: Callable[[str, AttemptResult], None] | None = (
            None  # a pool's attempt: throttle
        )
        self.on_room: Callable[[str], None] | None = None  # a pool may have room: the gate
        self.on_adapter_idle: Callable[[Endpoint], None] | None = (
            None  # no request uses one of its adapters any more
        )
        self.decisions: deque[dict[str, Any]] = deque(maxlen=num_kept)  # sampled, newest last
        self.num_picks = 0
        self.sides = SideKeeper(registry)
        self.token_rates = TokenRates()
        self._index = index
        self.underway = underway
        self._clock = clock
        self.sample_every = sample_every
        registry.subscribe(self._changed)

    def place(
        self,
        request: RouteRequest,
        *,
        exclude: Collection[Endpoint] = (),
        num_fallbacks: int = 0,
    ) -> Lease | None:
        """Choose an endpoint for the request and reserve it; None if nobody may serve it.

        Hot path: once per attempt. Fills in `request.prompt_tokens` where that is 0.
        """
        found = self.registry.candidates(request.pool, request.revision)
        endpoints, slots = found.endpoints, found.slots
        if not endpoints:
            return None
        policies = self.policies  # `of`, without its frame
        policy = policies.by_pool.get(request.pool, policies.default)
        adapter = request.adapter
        if adapter and policy.places_adapters and not request.needs_adapter:
            adapter = ""
        if exclude or request.subset or adapter:
            endpoints, slots = narrow(request, endpoints, slots, exclude, adapter)
            if not endpoints:
                return None
        prompt_tokens = request.prompt_tokens
        if not prompt_tokens:
            prompt_tokens = self.token_rates.estimate(request.pool, request.prompt_bytes)
            request.prompt_tokens = prompt_tokens

        keys = request.keys
        if keys:
            matched = self._index.match(keys, slots)
            count_tier_hits(endpoints, keys, matched, self._index)
            names = request.names = names_of(keys)
            if self.underway.num_computing:
                rate = self.token_rates.per_key(request.pool)
                self.underway.credit(names, keys, endpoints, matched, rate)
        else:
            matched = [0] * len(endpoints)
            names = ()

        at = policy.pick(request, endpoints, matched)
        endpoint = endpoints[at]
        matched_tokens = matched[at]
        uncached_tokens = prompt_tokens - matched_tokens
        if uncached_tokens < 1:  # an exact repeat computes its last token again
            uncached_tokens = 1

        decision = Decision(endpoint, policy.name, policy.reason, matched_tokens)
        self.num_picks = count = self.num_picks + 1
        if request.explain or count % self.sample_every == 0:
            self._look_closer(request, policy.name, endpoints, matched, at, decision)
        if num_fallbacks:
            decision.fallbacks = self._fallbacks(request, endpoints, matched, at, num_fallbacks)

        endpoint.last_pick = count
        generation = pricing.reserve(endpoint, uncached_tokens)
        if request.adapter:
            _use_adapter(endpoint, request.adapter)
        is_computing = False
        if names:
            self.underway.begin(names)
            if uncached_tokens >= MIN_UNDERWAY_TOKENS:
                is_computing = True
                self.underway.compute(names, keys, endpoint)
        if self.observer is not None:
            self.observer.placed(request, decision)
        return Lease(self, request, decision, uncached_tokens, generation, names, is_computing)

    def pairs(self, pool: str) -> bool:
        """Whether prompts of this pool may be computed elsewhere than their answers."""
        return isinstance(self.policies.of(pool), PrefillDecode)

    def prompt_tokens(self, pool: str) -> float:
        """Those of a typical prompt that is worth the way; 0: none came, or none has to go it."""
        policy = self.policies.of(pool)
        return policy.prompt_tokens if isinstance(policy, PrefillDecode) else 0.0

    def wants_prompt(self, lease: Lease) -> bool:
        """Whether its prompt is worth the way from another engine."""
        request, decision = lease.request, lease.decision
        policy = self.policies.of(request.pool)
        return (
            isinstance(policy, PrefillDecode)
            and policy.is_worth_it(request.prompt_tokens - decision.matched_tokens)
            and decision.endpoint.fetches_kv
        )

    def place_prompt(self, lease: Lease, *, allowed: Collection[str] | None = None) -> Lease | None:
        """A place for the prompt of `lease` alone, at one of those `allowed` (host:port; None:
        any); None: there is no engine for that."""
        request = lease.request
        found = self.registry.prefillers(request.pool, request.revision).endpoints
        endpoints = [
            one
            for one in found
            if _understands(lease.endpoint, one)
            and (not request.adapter or request.adapter in one.adapters)
            and (allowed is None or one.spec.address.authority in allowed)
        ]
        if not endpoints:
            return None
        matched = [0] * len(endpoints)
        if request.keys:
            matched = self._index.match(request.keys, [one.slot for one in endpoints])
            count_tier_hits(endpoints, request.keys, matched, self._index)
        at = pricing.cheapest(request.prompt_tokens, endpoints, matched)
        endpoint = endpoints[at]
        uncached_tokens = max(1, request.prompt_tokens - matched[at])
        decision = Decision(endpoint, PrefillDecode.name, "computes the prompt", matched[at])
        self.num_picks = endpoint.last_pick = self.num_picks + 1
        generation = pricing.reserve(endpoint, uncached_tokens)
        if request.adapter:
            _use_adapter(endpoint, request.adapter)
        if self.observer is not None:
            self.observer.placed(request, decision)
        return Lease(
            self, request, decision, uncached_tokens, generation, names=(), is_computing=False
        )

    def tick(self) -> list[Endpoint]:
        """Once a second: prices, silence, health. Returns who wants a canary generation now.

        The caller runs one on each (a greedy answer of a few tokens, the same prompt for all) and
        reports it through `canary_finished`.
        """
        now = self._clock()
        canaries: list[Endpoint] = []
        for pool in self.registry.pools:
            members = self.registry.pool(pool)
            pricing.settle(members, now)
            if self.health is not None:
                canaries += self.health.tick(self.registry, members, now)
        self.sides.tick(self.policies, now)
        self._call_on_room()
        return canaries

    def canary_finished(
        self, endpoint: Endpoint, answer: str | None, *, is_refused: bool = False
    ) -> None:
        """What a canary generation answered; None: it failed, or was refused for want of room."""
        if self.health is not None:
            self.health.canary_finished(
                self.registry, endpoint, answer, self._clock(), is_refused=is_refused
            )

    # called by leases and the registry

    def _computed(self, lease: Lease) -> None:
        endpoint, request = lease.endpoint, lease.request
        if endpoint.kind == "openai" and request.keys and endpoint.slot >= 0:
            # It does not report its cache: remember what it has just computed.
            rate = 8 * request.prompt_tokens / len(request.keys)
            self._index.assume(endpoint.slot, request.keys, rate)

    def _finished(self, lease: Lease, outcome: Outcome) -> None:
        request = lease.request
        if lease._names:
            self.underway.end(lease._names)
        if request.adapter:
            self._release_adapter(lease.endpoint, request.adapter)
        if outcome.prompt_tokens:
            self.token_rates.learn(request.pool, request.prompt_bytes, outcome.prompt_tokens)
        if self.health is not None:
            self.health.note(self.registry, lease.endpoint, outcome, self._clock())
        if self.observer is not None:
            self.observer.finished(lease, outcome)
        if self.on_result is not None:
            self.on_result(request.pool, outcome.result)
        if self.on_room is not None:
            self.on_room(request.pool)

    def _release_adapter(self, endpoint: Endpoint, adapter: str) -> None:
        in_use = endpoint.adapters_in_use
        in_use[adapter] -= 1
        if not in_use[adapter]:
            del in_use[adapter]
            if self.on_adapter_idle is not None:
                self.on_adapter_idle(endpoint)

    def _changed(self, change: Change) -> None:
        endpoint = change.endpoint
        members = self.registry.pool(endpoint.pool)
        now = self._clock()
        pricing.settle(members, now)
        if self.health is not None:
            self.health.changed(change, members, now)
        if self.on_room is not None and endpoint.state == "ready":
            self.on_room(endpoint.pool)

    def _call_on_room(self) -> None:
        if self.on_room is not None:
            for pool in self.registry.pools:
                self.on_room(pool)

    # a closer look: sampled or requested

    def _look_closer(
        self,
        request: RouteRequest,
        policy: str,
        endpoints: Sequence[Endpoint],
        matched: Sequence[int],
        at: int,
        decision: Decision,
    ) -> None:
        scores = self.policies.of(request.pool).explain(request, endpoints, matched)
        decision.details = describe(
            request, policy, decision.reason, endpoints, matched, scores, at
        )
        self.decisions.append(decision.details)
        if self.shadows is not None:
            self.shadows.compare(request, policy, endpoints, matched, at)

    def _fallbacks(
        self,
        request: RouteRequest,
        endpoints: Sequence[Endpoint],
        matched: Sequence[int],
        at: int,
        count: int,
    ) -> tuple[Endpoint, ...]:
        """The next best, best first: the same policy over the endpoints left."""
        left = [(e, m) for i, (e, m) in enumerate(zip(endpoints, matched, strict=True)) if i != at]
        chosen: list[Endpoint] = []
        while left and len(chosen) < count:
            rest = [e for e, _ in left]
            pick = pricing.cheapest(request.prompt_tokens, rest, [m for _, m in left])
            chosen.append(left.pop(pick)[0])
        return tuple(chosen)


def _understands(answering: Endpoint, computing: Endpoint) -> bool:
    """Whether an engine may use KV blocks of another one: ours and plain servers do not understand
    each other, and another revision may be another model."""
    revisions = {answering.spec.revision, computing.spec.revision} - {""}
    return answering.kind == computing.kind and len(revisions) < 2


def _use_adapter(endpoint: Endpoint, adapter: str) -> None:
    in_use = endpoint.adapters_in_use
    in_use[adapter] = in_use.get(adapter, 0) + 1
