"""What a request would cost at an endpoint, in seconds: its wait, and the work it brings there.

    price(endpoint, request) = (base + own + UNCACHED_WEIGHT * uncached) * token_s + zone_s

*base* is the work that the engine reported last: prompt tokens queued there, `SEQUENCE_TOKENS` for
each sequence (it takes a share of every step until it ends), and what a nearly full KV pool costs.
*own* is what this router placed there and the engine cannot have counted yet; it is exact, so a
burst spreads although no report comes in between. *uncached* is this prompt's part that is not in
the engine's memory. It counts more than once: the request waits for it, and so does half of a
request behind it. Hence of two equal waits the one that computes less is better. *zone_s* is what
the way to another zone costs (routing.locality).

An engine's report covers what we placed some milliseconds before it. So our work counts as own for
one or two *turns* of `TURN_S`, and is the engine's to tell from then on:

    placed in turn g  ──report──► turn g+1: still own  ──report──► turn g+2: in base

Without reports there are no turns: all our unfinished work counts as own. That is least-load on
what we know ourselves, and the base is then the median of those who do report, so that silence is
not taken for idleness.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from octavo_engine.protocol.stream import SILENCE_S, Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.endpoints.endpoint import Endpoint

SEQUENCE_TOKENS = 64  # prompt tokens' worth of work that a running sequence costs its neighbours
UNCACHED_WEIGHT = 1.5  # see above
TURN_S = 0.05  # longer than a request needs from here into the engine's queue and its next report
SLOW_REPORTS_S = 10 * TURN_S  # who reports this rarely has counted all that we placed before
DEFAULT_TOKEN_S = 5e-4  # until an engine has reported its speed
SAME_SPEED = 1.4  # within this factor of the pool's median, speeds differ by noise only
KV_TOKENS = 256  # price of KV use u: KV_TOKENS * u**4 / (1 - u); 32 tokens at 50 %, 25k at 99 %
SATURATED_TOKENS = 10**9  # only if everybody is
MAX_TOKENS = 10**8  # a report beyond this is nonsense
MAX_SEQUENCES = 10**6


def note_report(endpoint: Endpoint) -> None:
    """Take a new report into the price. Hot paths call it when `load is not priced`."""
    load = endpoint.priced = endpoint.load
    now = endpoint.load_at
    if now is None or not is_sane(load):
        count_alone(endpoint, base_tokens=0)
        return
    _turn(endpoint, now)
    known = load.running + load.waiting
    tokens = load.queued_tokens + SEQUENCE_TOKENS * known
    if 0 < endpoint.max_num_seqs <= load.running:  # who waits needs a seat as well
        tokens += SEQUENCE_TOKENS * (load.waiting + 1)
    usage = min(load.kv_usage, 0.99)
    tokens += int(KV_TOKENS * usage**4 / (1.0 - usage))
    # It knows fewer requests than we sent: they are on their way, maybe stuck before its queue.
    unseen = SEQUENCE_TOKENS * endpoint.in_flight - endpoint.own_tokens
    endpoint.base_tokens = max(tokens, unseen) + SATURATED_TOKENS * load.is_saturated


def cheapest(prompt_tokens: int, endpoints: Sequence[Endpoint], matched: Sequence[int]) -> int:
    """The place of the lowest price; of equal ones, that of the endpoint picked longest ago."""
    best, at = float("inf"), 0
    for i, endpoint in enumerate(endpoints):
        price = seconds(endpoint, prompt_tokens - matched[i])
        if price < best:
            best, at = price, i
        elif price == best and endpoint.last_pick < endpoints[at].last_pick:
            at = i
    return at


def seconds(endpoint: Endpoint, uncached_tokens: float) -> float:
    """The price of a request with so much uncached."""
    if endpoint.load is not endpoint.priced:
        note_report(endpoint)
    own_part = UNCACHED_WEIGHT * max(uncached_tokens, 1)
    work = endpoint.base_tokens + endpoint.own_tokens + own_part
    return work * endpoint.token_s + endpoint.zone_s


def wait_s(endpoint: Endpoint, uncached_tokens: float) -> float:
    """Estimated time to its first token."""
    if endpoint.load is not endpoint.priced:
        note_report(endpoint)
    work = endpoint.base_tokens + endpoint.own_tokens + max(uncached_tokens, 1)
    return work * endpoint.token_s


def count_alone(endpoint: Endpoint, *, base_tokens: int) -> None:
    """Nothing usable is reported: count what this router has there itself."""
    endpoint.own_tokens = endpoint.pending_tokens + SEQUENCE_TOKENS * endpoint.in_flight
    endpoint.counts_from = 0
    endpoint.base_tokens = max(0, base_tokens - endpoint.own_tokens)


def reserve(endpoint: Endpoint, uncached_tokens: int) -> int:
    """Count a request as placed there; its generation is needed to take it back."""
    endpoint.in_flight += 1
    endpoint.pending_tokens += uncached_tokens
    weight = uncached_tokens + SEQUENCE_TOKENS
    endpoint.own_tokens += weight
    endpoint.recent_tokens += weight
    return endpoint.generation


def pause_sequence(endpoint: Endpoint, generation: int) -> None:
    """Its client does not read: the engine is about to set it aside."""
    release_sequence(endpoint, generation)
    endpoint.num_paused += 1


def resume_sequence(endpoint: Endpoint) -> int:
    """It takes a seat again; its new generation."""
    endpoint.num_paused -= 1
    return reserve(endpoint, 0)


def release_prompt(endpoint: Endpoint, uncached_tokens: int, generation: int) -> None:
    """Its prompt is computed."""
    endpoint.pending_tokens -= uncached_tokens
    _take_back(endpoint, uncached_tokens, generation)


def release_sequence(endpoint: Endpoint, generation: int) -> None:
    """It is over."""
    endpoint.in_flight -= 1
    _take_back(endpoint, SEQUENCE_TOKENS, generation)


def release(endpoint: Endpoint, uncached_tokens: int, generation: int) -> None:
    """Both at once: nobody saw a first token."""
    endpoint.in_flight -= 1
    endpoint.pending_tokens -= uncached_tokens
    tokens = uncached_tokens + SEQUENCE_TOKENS  # hot path, so _take_back is written out
    if generation >= endpoint.counts_from:
        endpoint.own_tokens -= tokens
    if generation == endpoint.generation:
        endpoint.recent_tokens -= tokens


def settle(endpoints: Sequence[Endpoint], now: float) -> None:
    """Once a second and when a pool changes: speeds side by side, and who fell silent."""
    speeds = {}
    reported = []
    silent = []
    for endpoint in endpoints:
        if endpoint.load is not endpoint.priced:
            note_report(endpoint)
        at = endpoint.load_at
        if at is None or now - at > SILENCE_S or not is_sane(endpoint.load):
            silent.append(endpoint)
            continue
        reported.append(endpoint)
        if endpoint.load.prefill_tokens_per_s > 0.0:
            speeds[endpoint.id] = endpoint.load.prefill_tokens_per_s
    usual = median(speeds.values()) if speeds else 1.0 / DEFAULT_TOKEN_S
    for endpoint in endpoints:
        speed = speeds.get(endpoint.id, usual)
        is_usual = usual / SAME_SPEED <= speed <= usual * SAME_SPEED
        endpoint.token_s = 1.0 / (usual if is_usual else speed)
    if silent:
        totals = [e.base_tokens + e.own_tokens for e in reported if not e.load.is_saturated]
        likely = int(median(totals)) if totals else 0
        for endpoint in silent:
            count_alone(endpoint, base_tokens=likely)


def is_sane(load: Load) -> bool:
    """A report to act upon. NaN fails every comparison."""
    return (
        0 <= load.queued_tokens <= MAX_TOKENS
        and 0 <= load.running <= MAX_SEQUENCES
        and 0 <= load.waiting <= MAX_SEQUENCES
        and 0.0 <= load.kv_usage <= 1.0
        and 0.0 <= load.prefill_tokens_per_s < 1e9
    )


def _turn(endpoint: Endpoint, now: float) -> None:
    since = now - endpoint.turned_at
    if since < TURN_S:
        return
    endpoint.turned_at = now
    if since < SLOW_REPORTS_S:
        endpoint.own_tokens = endpoint.recent_tokens
        endpoint.counts_from = endpoint.generation
    else:
        endpoint.own_tokens = 0
        endpoint.counts_from = endpoint.generation + 1
    endpoint.recent_tokens = 0
    endpoint.generation += 1


def _take_back(endpoint: Endpoint, tokens: int, generation: int) -> None:
    if generation >= endpoint.counts_from:
        endpoint.own_tokens -= tokens
    if generation == endpoint.generation:
        endpoint.recent_tokens -= tokens
