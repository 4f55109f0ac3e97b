"""spec.routing and spec.rollout: who gets a request, and how one revision follows another."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from octavo_operator.errors import SpecInvalid

if TYPE_CHECKING:
    from octavo_operator.spec.fields import FieldReader

Policy = Literal[
    "prefix-load", "least-load", "power-of-two", "round-robin", "consistent-hash", "session"
]
Strategy = Literal["Rolling", "Recreate", "Canary"]

MAX_DRAIN_S = 1800


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """What routers do with requests for this model."""

    policy: Policy = "prefix-load"
    hold_s: float = 300.0  # how long a request waits while no engine is there


@dataclass(frozen=True, slots=True)
class CanaryStep:
    """A share of the requests, and how long it is watched."""

    weight: int  # percent for the new revision
    pause_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Analysis:
    """When a new revision or adapter is worse than the stable one. Ratios are new / stable."""

    max_error_rate: float = 0.02
    max_ttft_p95_ratio: float = 1.5
    max_itl_ratio: float = 1.5
    min_requests: int = 50  # answered by the new one in a step before it is judged


DEFAULT_STEPS = (CanaryStep(5), CanaryStep(25), CanaryStep(50))


@dataclass(frozen=True, slots=True)
class CanarySpec:
    steps: tuple[CanaryStep, ...] = DEFAULT_STEPS
    analysis: Analysis = field(default_factory=Analysis)


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How a changed spec reaches the pods. Counts are pods, or a share of them such as 25%."""

    strategy: Strategy = "Rolling"
    max_surge: str | int = 1
    max_unavailable: str | int = 0
    drain_timeout_s: float = 120.0
    progress_deadline_s: float = 900.0
    canary: CanarySpec = field(
        default_factory=CanarySpec
    )  # means something for strategy Canary only


def read_routing(fields: FieldReader) -> RoutingSpec:
    routing = RoutingSpec(
        policy=fields.choice("policy", get_args(Policy), "prefix-load"),
        hold_s=fields.duration("holdTimeout", 300, least_s=0, most_s=3600),
    )
    fields.end()
    return routing


def read_rollout(fields: FieldReader) -> RolloutSpec:
    canary = fields.optional("canary")
    rollout = RolloutSpec(
        strategy=fields.choice("strategy", get_args(Strategy), "Rolling"),
        max_surge=fields.count("maxSurge", 1),
        max_unavailable=fields.count("maxUnavailable", 0),
        drain_timeout_s=fields.duration("drainTimeout", 120, least_s=0, most_s=MAX_DRAIN_S),
        progress_deadline_s=fields.duration("progressDeadline", 900, least_s=60, most_s=86400),
        canary=CanarySpec() if canary is None else _read_canary(canary),
    )
    if (
        rollout.strategy != "Recreate"
        and rollout.max_surge in (0, "0%")
        and rollout.max_unavailable in (0, "0%")
    ):
        raise fields.fail(
            "maxSurge", "and maxUnavailable must not both be 0: nothing could ever be replaced"
        )
    if canary is not None and rollout.strategy != "Canary":
        raise fields.fail("canary", "needs strategy: Canary; set it, or leave canary out")
    fields.end()
    return rollout


def read_analysis(fields: FieldReader) -> Analysis:
    analysis = Analysis(
        max_error_rate=fields.number("maxErrorRate", 0.02, least=0, most=1),
        max_ttft_p95_ratio=fields.number("maxTTFTp95Ratio", 1.5, least=1, most=100),
        max_itl_ratio=fields.number("maxITLRatio", 1.5, least=1, most=100),
        min_requests=fields.integer("minRequests", 50, least=1, most=1_000_000),
    )
    fields.end()
    return analysis


def _read_canary(fields: FieldReader) -> CanarySpec:
    canary = CanarySpec(
        steps=fields.objects("steps", _read_step, most=16) or DEFAULT_STEPS,
        analysis=read_analysis(fields.section("analysis")),
    )
    weights = [step.weight for step in canary.steps]
    if any(later <= earlier for earlier, later in itertools.pairwise(weights)):
        raise SpecInvalid(
            fields.at("steps"), f"must have rising weights, such as 5, 25, 50; got {weights}"
        )
    fields.end()
    return canary


def _read_step(fields: FieldReader) -> CanaryStep:
    weight = fields.maybe_integer("weight", least=1, most=99)
    if weight is None:
        raise fields.fail("weight", "is required: percent of the requests, from 1 to 99")
    step = CanaryStep(weight, fields.duration("pause", 60, least_s=0, most_s=86400))
    fields.end()
    return step
