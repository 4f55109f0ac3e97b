"""spec.autoscaling: between which bounds replicas follow the demand, by which signals, by whom.

spec.prefill.autoscaling is the part of it that prefill pods have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from octavo_operator.spec.fields import FieldReader

Provider = Literal["octavo", "hpa", "keda"]


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets per replica; the signal that proposes the most replicas wins. None: ignored."""

    queued_tokens: int | None = None  # prompt tokens that wait, per replica
    kv_usage: float | None = None  # share of the KV cache in use
    in_flight: int | None = None  # requests, per replica
    ttft_s: float | None = None  # time to first token, 95th percentile


DEFAULT_TARGETS = Targets(queued_tokens=8192, kv_usage=0.85)
DEFAULT_PREFILL_TARGETS = Targets(queued_tokens=8192)


@dataclass(frozen=True, slots=True)
class Behavior:
    """One direction: how long a proposal must last, and how many pods a minute it may change."""

    window_s: float
    step: str | int  # pods, or a share of those there are


UP = Behavior(0.0, "100%")
DOWN = Behavior(300.0, "25%")


@dataclass(frozen=True, slots=True)
class AutoscalingSpec:
    """Who writes the number of replicas. While it is set, spec.replicas is only the start."""

    max_replicas: int
    min_replicas: int = 1
    provider: Provider = "octavo"
    targets: Targets = DEFAULT_TARGETS
    up: Behavior = UP
    down: Behavior = DOWN
    scale_to_zero_after_s: float | None = None  # None: never
    prometheus_url: str = ""  # where KEDA queries

    def clamp(self, replicas: int) -> int:
        return max(self.min_replicas, min(self.max_replicas, replicas))


def read_autoscaling(fields: FieldReader) -> AutoscalingSpec:
    most = fields.maybe_integer("maxReplicas", least=1, most=1000)
    if most is None:
        raise fields.fail("maxReplicas", "is required")
    behavior = fields.section("behavior")
    to_zero = fields.optional("scaleToZero")
    autoscaling = AutoscalingSpec(
        max_replicas=most,
        min_replicas=fields.integer("minReplicas", 1, least=1, most=1000),
        provider=fields.choice("provider", get_args(Provider), "octavo"),
        targets=_read_targets(fields.optional("targets")),
        up=_read_behavior(behavior.section("scaleUp"), UP),
        down=_read_behavior(behavior.section("scaleDown"), DOWN),
        scale_to_zero_after_s=None if to_zero is None else _read_after(to_zero),
        prometheus_url=fields.text(
            "prometheusURL", longest=512, pattern=r"(https?://\S+)?", form="http://HOST:PORT"
        ),
    )
    behavior.end()
    fields.end()
    _check_bounds(fields, autoscaling)
    if autoscaling.provider == "hpa" and to_zero is not None:
        raise fields.fail("scaleToZero", "needs provider: octavo or keda; an HPA keeps one pod")
    if autoscaling.provider == "keda" and not autoscaling.prometheus_url:
        raise fields.fail("prometheusURL", "is required for provider: keda, which reads it")
    if autoscaling.provider != "keda" and autoscaling.prometheus_url:
        raise fields.fail("prometheusURL", "is read by provider: keda only; leave it out")
    if autoscaling.provider != "octavo" and autoscaling.targets.ttft_s is not None:
        raise fields.fail("targets.ttft", "needs provider: octavo; a percentile is no pod metric")
    return autoscaling


def read_prefill_autoscaling(fields: FieldReader) -> AutoscalingSpec:
    """spec.prefill.autoscaling: always by the operator itself, by what prefill pods have to do.
    They never sleep by themselves: they do with the pods that answer."""
    most = fields.maybe_integer("maxReplicas", least=1, most=1000)
    if most is None:
        raise fields.fail("maxReplicas", "is required")
    targets, behavior = fields.section("targets"), fields.section("behavior")
    autoscaling = AutoscalingSpec(
        max_replicas=most,
        min_replicas=fields.integer("minReplicas", 1, least=1, most=1000),
        targets=_read_totals(targets),
        up=_read_behavior(behavior.section("scaleUp"), UP),
        down=_read_behavior(behavior.section("scaleDown"), DOWN),
    )
    targets.end()
    behavior.end()
    fields.end()
    _check_bounds(fields, autoscaling)
    return autoscaling


def _read_totals(fields: FieldReader) -> Targets:
    targets = Targets(
        queued_tokens=fields.maybe_integer("queuedTokens", least=1, most=1_000_000_000),
        in_flight=fields.maybe_integer("inFlight", least=1, most=1_000_000),
    )
    return DEFAULT_PREFILL_TARGETS if targets == Targets() else targets


def _check_bounds(fields: FieldReader, autoscaling: AutoscalingSpec) -> None:
    least, most = autoscaling.min_replicas, autoscaling.max_replicas
    if least > most:
        raise fields.fail("minReplicas", f"must be at most maxReplicas ({most}); got {least}")


def _read_targets(fields: FieldReader | None) -> Targets:
    if fields is None:
        return DEFAULT_TARGETS
    targets = Targets(
        queued_tokens=fields.maybe_integer("queuedTokens", least=1, most=1_000_000_000),
        kv_usage=fields.maybe_number("kvUsage", least=0.05, most=1),
        in_flight=fields.maybe_integer("inFlight", least=1, most=1_000_000),
        ttft_s=fields.maybe_duration("ttft", least_s=0.01, most_s=600),
    )
    fields.end()
    return DEFAULT_TARGETS if targets == Targets() else targets


def _read_behavior(fields: FieldReader, default: Behavior) -> Behavior:
    behavior = Behavior(
        window_s=fields.duration("window", default.window_s, least_s=0, most_s=3600),
        step=fields.count("step", default.step),
    )
    if behavior.step in (0, "0%"):
        raise fields.fail("step", "must be above 0; to stand still set minReplicas = maxReplicas")
    fields.end()
    return behavior


def _read_after(fields: FieldReader) -> float:
    after_s = fields.duration("after", 600, least_s=10, most_s=86400)
    fields.end()
    return after_s
