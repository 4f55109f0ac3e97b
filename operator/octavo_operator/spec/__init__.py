"""What the user asked for: an LLMDeployment as typed, defaulted, immutable values."""

from octavo_operator.spec.autoscaling import Autoscaling, Behavior, Targets
from octavo_operator.spec.cache import Cache
from octavo_operator.spec.deployment import API_VERSION, LLMDeployment
from octavo_operator.spec.engine import Engine, EnvVar, Resources
from octavo_operator.spec.model import Adapter, Model
from octavo_operator.spec.traffic import Analysis, Canary, CanaryStep, Rollout, Routing

__all__ = [
    "API_VERSION",
    "Adapter",
    "Analysis",
    "Autoscaling",
    "Behavior",
    "Cache",
    "Canary",
    "CanaryStep",
    "Engine",
    "EnvVar",
    "LLMDeployment",
    "Model",
    "Resources",
    "Rollout",
    "Routing",
    "Targets",
]
