"""Counting requests that are over, many at a time: what is alike is looked up once for all."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.metrics.counts import PoolCounts, RevisionCounts, Tally
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.metrics.router_metrics import TenantCounts

# Records that agree in these go to the same counters.
_KIND = attrgetter(
    "model", "is_known_model", "route", "status", "is_stream", "tenant", "pool", "revision",
    "outcome", "code", "attempts", "resumes",
)  # fmt: skip


def sort_out(records: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """The records by kind, in the order in which the kinds came first."""
    groups: dict[tuple[object, ...], list[RequestRecord]] = {}
    group: list[RequestRecord] = []
    last_kind: tuple[object, ...] = ()
    for record in records:
        kind = _KIND(record)
        if kind != last_kind:  # neighbours are mostly alike, and that is told without hashing
            group = groups.setdefault(kind, [])
            last_kind = kind
        group.append(record)
    return list(groups.values())


def count_tokens(group: Sequence[RequestRecord], model: str, tokens: Tally) -> None:
    prompt = sum([record.prompt_tokens for record in group])
    output = sum([record.output_tokens for record in group])
    if prompt or output:
        tokens.add(model, "prompt", by=prompt)
        tokens.add(model, "output", by=output)
        if cached := sum([record.cached_tokens or 0 for record in group]):
            tokens.add(model, "cached", by=cached)


def count_tenant(group: Sequence[RequestRecord], tenant: TenantCounts) -> None:
    tenant.requests += len(group)
    if group[0].status in (429, 503):
        tenant.rejections += len(group)
    tenant.queue_s += sum([record.queue_s for record in group])
    tenant.prompt_tokens += sum([record.prompt_tokens for record in group])
    tenant.output_tokens += sum([record.output_tokens for record in group])


def count_pool(group: Sequence[RequestRecord], pool: PoolCounts) -> None:
    one, number = group[0], len(group)
    pool.saw_request(max([record.ended_at for record in group]))
    pool.duration.observe_all([record.duration_s for record in group])
    pool.queue_wait.observe_all([record.queue_s for record in group])
    pool.request_bytes.observe_all([record.request_bytes for record in group])
    pool.response_bytes.observe_all([record.response_bytes for record in group])
    if one.outcome == "client_gone":
        pool.client_disconnects += number
    elif one.status >= 400 and one.code and not one.attempts:
        pool.rejections.add(one.code, by=number)
    begun = [record for record in group if record.ttft_s is not None]
    ttfts = [record.ttft_s or 0.0 for record in begun]
    pool.ttft.observe_all(ttfts)
    pool.tpot.observe_all(
        [
            (record.last_token_s - ttft_s) / (record.output_tokens - 1)
            for record, ttft_s in zip(begun, ttfts, strict=True)
            if record.last_token_s is not None and record.output_tokens > 1
        ]
    )
    if one.attempts:
        pool.pick.observe_all([record.pick_s for record in group])
        _count_revision(group, begun, ttfts, pool.revision(one.revision))
    if one.attempts > 1:
        pool.retries += (one.attempts - 1 - one.resumes) * number
        pool.retries_exhausted += one.is_error * number
        if one.resumes:
            pool.resumes.add(one.outcome, by=one.resumes * number)
    _count_prediction(group, pool)


def _count_revision(
    group: Sequence[RequestRecord],
    begun: Sequence[RequestRecord],
    ttfts: list[float],
    revision: RevisionCounts,
) -> None:
    revision.requests += len(group)
    revision.errors += group[0].is_error * len(group)
    revision.ttft.observe_all(ttfts)
    for record, ttft_s in zip(begun, ttfts, strict=True):
        if record.last_token_s is not None and record.output_tokens > 1:
            revision.itl_s_sum += record.last_token_s - ttft_s
            revision.itl_count += record.output_tokens - 1


def _count_prediction(group: Sequence[RequestRecord], pool: PoolCounts) -> None:
    told = [
        (record.cached_tokens, record.predicted_tokens, record.prompt_tokens)
        for record in group
        if record.cached_tokens is not None
    ]
    for cached, predicted, queried in told:
        pool.queried_tokens += queried
        pool.predicted_tokens += predicted
        pool.cached_tokens += cached
    pool.prediction_error.observe_all([abs(cached - predicted) for cached, predicted, _ in told])
