"""What the engine counts and how it is exposed: one registry, one event loop, no locks.

Counters that the core keeps (EngineStats) are read at a scrape, so a step pays nothing
for them; latencies are observed by the API server, where the bytes leave.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from octavo_engine.grammar.buckets import SECONDS_BUCKETS
from octavo_engine.protocol import metric_names as names
from octavo_engine.state.outputs import EngineStats, TierStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Fine where a CPU or GPU token lies (0.1 ms to 100 ms), coarse where only "too long" matters.
LATENCY_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0,
    7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
N_BUCKETS = (1, 2, 5, 10, 20, 50, 100)

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # as vLLM has them; ours: level 1
ENGINE_STATES = ("loading", "ready", "stalled", "draining", "dead")

# EngineStats counters: (metric, what it says, field)
COUNTERS = (
    (names.STEPS, "Steps the engine core has made.", "steps"),
    (names.PROMPT_TOKENS, "Prompt tokens processed, cached ones included.", "prompt_tokens"),
    (names.PROMPT_TOKENS_CACHED, "Of those, not computed again.", "prompt_tokens_cached"),
    (names.GENERATION_TOKENS, "Tokens generated.", "generation_tokens"),
    (names.PREFIX_CACHE_QUERIES, "Prompt tokens looked up in the cache.", "prefix_queries"),
    (names.PREFIX_CACHE_HITS, "Prompt tokens found in the cache.", "prefix_hits"),
    (names.NUM_PREEMPTIONS, "Sequences set back for lack of KV blocks.", "preemptions"),
    (
        names.KV_RETENTION_REFUSED_BLOCKS,
        "KV blocks that requests wanted to retain beyond a limit.",
        "retention_refused_blocks",
    ),
    (
        names.KV_RETENTION_GIVEN_UP_BLOCKS,
        "Retained KV blocks that were given up before their time was over.",
        "retention_given_up_blocks",
    ),
    (names.CORRUPTED_REQUESTS, "Requests failed by logits that were NaN.", "nan_failures"),
    (names.GRAMMAR_CACHE_HITS, "Requests whose grammar was compiled before.", "grammar_cache_hits"),
    (names.GRAMMAR_FAILURES, "Grammars that did not compile, or not in time.", "grammar_failures"),
    (names.LORA_LOAD_FAILURES, "LoRA adapters that could not be read.", "adapter_load_failures"),
    (names.MM_CACHE_QUERIES, "Pictures and windows of audio needed.", "mm_cache_queries"),
    (names.MM_CACHE_HITS, "Of those, encoded before.", "mm_cache_hits"),
    (names.MM_ENCODE_SECONDS, "Time spent on encoding them.", "mm_encode_seconds"),
    (names.SPEC_DECODE_NUM_DRAFTS, "Times that tokens were guessed ahead.", "spec_drafts"),
    (names.SPEC_DECODE_NUM_DRAFT_TOKENS, "Tokens guessed ahead.", "spec_draft_tokens"),
    (names.SPEC_DECODE_NUM_ACCEPTED_TOKENS, "Of those, right.", "spec_accepted_tokens"),
)


class BucketHistogram:
    """Counts by bucket. Hot path: one bisection and two additions per observation."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def load(self, counts: Sequence[int], total: float) -> None:
        """Take the place of what was observed; where another part counts."""
        self._counts, self._sum = list(counts), total

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), as the text format wants them."""
        total, rows = 0, []
        for bound, count in zip(
            (*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True
        ):
            total += count
            rows.append((bound, float(total)))
        return rows


class MonotonicStats:
    """EngineStats counters that keep growing when the core behind them starts again from zero."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._total: dict[str, float] = {}
        self.num_positions = 0  # at which guesses were right
        self.num_expert_ranks = 0  # that have experts of their own
        self.experts: dict[tuple[str, str], str] = {}  # by layer and expert: the name of its count

    def update(self, stats: EngineStats) -> None:
        for _, _, name in COUNTERS:
            self._update(name, getattr(stats, name))
        per_pos = stats.spec_accepted_per_pos
        self.num_positions = max(self.num_positions, len(per_pos))
        for place in range(self.num_positions):
            value = per_pos[place] if place < len(per_pos) else 0
            self._update(f"spec_accepted_{place}", value)
        self.num_expert_ranks = max(self.num_expert_ranks, len(stats.expert_rank_tokens))
        for rank, value in enumerate(stats.expert_rank_tokens):
            self._update(f"expert_rank_{rank}", value)
        for layer, counts in enumerate(stats.expert_layer_tokens):
            for expert, value in enumerate(counts):
                self.experts[str(layer), str(expert)] = f"expert_{layer}_{expert}"
                self._update(f"expert_{layer}_{expert}", value)

    def _update(self, name: str, value: float) -> None:
        last = self._last.get(name, 0)
        grown = value - last if value >= last else value
        self._total[name] = self._total.get(name, 0) + grown
        self._last[name] = value

    def __getitem__(self, name: str) -> float:
        return self._total.get(name, 0)


@dataclass(slots=True)
class MetricsSnapshot:
    """What is true at the moment of a scrape."""

    stats: EngineStats = field(default_factory=EngineStats)
    state: str = "loading"
    load_s: float = 0.0
    cpu_s: float = 0.0  # of all processes of the engine
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    is_sleeping: bool = False
    max_loras: int = 0  # adapters that can take part in a step; 0: there are none
    mm_pending: int = 0  # pictures that are decoded, or wait for it
    mm_preprocess_s: float = 0.0
    num_clock_jumps: int = 0


class MetricFamilies:
    """Families whose samples have the same labels: those of one core."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.totals = MonotonicStats()

    def of_core(
        self, snapshot: MetricsSnapshot, stats: EngineStats, now: float
    ) -> Iterator[Metric]:
        """What one core reports."""
        self.totals.update(stats)
        yield from self.gauges(snapshot, stats, now)
        yield from self.counters(stats)
        if stats.tiers is not None:
            yield from self.tiers(stats.tiers)

    def gauges(self, snapshot: MetricsSnapshot, stats: EngineStats, now: float) -> Iterator[Metric]:
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        age = max(0.0, now - stats.last_step_at) if stats.last_step_at else 0.0
        yield self.gauge(names.NUM_REQUESTS_RUNNING, "Sequences being computed.", stats.num_running)
        yield self.gauge(names.NUM_REQUESTS_WAITING, "Sequences that wait.", stats.num_waiting)
        yield self.gauge(
            names.NUM_QUEUED_TOKENS, "Prompt tokens not yet computed.", stats.queued_tokens
        )
        yield self.gauge(names.KV_CACHE_USAGE_PERC, "Share of KV blocks in use; 1 is full.", used)
        yield self.gauge(
            names.KV_RETAINED_BLOCKS,
            "KV blocks that requests retain after their end.",
            stats.kv_blocks_retained,
        )
        yield self.gauge(names.STEP_SECONDS, "Duration of the last step.", stats.step_ms / 1e3)
        yield self.gauge(names.LAST_STEP_AGE_SECONDS, "Time since the last step ended.", age)
        yield self.waiting(stats)
        yield self.lora(snapshot.max_loras, stats)
        yield self.gauge(
            names.LORA_ADAPTERS_HELD, "LoRA adapters in memory.", stats.num_adapters_held
        )
        yield self.cache_config(snapshot, stats)

    def counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, attribute in COUNTERS:
            yield self.counter(name, text, {(): self.totals[attribute]})
        cached = self.totals["prompt_tokens_cached"]
        yield self.counter(
            names.PROMPT_TOKENS_BY_SOURCE,
            "Prompt tokens by where their KV came from.",
            {
                ("local_compute",): self.totals["prompt_tokens"] - cached,
                ("local_cache_hit",): cached,
            },
            "source",
        )
        yield self.counter(
            names.SPEC_DECODE_NUM_ACCEPTED_TOKENS_PER_POS,
            "Tokens guessed right, by their place behind the last one known.",
            {
                (str(place),): self.totals[f"spec_accepted_{place}"]
                for place in range(self.totals.num_positions)
            },
            "position",
        )
        if self.totals.num_expert_ranks:
            yield self.counter(
                names.EXPERT_RANK_TOKENS,
                "Rows that the experts of each rank computed, of all layers.",
                {
                    (str(rank),): self.totals[f"expert_rank_{rank}"]
                    for rank in range(self.totals.num_expert_ranks)
                },
                "rank",
            )
        if self.totals.experts:
            yield self.counter(
                names.EXPERT_TOKENS,
                "Rows for which each expert of each layer was chosen.",
                {labels: self.totals[name] for labels, name in self.totals.experts.items()},
                "layer",
                "expert",
            )
        yield self.histogram(
            names.GRAMMAR_COMPILE_SECONDS,
            "Compiling one grammar.",
            _core_times(stats.grammar_compile_counts, stats.grammar_compile_seconds),
        )
        yield self.histogram(
            names.LORA_LOAD_SECONDS,
            "Reading one LoRA adapter.",
            _core_times(stats.adapter_load_counts, stats.adapter_load_seconds),
        )

    def tiers(self, tiers: TierStats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            names.KV_TIER_BLOCKS, "KV blocks beside the pool.", labels=[*self._labels, "tier"]
        )
        counts = (tiers.host_blocks, tiers.disk_blocks, tiers.shared_blocks)
        for tier, count in zip(("host", "disk", "shared"), counts, strict=True):
            blocks.add_metric([*self._labels.values(), tier], count)
        yield blocks
        counters: list[tuple[str, str, dict[tuple[str, ...], float], str]] = [
            (
                names.KV_OFFLOAD_BYTES,
                "Bytes of KV blocks copied out of the pool and into it.",
                {
                    ("GPU_to_CPU",): tiers.saved_bytes,
                    ("CPU_to_GPU",): tiers.loaded_bytes,
                    ("GPU_to_peer",): tiers.served_bytes,
                },
                "transfer_type",
            ),
            (
                names.KV_OFFLOAD_TIME,
                "Seconds of copies into the pool and of reads from disk and other engines.",
                {
                    ("CPU_to_GPU",): tiers.host_load_seconds,
                    ("disk_to_CPU",): tiers.disk_load_seconds,
                    ("shared_to_CPU",): tiers.shared_load_seconds,
                    ("peer_to_CPU",): tiers.peer_load_seconds,
                },
                "transfer_type",
            ),
            (
                names.KV_TIER_HIT_BLOCKS,
                "KV blocks brought into the pool, by where they were.",
                {
                    ("host",): tiers.host_hit_blocks,
                    ("disk",): tiers.disk_hit_blocks,
                    ("shared",): tiers.shared_hit_blocks,
                    ("peer",): tiers.peer_hit_blocks,
                },
                "tier",
            ),
            (
                names.KV_TIER_FAILURES,
                "KV blocks not written, not read, loads slower than computing, and other engines "
                "that failed.",
                {
                    ("unsaved",): tiers.unsaved_blocks,
                    ("failed_read",): tiers.failed_reads,
                    ("refused",): tiers.refused,
                    ("peer_failed",): tiers.peer_failures,
                },
                "reason",
            ),
        ]
        for name, text, values, label in counters:
            yield self.counter(name, text, values, label)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def one_hot(self, name: str, what: str, label: str, values: Sequence[str], now: str) -> Metric:
        family = GaugeMetricFamily(name, f"1 for {what}.", labels=[*self._labels, label])
        for known in values:
            family.add_metric([*self._labels.values(), known], float(known == now))
        return family

    def machine(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        yield self.counter(
            names.CPU_SECONDS, "Processor time of all processes.", {(): snapshot.cpu_s}
        )
        yield self.counter(
            names.CLOCK_JUMPS, "Times that the wall clock was set.", {(): snapshot.num_clock_jumps}
        )

    def pictures(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        yield self.gauge(
            names.MM_PREPROCESS_PENDING,
            "Pictures that are decoded, or wait for it.",
            snapshot.mm_pending,
        )
        yield self.counter(
            names.MM_PREPROCESS_SECONDS,
            "Time that pictures took to be decoded, waiting included.",
            {(): snapshot.mm_preprocess_s},
        )

    def waiting(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            names.NUM_REQUESTS_WAITING_BY_REASON,
            "Sequences that wait, for room or for their grammar or adapter.",
            labels=[*self._labels, "reason"],
        )
        deferred = stats.num_waiting_grammar + stats.num_waiting_adapter
        for reason, count in (("capacity", stats.num_waiting - deferred), ("deferred", deferred)):
            family.add_metric([*self._labels.values(), reason], count)
        return family

    def lora(self, max_loras: int, stats: EngineStats) -> Metric:
        """vLLM's: the facts are in the labels, the value is the time."""
        facts = {
            "max_lora": str(max_loras),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        family = GaugeMetricFamily(
            names.LORA_REQUESTS_INFO, "LoRA adapters in use.", labels=[*self._labels, *facts]
        )
        at = time.time() if max_loras else 0.0
        family.add_metric([*self._labels.values(), *facts.values()], at)
        return family

    def cache_config(self, snapshot: MetricsSnapshot, stats: EngineStats) -> Metric:
        name = names.CACHE_CONFIG_INFO.removesuffix("_info")
        family = InfoMetricFamily(name, "Geometry of the KV cache.", labels=list(self._labels))
        blocks = str(stats.kv_blocks_total)
        family.add_metric(
            list(self._labels.values()),
            {
                "block_size": str(snapshot.block_size),
                "cache_dtype": snapshot.kv_cache_dtype,
                "num_gpu_blocks": blocks,
            },
        )
        return family

    def counter(
        self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, *labels])
        for label_values, value in values.items():
            family.add_metric([*self._labels.values(), *label_values], value)
        return family

    def histogram(self, name: str, text: str, histogram: BucketHistogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
        return family


class EngineMetrics:
    """All metrics of one engine. `snapshot` reads the core's figures at each scrape."""

    def __init__(
        self,
        model_name: str,
        snapshot: Callable[[], MetricsSnapshot],
        *,
        vllm_names: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time_to_first_token = BucketHistogram(LATENCY_BUCKETS)
        self.inter_token_latency = BucketHistogram(LATENCY_BUCKETS)
        self.time_per_output_token = BucketHistogram(LATENCY_BUCKETS)
        self.e2e_latency = BucketHistogram(REQUEST_BUCKETS)
        self.queue_time = BucketHistogram(REQUEST_BUCKETS)
        self.prefill_time = BucketHistogram(REQUEST_BUCKETS)
        self.decode_time = BucketHistogram(REQUEST_BUCKETS)
        self.inference_time = BucketHistogram(REQUEST_BUCKETS)
        self.prompt_tokens = BucketHistogram(TOKEN_BUCKETS)
        self.prefill_computed_tokens = BucketHistogram(TOKEN_BUCKETS)
        self.max_generation_tokens = BucketHistogram(TOKEN_BUCKETS)
        self.iteration_tokens = BucketHistogram(ITERATION_BUCKETS)
        self.generation_tokens = BucketHistogram(TOKEN_BUCKETS)
        self.params_n = BucketHistogram(N_BUCKETS)
        self.params_max_tokens = BucketHistogram(TOKEN_BUCKETS)
        self.finished: dict[str, int] = dict.fromkeys(
            ("stop", "length", "abort", "error", "deadline"), 0
        )
        self.http_requests: dict[tuple[str, int], int] = {}
        self.http_in_flight = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._labels = {"model_name": model_name}
        self._own = self._families_of(0)
        self._cores = [self._own]
        self._snapshot = snapshot
        self._steps = 0  # seen by `note_step`
        self._vllm_names = vllm_names
        self._now = now

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type: Prometheus text, or OpenMetrics where requested."""
        encoder, content_type = choose_encoder(accept)
        if isinstance(encoder, partial) and encoder.keywords.get("escaping") == "underscores":
            # No name here needs it, and the library would write a sample's `vllm:` as `vllm_`.
            encoder = partial(encoder, escaping="allow-utf-8")
        return encoder(self.registry), content_type

    def count_http(self, route: str, status: int) -> None:
        key = (route, status)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1

    def note_step(self, stats: EngineStats) -> None:
        """Hot path: once per message of the core, which may have made no step."""
        if stats.steps > self._steps:
            self.iteration_tokens.observe(stats.step_tokens)
        self._steps = stats.steps

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        families = list(self._families())
        yield from families
        if self._vllm_names:
            yield from map(_under_vllm_name, families)
            yield from (_under_old_name(f) for f in families if f.name == names.KV_CACHE_USAGE_PERC)

    def _families_of(self, rank: int) -> MetricFamilies:
        return MetricFamilies({**self._labels, "engine": str(rank)})

    def _core_families(self, snapshot: MetricsSnapshot) -> list[Metric]:
        """Those of several cores have a sample of each, with its rank as the label `engine`."""
        cores = snapshot.stats.cores or [snapshot.stats]
        joint: dict[str, Metric] = {}
        for rank, stats in enumerate(cores):
            if rank == len(self._cores):
                self._cores.append(self._families_of(rank))
            for family in self._cores[rank].of_core(snapshot, stats, self._now()):
                if family.name in joint:
                    joint[family.name].samples += family.samples
                else:
                    joint[family.name] = family
        return list(joint.values())

    def _families(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        yield from self._core_families(snapshot)
        yield self._own.gauge(
            names.MODEL_LOAD_SECONDS, "Time the model took to load.", snapshot.load_s
        )
        yield self._own.gauge(
            names.NUM_HTTP_REQUESTS_IN_FLIGHT, "HTTP requests being answered.", self.http_in_flight
        )
        own = self._own
        yield from own.machine(snapshot)
        yield from own.pictures(snapshot)
        yield own.one_hot(names.ENGINE_STATE, "the state the engine is in", "state",
                          ENGINE_STATES, snapshot.state)  # fmt: skip
        yield own.one_hot(names.ENGINE_SLEEP_STATE, "whether the engine sleeps", "sleep_state",
                          SLEEP_STATES, SLEEP_STATES[snapshot.is_sleeping])  # fmt: skip
        yield self._own.counter(
            names.REQUEST_SUCCESS,
            "Sequences finished, by reason.",
            {(reason,): count for reason, count in self.finished.items()},
            "finished_reason",
        )
        yield self._own.counter(
            names.HTTP_REQUESTS,
            "HTTP requests answered, by route and status.",
            {(route, str(status)): n for (route, status), n in self.http_requests.items()},
            "route",
            "status",
        )
        for name, text, histogram in (
            (
                names.TIME_TO_FIRST_TOKEN_SECONDS,
                "Arrival to first token.",
                self.time_to_first_token,
            ),
            (names.INTER_TOKEN_LATENCY_SECONDS, "Between outputs.", self.inter_token_latency),
            (
                names.REQUEST_TIME_PER_OUTPUT_TOKEN_SECONDS,
                "Mean time of a token after the first.",
                self.time_per_output_token,
            ),
            (names.E2E_REQUEST_LATENCY_SECONDS, "Arrival to last token.", self.e2e_latency),
            (names.REQUEST_QUEUE_TIME_SECONDS, "Arrival to first step.", self.queue_time),
            (names.REQUEST_PREFILL_TIME_SECONDS, "First step to first token.", self.prefill_time),
            (names.REQUEST_DECODE_TIME_SECONDS, "First to last token.", self.decode_time),
            (
                names.REQUEST_INFERENCE_TIME_SECONDS,
                "First step to last token.",
                self.inference_time,
            ),
            (
                names.REQUEST_PREFILL_COMPUTED_TOKENS,
                "Prompt tokens of a request that were not in the cache.",
                self.prefill_computed_tokens,
            ),
            (
                names.REQUEST_MAX_GENERATION_TOKENS,
                "Tokens of a request's longest answer.",
                self.max_generation_tokens,
            ),
            (names.ITERATION_TOKENS, "Tokens computed in a step.", self.iteration_tokens),
            (names.REQUEST_PROMPT_TOKENS, "Prompt tokens of a request.", self.prompt_tokens),
            (names.REQUEST_GENERATION_TOKENS, "Tokens of a sequence.", self.generation_tokens),
            (names.REQUEST_PARAMS_N, "n of a request.", self.params_n),
            (names.REQUEST_PARAMS_MAX_TOKENS, "max_tokens of a request.", self.params_max_tokens),
        ):
            yield self._own.histogram(name, text, histogram)


def _core_times(counts: list[int], seconds: float) -> BucketHistogram:
    """The core counts these itself; they begin at zero again with it."""
    histogram = BucketHistogram(SECONDS_BUCKETS)
    if counts:
        histogram.load(counts, seconds)
    return histogram


def _under_vllm_name(family: Metric) -> Metric:
    alias = Metric(names.vllm_name(family.name), family.documentation, family.type)
    alias.samples = [
        sample._replace(name=names.vllm_name(sample.name)) for sample in family.samples
    ]
    return alias


def _under_old_name(family: Metric) -> Metric:
    """What vLLM called the use of the KV cache before there were caches beside GPUs."""
    old = names.vllm_name(family.name).replace("kv_cache", "gpu_cache")
    alias = Metric(old, family.documentation, family.type)
    alias.samples = [sample._replace(name=old) for sample in family.samples]
    return alias
