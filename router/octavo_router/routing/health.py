"""Health by results: who is taken out of rotation, who is let back in, and how fast it grows.

    ready ──5 failures in a row, or far worse than the others──► ejected
    ready ──the same by 5xx answers alone──► tested ──the test failed──► ejected
    ejected ──its time is over, and a test generation answered right──► ready, with a small share
    ejected ──the test failed──► ejected, for longer

`/health` is not called: an engine that answers it may still fail its requests. At most half of a
pool is ejected; where nobody else is ready, the registry lets ejected ones serve (panic). Decides
only: test generations are run by the caller of `tick`.

An answer with a 5xx may be the request's own doing, and so may one that took all of its time: what
users send must not take an engine from other users. Such answers raise a doubt, and a test decides.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from octavo_router.config.settings import HealthConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Change, Registry
    from octavo_router.routing.outcome import Outcome

MIN_ERRORS = 3  # in the window, before a share of errors means anything
MIN_ERROR_SHARE = 0.05
MIN_SILENCE_S = 30.0  # of an expired request, before it says anything
WORK_FACTOR = 2.0  # others with at least one part in so many of its work are as busy
MIN_SLOWER_S = 0.01  # per token; below that nobody notices, whatever the factor
MAX_SAMPLES = 1024  # per endpoint
FIRST_SHARE = 0.1  # of a fair load, for one that has just returned
NUM_AGREEING = 2  # others that must agree on a test's answer before one that differs is wrong
MAX_ANSWER_CHARS = 256


FINE, DOUBTFUL, FAULT = 0, 1, 2
# When; one of the three above; a stream's time per output token; tokens computed for it. Made once
# per request: no class.
Sample: TypeAlias = tuple[float, int, float | None, int]


@dataclass(slots=True)
class HealthRecord:
    """What is remembered of one endpoint."""

    num_failures: int = 0  # in a row
    num_errors: int = 0  # answers with a 5xx, in a row
    doubt: str = ""  # why a test generation must decide now
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


class EndpointHealth:
    """See the module. One for all pools."""

    __slots__ = ("_records", "config", "num_ejections", "num_readmissions")

    def __init__(self, config: HealthConfig) -> None:
        self.config = config  # may be replaced at any time
        self.num_ejections = 0  # ever, for metrics
        self.num_readmissions = 0
        self._records: dict[str, HealthRecord] = {}

    def note(self, registry: Registry, endpoint: Endpoint, outcome: Outcome, now: float) -> None:
        """A request there is over. Hot path: once per request."""
        id_ = endpoint.spec.id
        if registry.endpoints.get(id_) is not endpoint:
            return  # a late end; what was forgotten stays so
        record = self._records.get(id_) or self._record(endpoint)
        record.last_at = now
        result = outcome.result
        if result is AttemptResult.OK:
            record.samples.append((now, FINE, outcome.itl_s, _work(outcome)))
            record.num_failures = record.num_errors = 0
            return
        if result is AttemptResult.ERROR_5XX:
            record.samples.append((now, DOUBTFUL, None, 0))
            record.num_errors += 1
            if record.num_errors >= self.config.max_failures:
                record.doubt = f"{record.num_errors} errors in a row"
            return
        if result is AttemptResult.EXPIRED and _was_silent(record, now - outcome.duration_s, now):
            record.doubt = f"no answer in {outcome.duration_s:.0f} s"
        if not result.is_failure:
            return
        record.samples.append((now, FAULT, None, 0))
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
        self,
        registry: Registry,
        endpoint: Endpoint,
        answer: str | None,
        now: float,
        *,
        is_refused: bool = False,
    ) -> None:
        """What its test generation answered; None: it failed, or was refused for want of room."""
        if registry.endpoints.get(endpoint.id) is not endpoint:
            return
        record = self._record(endpoint)
        record.is_in_canary = False
        if is_refused and record.doubt and not endpoint.is_ejected:
            return  # it is full, which says nothing; the next tick asks again
        doubt, record.doubt = record.doubt, ""
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
                what = "failed" if answer is None else "was wrong"
                registry.eject(endpoint, f"its test generation {what}")
            else:
                record.readmitted_at = now
                record.num_failures = record.num_errors = 0
                record.samples.clear()
                self.num_readmissions += 1
                registry.readmit(endpoint)
        elif is_wrong and endpoint.state == "ready":
            self._eject(registry, endpoint, "its test generation was wrong", now)
        elif answer is None and doubt:
            self._eject(registry, endpoint, f"{doubt}, and its test generation failed", now)
        elif doubt:  # the requests were at fault
            record.num_errors = 0
            kept = (sample for sample in record.samples if sample[1] != DOUBTFUL)
            record.samples = deque(kept, maxlen=MAX_SAMPLES)
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

    def _grow(self, endpoint: Endpoint, record: HealthRecord, now: float) -> None:
        if record.grows_since is None:
            return
        passed = (now - record.grows_since) / max(self.config.slow_start_s, 1e-9)
        if passed >= 1.0:
            record.grows_since = None
            endpoint.share = 1.0
        else:
            endpoint.share = max(FIRST_SHARE, passed)

    def _wants_canary(self, endpoint: Endpoint, record: HealthRecord, now: float) -> bool:
        if record.is_in_canary:
            return False
        if endpoint.is_ejected:
            # What one process did speaks against the next one only when it happens again.
            is_another = endpoint.epoch != record.epoch and record.num_ejections == 1
            is_time = now >= record.ejected_until or is_another
            return is_time and endpoint.reported_state == "ready"
        if record.doubt and endpoint.state == "ready":
            return True
        interval_s = self.config.canary_interval_s
        return (
            interval_s > 0.0
            and endpoint.state == "ready"
            and endpoint.in_flight == 0
            and now - max(record.last_at, record.canary_at) >= interval_s
        )

    def _compare(self, registry: Registry, members: Sequence[Endpoint], now: float) -> None:
        """Side by side over the window: errors, and time per token of those that do as much."""
        config = self.config
        since = now - config.window_s
        sizes: dict[Endpoint, int] = {}
        speeds: dict[Endpoint, tuple[float, int]] = {}  # time per token, and work
        for endpoint in members:
            samples = self._record(endpoint).samples
            while samples and samples[0][0] < since:
                samples.popleft()
            if endpoint.state != "ready" or len(samples) < config.min_requests:
                continue
            sizes[endpoint] = len(samples)
            times = [token_s for _, _, token_s, _ in samples if token_s is not None]
            if len(times) >= config.min_requests:
                speeds[endpoint] = median(times), sum(work for _, _, _, work in samples)
        if len(sizes) < 2:
            return
        for endpoint, why in self._with_errors(sizes, FAULT):
            self._eject(registry, endpoint, why, now)
        for endpoint, why in self._with_errors(sizes, DOUBTFUL):
            self._record(endpoint).doubt = why
        for endpoint, (time_s, work) in speeds.items():
            usual = [
                other_s
                for other, (other_s, other_work) in speeds.items()
                if other is not endpoint and other_work * WORK_FACTOR >= work
            ]
            if not usual or endpoint.state != "ready":
                continue
            usual_s = median(usual)
            if time_s > usual_s * config.outlier_factor and time_s - usual_s > MIN_SLOWER_S:
                why = f"{time_s * 1e3:.0f} ms per token, where others need {usual_s * 1e3:.0f} ms"
                self._eject(registry, endpoint, why, now)

    def _with_errors(
        self, sizes: Mapping[Endpoint, int], least: int
    ) -> Iterator[tuple[Endpoint, str]]:
        """Who fails far more often than the others, by failures of this sort and graver ones."""
        config = self.config
        counts = {
            endpoint: sum(failure >= least for _, failure, _, _ in self._record(endpoint).samples)
            for endpoint in sizes
        }
        for endpoint, errors in counts.items():
            share = errors / sizes[endpoint]
            others = [counts[other] / sizes[other] for other in sizes if other is not endpoint]
            if errors >= MIN_ERRORS and share > max(
                MIN_ERROR_SHARE, config.outlier_factor * median(others)
            ):
                yield endpoint, f"{share:.0%} of its answers failed in {config.window_s:g} s"

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

    def _prolong(self, record: HealthRecord, now: float) -> None:
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

    def _record(self, endpoint: Endpoint) -> HealthRecord:
        record = self._records.get(endpoint.id)
        if record is None:
            record = self._records[endpoint.id] = HealthRecord()
        return record


def _work(outcome: Outcome) -> int:
    """Tokens that the endpoint computed for it, as far as it reported them."""
    return outcome.prompt_tokens - (outcome.cached_tokens or 0) + outcome.output_tokens


def _was_silent(record: HealthRecord, since: float, now: float) -> bool:
    """It has answered nobody for all of that time, and that is long."""
    was_fine = any(at > since and failure == FINE for at, failure, _, _ in record.samples)
    return now - since >= MIN_SILENCE_S and not was_fine
