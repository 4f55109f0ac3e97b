"""The spec of an LLMDeployment as typed, defaulted, immutable values."""

from octavo_operator.spec.adapters import AdapterSpec, LLMAdapter
from octavo_operator.spec.autoscaling import AutoscalingSpec, Behavior, Targets
from octavo_operator.spec.cache import CacheSpec
from octavo_operator.spec.deployment import API_VERSION, LLMDeployment
from octavo_operator.spec.engine import EngineSpec, EnvVar, ResourcesSpec
from octavo_operator.spec.model import ModelSpec
from octavo_operator.spec.traffic import Analysis, CanarySpec, CanaryStep, RolloutSpec, RoutingSpec

__all__ = [
    "API_VERSION",
    "AdapterSpec",
    "Analysis",
    "AutoscalingSpec",
    "Behavior",
    "CacheSpec",
    "CanarySpec",
    "CanaryStep",
    "EngineSpec",
    "EnvVar",
    "LLMAdapter",
    "LLMDeployment",
    "ModelSpec",
    "ResourcesSpec",
    "RolloutSpec",
    "RoutingSpec",
    "Targets",
]
