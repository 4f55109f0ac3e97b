"""The HorizontalPodAutoscaler or KEDA ScaledObject, where the spec leaves scaling to one of them.

Both write the LLMDeployment's own scale, never a Deployment's: how replicas are spread over
revisions stays with the rollout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol import metric_names
from octavo_engine.protocol.kubernetes import ENGINE_COMPONENT, KIND
from octavo_operator.desired.metadata import child
from octavo_operator.errors import SpecInvalid
from octavo_operator.objects import names
from octavo_operator.settings import SCALED_OBJECT
from octavo_operator.spec import API_VERSION

if TYPE_CHECKING:
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import AutoscalingSpec, Behavior, LLMDeployment

_PERIOD_S = 60
_ONLY_AWAKE = 1_000_000  # a target that is never reached: above zero is all that counts


def autoscalers(deployment: LLMDeployment, settings: OperatorSettings) -> list[dict[str, Any]]:
    """One at most; none if KEDA is required but not installed."""
    scaling = deployment.autoscaling
    # While suspended it must not be scaled up.
    if scaling is None or scaling.provider == "octavo" or deployment.suspend:
        return []
    if scaling.provider == "hpa":
        return [_pod_autoscaler(deployment, scaling)]
    return [_scaled_object(deployment, scaling)] if SCALED_OBJECT in settings.capabilities else []


def check_autoscaler(deployment: LLMDeployment, settings: OperatorSettings) -> None:
    """Raises SpecInvalid if KEDA is required but not installed."""
    scaling = deployment.autoscaling
    if scaling is None or scaling.provider != "keda" or deployment.suspend:
        return
    if SCALED_OBJECT not in settings.capabilities:
        raise SpecInvalid(
            "spec.autoscaling.provider",
            "keda needs KEDA in the cluster; install it, or use provider: octavo",
            reason="Unsupported",
        )


def _pod_autoscaler(deployment: LLMDeployment, scaling: AutoscalingSpec) -> dict[str, Any]:
    name = names.autoscaler(deployment.name)
    spec = {
        "scaleTargetRef": _target(deployment),
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": metric},
                    "target": {"type": "AverageValue", "averageValue": _quantity(value)},
                },
            }
            for metric, value in _signals(scaling)
        ],
        "behavior": _behavior(scaling),
    }
    return {
        **child(deployment, "autoscaling/v2", "HorizontalPodAutoscaler", name),
        "spec": spec,
    }


def _scaled_object(deployment: LLMDeployment, scaling: AutoscalingSpec) -> dict[str, Any]:
    name = names.autoscaler(deployment.name)
    pods = [f'namespace="{deployment.namespace}"', f'octavo_dev_deployment="{deployment.name}"']
    if deployment.prefill is not None:  # prompts there are no load of those that answer
        pods.append(f'app_kubernetes_io_component="{ENGINE_COMPONENT}"')
    ours = f"{{{','.join(pods)}}}"
    triggers = [_trigger(scaling, f"sum({metric}{ours})", v) for metric, v in _signals(scaling)]
    spec: dict[str, Any] = {
        "scaleTargetRef": _target(deployment),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(scaling)}},
        "triggers": triggers,
    }
    if scaling.scale_to_zero_after_s is not None:
        spec["idleReplicaCount"] = 0
        spec["cooldownPeriod"] = math.ceil(scaling.scale_to_zero_after_s)
        # Running requests keep it awake, and those that routers hold wake it.
        held = f'sum({metric_names.ROUTER_REQUESTS_HELD}{{pool="{deployment.pool}"}})'
        running = f"sum({metric_names.NUM_REQUESTS_RUNNING}{ours})"
        triggers += [_trigger(scaling, query, _ONLY_AWAKE) for query in (held, running)]
    return {**child(deployment, "keda.sh/v1alpha1", "ScaledObject", name), "spec": spec}


def _signals(scaling: AutoscalingSpec) -> list[tuple[str, float]]:
    """Metrics of the engines, with what one replica should have of each."""
    targets = scaling.targets
    signals = (
        (metric_names.NUM_QUEUED_TOKENS, targets.queued_tokens),
        (metric_names.KV_CACHE_USAGE_PERC, targets.kv_usage),
        # Not the HTTP ones: routers and Prometheus always have a connection there.
        (metric_names.NUM_REQUESTS_RUNNING, targets.in_flight),
        (metric_names.NUM_REQUESTS_WAITING, targets.in_flight),
    )
    return [(metric, value) for metric, value in signals if value is not None]


def _trigger(scaling: AutoscalingSpec, query: str, threshold: float) -> dict[str, Any]:
    metadata = {
        "serverAddress": scaling.prometheus_url,
        "query": query,
        "threshold": f"{threshold:.15g}",
    }
    return {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}


def _behavior(scaling: AutoscalingSpec) -> dict[str, Any]:
    return {"scaleUp": _direction(scaling.up), "scaleDown": _direction(scaling.down)}


def _direction(behavior: Behavior) -> dict[str, Any]:
    is_share = isinstance(behavior.step, str)
    value = int(str(behavior.step).removesuffix("%"))
    kind = "Percent" if is_share else "Pods"
    return {
        "stabilizationWindowSeconds": math.ceil(behavior.window_s),
        "selectPolicy": "Max",
        "policies": [{"type": kind, "value": value, "periodSeconds": _PERIOD_S}],
    }


def _target(deployment: LLMDeployment) -> dict[str, str]:
    return {"apiVersion": API_VERSION, "kind": KIND, "name": deployment.name}


def _quantity(value: float) -> str:
    """As the API server would write it, so that what is stored equals what was applied."""
    if not float(value).is_integer():
        return f"{round(value * 1000)}m"
    whole, suffix = int(value), ""
    for larger in "kMG":
        if whole % 1000:
            break
        whole, suffix = whole // 1000, larger
    return f"{whole}{suffix}"
