"""Health by results: who is taken out of rotation, who is let back in, and how fast it grows.

    ready ──5 failures in a row, or far worse than the others──► ejected
    ejected ──its time is over, and a test generation answered right──► ready, with a small share
    ejected ──the test failed──► ejected, for longer

`/health` is not asked: an engine that answers it may still fail its requests. At most half of a
pool is ejected; where nobody else is ready, the registry lets ejected ones serve (panic). Decides
only: test generations are run by whoever calls `tick`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.config import HealthConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Change, Registry
    from octavo_router.routing.outcome import Outcome

MIN_ERRORS = 3  # in the window, before a share of errors means anything
MIN_ERROR_SHARE = 0.05
MIN_SLOWER_S = 0.01  # per token; below that nobody notices, whatever the factor
MAX_SAMPLES = 1024  # per endpoint
FIRST_SHARE = 0.1  # of a fair load, for one that has just returned
NUM_AGREEING = 2  # others that must agree on a test's answer before one that differs is wrong
MAX_ANSWER_CHARS = 256


# When, whether it was a failure, and the time per output token. Made once per request: no class.
Sample: TypeAlias = tuple[float, bool, float | None]


@dataclass(slots=True)
class Record:
    """What is remembered of one endpoint."""

    num_failures: int = 0  # in a row
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    last_at: float = float("-inf")  # of a request
    ready_since: float | None = None
    grows_since: float | None = None
    num_ejections: int = 0  # in a row
    ejected_until: float = 0.0
    readmitted_at: float = float("-inf")
    canary_at: float = float("-inf")
    is_in_canary: bool = False
    epoch: str = ""  # of its process, when it was ejected
    answer: str | None = None  # of its last test


class Health:
    """See the module. One for all pools."""

    __slots__ = ("_records", "config", "num_ejections", "num_readmissions")

    def __init__(self, config: HealthConfig) -> None:
        self.config = config  # may be replaced at any time
        self.num_ejections = 0  # ever, for metrics
        self.num_readmissions = 0
        self._records: dict[str, Record] = {}

    def note(self, registry: Registry, endpoint: Endpoint, outcome: Outcome, now: float) -> None:
        """A request there is over. Hot path: once per request."""
        id_ = endpoint.spec.id
        if registry.endpoints.get(id_) is not endpoint:
            return  # a late end; what was forgotten stays so
        record = self._records.get(id_) or self._record(endpoint)
        record.last_at = now
        result = outcome.result
        if not result.is_failure:
            if result.is_verdict:
                record.samples.append((now, False, _token_s(outcome)))
                record.num_failures = 0
            return
        record.samples.append((now, True, None))
        record.num_failures += 1
        if record.num_failures >= self.config.max_failures and endpoint.state == "ready":
            why = f"{record.num_failures} failures in a row, the last one {result.value}"
            self._eject(registry, endpoint, why, now)

    def tick(self, registry: Registry, members: Sequence[Endpoint], now: float) -> list[Endpoint]:
        """Once a second for each pool. Returns who should run a test generation now."""
        self._compare(registry, members, now)
        canaries = []
        for endpoint in members:
            record = self._record(endpoint)
            self._grow(endpoint, record, now)
            if self._wants_canary(endpoint, record, now):
                record.is_in_canary = True
                record.canary_at = now
                canaries.append(endpoint)
        return canaries

    def canary_finished(
        self, registry: Registry, endpoint: Endpoint, answer: str | None, now: float
    ) -> None:
        """What its test generation answered; None: it failed."""
        if registry.endpoints.get(endpoint.id) is not endpoint:
            return
        record = self._record(endpoint)
        record.is_in_canary = False
        if answer is not None:
            answer = answer[:MAX_ANSWER_CHARS]
        record.answer = answer
        is_wrong = False
        if answer is not None:
            expected = self._expected(registry.pool(endpoint.pool), endpoint)
            is_wrong = expected is not None and not answer.startswith(expected)
        if endpoint.is_ejected:
            if answer is None or is_wrong:
                self._prolong(record, now)  # no longer the first one in a row
                endpoint.reason = "its test generation " + (
                    "failed" if answer is None else "was wrong"
                )
            else:
                record.readmitted_at = now
                record.num_failures = 0
                record.samples.clear()
                self.num_readmissions += 1
                registry.readmit(endpoint)
        elif is_wrong and endpoint.state == "ready":
            self._eject(registry, endpoint, "its test generation was wrong", now)
        elif answer is None:
            record.num_failures += 1
            if record.num_failures >= self.config.max_failures and endpoint.state == "ready":
                self._eject(registry, endpoint, "its test generations fail", now)

    def changed(self, change: Change, members: Sequence[Endpoint], now: float) -> None:
        """An endpoint came, went, or changed its state."""
        endpoint = change.endpoint
        if change.kind == "removed":
            self._records.pop(endpoint.id, None)
            return
        record = self._record(endpoint)
        if endpoint.state != "ready":
            record.ready_since = None
        elif record.ready_since is None:
            record.ready_since = now
            # Those that start together have nobody to leave the load to.
            if any(self._has_settled(other, now) for other in members if other is not endpoint):
                record.grows_since = now
                endpoint.share = FIRST_SHARE

    def _has_settled(self, endpoint: Endpoint, now: float) -> bool:
        since = self._record(endpoint).ready_since
        return since is not None and now - since >= self.config.slow_start_s

    def _grow(self, endpoint: Endpoint, record: Record, now: float) -> None:
        if record.grows_since is None:
            return
        passed = (now - record.grows_since) / max(self.config.slow_start_s, 1e-9)
        if passed >= 1.0:
            record.grows_since = None
            endpoint.share = 1.0
        else:
            endpoint.share = max(FIRST_SHARE, passed)

    def _wants_canary(self, endpoint: Endpoint, record: Record, now: float) -> bool:
        if record.is_in_canary:
            return False
        if endpoint.is_ejected:
            # What one process did speaks against the next one only when it happens again.
            is_another = endpoint.epoch != record.epoch and record.num_ejections == 1
            is_time = now >= record.ejected_until or is_another
            return is_time and endpoint.told_state == "ready"
        interval_s = self.config.canary_interval_s
        return (
            interval_s > 0.0
            and endpoint.state == "ready"
            and endpoint.in_flight == 0
            and now - max(record.last_at, record.canary_at) >= interval_s
        )

    def _compare(self, registry: Registry, members: Sequence[Endpoint], now: float) -> None:
        """Side by side over the window: errors, and time per token."""
        config = self.config
        since = now - config.window_s
        shares: dict[Endpoint, tuple[int, float]] = {}
        speeds: dict[Endpoint, float] = {}
        for endpoint in members:
            samples = self._record(endpoint).samples
            while samples and samples[0][0] < since:
                samples.popleft()
            if endpoint.state != "ready" or len(samples) < config.min_requests:
                continue
            errors = sum(is_failure for _, is_failure, _ in samples)
            shares[endpoint] = errors, errors / len(samples)
            times = [token_s for _, _, token_s in samples if token_s is not None]
            if len(times) >= config.min_requests:
                speeds[endpoint] = median(times)
        if len(shares) < 2:
            return
        for endpoint, (errors, share) in shares.items():
            others = [value for other, (_, value) in shares.items() if other is not endpoint]
            if errors >= MIN_ERRORS and share > max(
                MIN_ERROR_SHARE, config.outlier_factor * median(others)
            ):
                why = f"{share:.0%} of its answers failed in {config.window_s:g} s"
                self._eject(registry, endpoint, why, now)
        for endpoint, time_s in speeds.items():
            usual = [value for other, value in speeds.items() if other is not endpoint]
            if not usual or endpoint.state != "ready":
                continue
            usual_s = median(usual)
            if time_s > usual_s * config.outlier_factor and time_s - usual_s > MIN_SLOWER_S:
                why = f"{time_s * 1e3:.0f} ms per token, where others need {usual_s * 1e3:.0f} ms"
                self._eject(registry, endpoint, why, now)

    def _eject(self, registry: Registry, endpoint: Endpoint, reason: str, now: float) -> None:
        members = registry.pool(endpoint.pool)
        num_out = sum(member.is_ejected for member in members)
        num_able = sum(member.state in ("ready", "ejected") for member in members)
        if num_out + 1 > int(self.config.max_ejected * num_able):
            return  # too few would be left; the next failure asks again
        record = self._record(endpoint)
        if now - record.readmitted_at > self.config.max_ejection_s:
            record.num_ejections = 0
        self.num_ejections += 1
        self._prolong(record, now)
        record.epoch = endpoint.epoch
        registry.eject(endpoint, reason)

    def _prolong(self, record: Record, now: float) -> None:
        record.num_ejections += 1
        duration_s = self.config.ejection_s * record.num_ejections
        record.ejected_until = now + min(duration_s, self.config.max_ejection_s)

    def _expected(self, members: Sequence[Endpoint], endpoint: Endpoint) -> str | None:
        """What a test must begin with; None while nothing is known."""
        if self.config.canary_answer:
            return self.config.canary_answer
        known, revision = self._records, endpoint.spec.revision
        answers = Counter(
            record.answer
            for other in members
            if (record := known.get(other.spec.id)) is not None
            and record.answer is not None
            and other is not endpoint
            and other.spec.revision == revision
            and other.names == endpoint.names
        )
        if not answers:
            return None
        answer, count = answers.most_common(1)[0]
        return answer if count >= NUM_AGREEING and count * 2 > answers.total() else None

    def _record(self, endpoint: Endpoint) -> Record:
        record = self._records.get(endpoint.id)
        if record is None:
            record = self._records[endpoint.id] = Record()
        return record


def _token_s(outcome: Outcome) -> float | None:
    if outcome.itl_s is not None:
        return outcome.itl_s
    if outcome.output_tokens > 1 and outcome.duration_s > 0.0:
        return outcome.duration_s / outcome.output_tokens
    return None
