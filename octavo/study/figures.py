"""What one run of a workload under one policy came to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXACT_TOKENS = 16  # a prediction this close is within one block


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in seconds; shares from 0 to 1."""

    policy: str
    num_requests: int  # answered
    num_refused: int  # no engine took them, or those that they would have followed
    num_prompt_tokens: int
    num_output_tokens: int
    hit_rate: float  # prompt tokens found in the cache, of all
    num_prefilled_tokens: int  # computed by engines to catch up with prompts
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_mean_s: float  # between tokens of one answer
    itl_p99_s: float
    e2e_p50_s: float
    requests_per_s: float
    output_tokens_per_s: float
    makespan_s: float
    utilisation: float  # share of the time in which engines computed, on average
    imbalance: float  # requests of the engine that got most, over the mean
    work_imbalance: float  # the same of seconds spent computing
    predicted_within_block: float  # of requests: the router foresaw what the engine found
    num_preemptions: int
    num_adapter_loads: int = 0
    num_side_changes: int = 0
    # By request, in the order of their ends: seconds to the first token, and for each further one.
    felt: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    def within(self, first_token_s: float, token_s: float) -> float:
        """The share of all requests that met both."""
        met = sum(first <= first_token_s and each <= token_s for first, each in self.felt)
        return met / max(self.num_requests + self.num_refused, 1)


@dataclass(slots=True)
class RequestOutcome:
    """One request on its way."""

    arrived_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_predicted_tokens: int = 0


@dataclass(slots=True)
class StudyTally:
    """What is collected while a run lasts."""

    num_refused: int = 0
    each_token: array[float] = field(default_factory=lambda: array("d"))
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    durations: array[float] = field(default_factory=lambda: array("d"))
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_exact: int = 0
    began_at: float = float("inf")
    ended_at: float = 0.0

    def add(self, record: RequestOutcome) -> None:
        """It was answered in full."""
        self.ttfts.append(record.first_at - record.arrived_at)
        self.durations.append(record.last_at - record.arrived_at)
        gaps = max(record.num_output_tokens - 1, 1)
        self.each_token.append((record.last_at - record.first_at) / gaps)
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_output_tokens += record.num_output_tokens
        error = abs(record.num_predicted_tokens - record.num_cached_tokens)
        self.num_exact += error <= EXACT_TOKENS
        self.began_at = min(self.began_at, record.arrived_at)
        self.ended_at = max(self.ended_at, record.last_at)

    def figures(
        self, policy: str, *, requests: Sequence[int], busy_s: Sequence[float],
        num_prefilled_tokens: int, num_preemptions: int, num_adapter_loads: int = 0,
        num_side_changes: int = 0,
    ) -> Figures:  # fmt: skip
        """`requests` and `busy_s` by engine."""
        count = len(self.ttfts)
        makespan_s = max(self.ended_at - self.began_at, 1e-9) if count else 1e-9
        ttfts, gaps = sorted(self.ttfts), sorted(self.gaps)
        return Figures(
            policy=policy,
            num_requests=count,
            num_refused=self.num_refused,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            hit_rate=self.num_cached_tokens / max(self.num_prompt_tokens, 1),
            num_prefilled_tokens=num_prefilled_tokens,
            ttft_mean_s=_mean(ttfts),
            ttft_p50_s=_rank(ttfts, 0.5),
            ttft_p90_s=_rank(ttfts, 0.9),
            ttft_p99_s=_rank(ttfts, 0.99),
            itl_mean_s=_mean(gaps),
            itl_p99_s=_rank(gaps, 0.99),
            e2e_p50_s=_rank(sorted(self.durations), 0.5),
            requests_per_s=count / makespan_s,
            output_tokens_per_s=self.num_output_tokens / makespan_s,
            makespan_s=makespan_s,
            utilisation=sum(busy_s) / (len(busy_s) * makespan_s),
            imbalance=_imbalance(requests),
            work_imbalance=_imbalance(busy_s),
            predicted_within_block=self.num_exact / max(count, 1),
            num_preemptions=num_preemptions,
            num_adapter_loads=num_adapter_loads,
            num_side_changes=num_side_changes,
            felt=tuple(zip(self.ttfts, self.each_token, strict=True)),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _rank(ordered: Sequence[float], share: float) -> float:
    """Between the nearest ranks, by a straight line."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _imbalance(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
