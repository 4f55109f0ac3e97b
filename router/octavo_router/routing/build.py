"""From settings to policies and a dispatcher: the one place that knows every policy by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.sides import SideTargets
from octavo_router.config.plugins import installed_policies
from octavo_router.config.settings import POLICIES, ProfileConfig, RouterConfig, RoutingConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.residency.underway import PyUnderway
from octavo_router.routing.adapters import LoraAffinity
from octavo_router.routing.dispatcher import Dispatcher, DispatchObserver, PrefixIndex
from octavo_router.routing.filters import FILTERS
from octavo_router.routing.hashing import ConsistentHash, SessionHash
from octavo_router.routing.health import EndpointHealth
from octavo_router.routing.locality import Locality
from octavo_router.routing.plain_policies import LeastLoad, PowerOfTwo, RandomChoice, RoundRobin
from octavo_router.routing.plugins import load_policy
from octavo_router.routing.policies import Policies, Policy
from octavo_router.routing.prefill_decode import PrefillDecode
from octavo_router.routing.prefix_load import PrefixLoad
from octavo_router.routing.profile import (
    Anyone,
    CandidatePicker,
    MaxScore,
    ScoringProfile,
    WeightedRandom,
)
from octavo_router.routing.scorers import SCORERS
from octavo_router.routing.shadow import Shadows

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from octavo_router.endpoints.registry import Registry
    from octavo_router.residency import api
    from octavo_router.residency.api import MakeUnderway


def build_dispatcher(
    config: RouterConfig,
    registry: Registry,
    index: PrefixIndex,
    *,
    clock: Callable[[], float],
    rng: Random,
    observer: DispatchObserver | None = None,
    make_underway: MakeUnderway = PyUnderway,
) -> Dispatcher:
    """A dispatcher as configured. On reload give it new `policies` and `shadows` instead."""
    underway = make_underway()
    return Dispatcher(
        registry,
        index,
        build_policies(config.routing, underway, rng),
        underway=underway,
        clock=clock,
        health=EndpointHealth(config.health),
        locality=Locality(registry, config.discovery.zone, config.routing.zone_cost_s),
        shadows=build_shadows(config.routing, underway, rng),
        observer=observer,
        sample_every=config.routing.sample_every,
        num_kept=config.routing.num_decisions,
    )


def reconfigure(dispatcher: Dispatcher, config: RouterConfig, rng: Random) -> None:
    """New settings for one that runs. Raises ConfigInvalid before anything has changed."""
    policies = build_policies(config.routing, dispatcher.underway, rng)
    shadows = build_shadows(config.routing, dispatcher.underway, rng)
    dispatcher.policies = policies
    dispatcher.shadows = shadows
    dispatcher.sample_every = config.routing.sample_every
    if dispatcher.health is not None:
        dispatcher.health.config = config.health
    if dispatcher.locality is not None:
        dispatcher.locality.configure(config.routing.zone_cost_s)


def build_policies(config: RoutingConfig, underway: api.Underway, rng: Random) -> Policies:
    """Pools of one policy do not share its state."""
    by_pool = {
        pool.name: build_policy(pool.policy or config.policy, config, underway, rng)
        for pool in config.pools
    }
    return Policies(build_policy(config.policy, config, underway, rng), by_pool)


def build_shadows(config: RoutingConfig, underway: api.Underway, rng: Random) -> Shadows | None:
    if not config.shadows:
        return None
    return Shadows([build_policy(name, config, underway, rng) for name in config.shadows])


def policy_names(config: RoutingConfig) -> list[str]:
    """What `build_policy` knows: built in, profiles of the configuration, and of packages."""
    return [*POLICIES, *(profile.name for profile in config.profiles), *installed_policies()]


def build_policy(name: str, config: RoutingConfig, underway: api.Underway, rng: Random) -> Policy:
    """A profile of the configuration, a built-in policy, or one of an installed package."""
    for profile in config.profiles:
        if profile.name == name:
            return _profile(profile, rng)
    prefix_load = PrefixLoad(
        underway, balance_factor=config.balance_factor, balance_slack=config.balance_slack
    )
    match name:
        case "prefix-load":
            return prefix_load
        case "least-load":
            return LeastLoad()
        case "round-robin":
            return RoundRobin()
        case "random":
            return RandomChoice(rng)
        case "power-of-two":
            return PowerOfTwo(rng)
        case "consistent-hash":
            return ConsistentHash(
                balance_factor=config.balance_factor, balance_slack=config.balance_slack
            )
        case "session":
            return SessionHash(
                prefix_load,
                balance_factor=config.balance_factor,
                balance_slack=config.balance_slack,
            )
        case "lora-affinity":
            return LoraAffinity(prefix_load)
        case "prefill-decode":
            return PrefillDecode(
                underway,
                min_tokens=config.prefill_min_tokens,
                balance_factor=config.balance_factor,
                balance_slack=config.balance_slack,
                targets=_targets(config),
            )
    if (point := installed_policies().get(name)) is not None:
        return load_policy(point, prefix_load)
    known = ", ".join(policy_names(config))
    raise ConfigInvalid("routing.policy", f"no policy {name!r}; there are {known}")


def _targets(config: RoutingConfig) -> SideTargets | None:
    if not config.prefill_first_token_s:
        return None
    return SideTargets(config.prefill_first_token_s, config.prefill_token_s)


def _profile(config: ProfileConfig, rng: Random) -> ScoringProfile:
    filters = [
        FILTERS[one.name](one.threshold) if one.threshold else FILTERS[one.name]()
        for one in config.filters
    ]
    scorers = [(SCORERS[one.name](), one.weight) for one in config.scorers]
    pickers: dict[str, Callable[[], CandidatePicker]] = {
        "max": MaxScore,
        "weighted-random": lambda: WeightedRandom(rng),
        "random": lambda: Anyone(rng),
    }
    return ScoringProfile(config.name, filters, scorers, pickers[config.picker]())
