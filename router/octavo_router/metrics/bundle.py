"""Counting requests that are over, many at a time: what is alike is looked up once for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from octavo_router.errors import NOT_LOADED
from octavo_router.metrics.record import RequestRecord

try:
    from octavo_router._fast import Sorter
except ImportError:  # not built
    from octavo_router.metrics.columns import Sorter  # type: ignore[assignment]

if TYPE_CHECKING:
    from octavo_router.metrics.counts import (
        LabelledCounter,
        PoolCounts,
        RevisionCounts,
        TenantCounts,
    )


class RecordGroup(NamedTuple):
    """Requests of one kind, and column by column what is counted of them."""

    records: list[RequestRecord]
    ended_at: list[float]
    duration_s: list[float]
    queue_s: list[float]
    pick_s: list[float]
    ttft_s: list[float | None]
    last_token_s: list[float | None]
    request_bytes: list[float]
    response_bytes: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    cached_tokens: list[int | None]
    predicted_tokens: list[int]


# Records that agree in these go to the same counters.
_KIND: Final = (
    "model", "is_known_model", "route", "status", "is_stream", "tenant", "pool", "revision",
    "trial", "outcome", "code", "attempts", "resumes",
)  # fmt: skip
# Codes of requests that more replicas would have served.
_NO_ROOM: Final = frozenset(("overloaded", "queue_full", "queue_timeout"))
_SORTER: Final = Sorter(RequestRecord, _KIND, RecordGroup._fields[1:])


def sort_out(records: list[RequestRecord]) -> list[RecordGroup]:
    """The records by kind, in the order in which the kinds came first."""
    return [RecordGroup(*row) for row in _SORTER.sort_out(records)]


def count_tokens(group: RecordGroup, model: str, tokens: LabelledCounter) -> None:
    prompt, output = sum(group.prompt_tokens), sum(group.output_tokens)
    if prompt or output:
        tokens.add(model, "prompt", by=prompt)
        tokens.add(model, "output", by=output)
        if cached := sum(filter(None, group.cached_tokens)):
            tokens.add(model, "cached", by=cached)


def count_tenant(group: RecordGroup, tenant: TenantCounts) -> None:
    number = len(group.records)
    tenant.requests += number
    if group.records[0].status in (429, 503):
        tenant.rejections += number
    tenant.queue_s += sum(group.queue_s)
    tenant.prompt_tokens += sum(group.prompt_tokens)
    tenant.output_tokens += sum(group.output_tokens)


def count_pool(group: RecordGroup, pool: PoolCounts) -> None:
    one, number = group.records[0], len(group.records)
    pool.saw_request(max(group.ended_at))
    pool.duration.observe_all(group.duration_s)
    pool.queue_wait.observe_all(group.queue_s)
    pool.request_bytes.observe_all(group.request_bytes)
    pool.response_bytes.observe_all(group.response_bytes)
    if one.outcome == "client_gone":
        pool.client_disconnects += number
    elif one.status >= 400 and one.code and not one.attempts:
        pool.rejections.add(one.code, by=number)
    if one.code in _NO_ROOM:
        pool.refused += number
    ttfts = [ttft_s for ttft_s in group.ttft_s if ttft_s is not None]
    decodes = [
        (last_s - ttft_s, tokens - 1)
        for ttft_s, last_s, tokens in zip(
            group.ttft_s, group.last_token_s, group.output_tokens, strict=True
        )
        if tokens > 1 and ttft_s is not None and last_s is not None
    ]
    pool.ttft.observe_all(ttfts)
    pool.tpot.observe_all([seconds / tokens for seconds, tokens in decodes])
    if one.attempts:
        pool.pick.observe_all(group.pick_s)
    # A revision whose engines cannot load an adapter has failed its requests, though it got none.
    if one.attempts or (one.code == NOT_LOADED and one.revision):
        _count_outcomes(group, ttfts, decodes, pool.revision(one.revision))
    if one.trial and (one.attempts or one.code == NOT_LOADED):
        _count_outcomes(group, ttfts, decodes, pool.trial(one.trial))
    if one.attempts > 1:
        pool.retries += (one.attempts - 1 - one.resumes) * number
        pool.retries_exhausted += one.is_error * number
        if one.resumes:
            pool.resumes.add(one.outcome, by=one.resumes * number)
    if any(tokens is not None for tokens in group.cached_tokens):
        _count_prediction(group, pool)


def _count_outcomes(
    group: RecordGroup,
    ttfts: list[float],
    decodes: list[tuple[float, int]],  # seconds after the first token, and tokens in them
    counts: RevisionCounts,
) -> None:
    number = len(group.records)
    counts.requests += number
    counts.errors += group.records[0].is_error * number
    counts.ttft.observe_all(ttfts)
    for seconds, tokens in decodes:
        counts.itl_s_sum += seconds
        counts.itl_count += tokens


def _count_prediction(group: RecordGroup, pool: PoolCounts) -> None:
    reported = [
        (cached, predicted, queried)
        for cached, predicted, queried in zip(
            group.cached_tokens, group.predicted_tokens, group.prompt_tokens, strict=True
        )
        if cached is not None
    ]
    for cached, predicted, queried in reported:
        pool.queried_tokens += queried
        pool.predicted_tokens += predicted
        pool.cached_tokens += cached
    pool.prediction_error.observe_all(
        [abs(cached - predicted) for cached, predicted, _ in reported]
    )
