"""A revision's name: a hash of the user's spec, without anything that the operator adds.

Probes, security contexts, resources of the fetch step and the like are this version's. Another
version has others, and pods that serve are no worse for the ones they have: they keep them until
their next rollout (decide/adopt.py). Where pods must be replaced all the same, TEMPLATE_EPOCH is
raised.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from octavo_operator.desired.weights import cache_source, is_fetched
from octavo_operator.errors import SpecInvalid
from octavo_operator.objects import names
from octavo_operator.settings import ENGINE_USER

if TYPE_CHECKING:
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment

# NOTE: raising it replaces every engine of everybody who upgrades. For a fault of the template that
# harms what already runs, and nothing less.
TEMPLATE_EPOCH = 1
_CHARS = 10


def image_of(deployment: LLMDeployment, settings: OperatorSettings) -> str:
    """Raises SpecInvalid where neither the spec nor the operator's settings name one."""
    if deployment.engine.image:
        return deployment.engine.image
    is_gpu = deployment.device in ("cuda", "torch")
    image, flag = (
        (settings.images.cuda, "--cuda-image") if is_gpu else (settings.images.cpu, "--cpu-image")
    )
    if not image:
        raise SpecInvalid(
            "spec.engine.image",
            f"is required: this operator was started without {flag}; name the image here, or start "
            f"the operator with {flag} (images.registry of the chart)",
        )
    return image


def revision_of(deployment: LLMDeployment, settings: OperatorSettings) -> str:
    content = json.dumps(
        [TEMPLATE_EPOCH, requested(deployment), _settled(deployment, settings)], sort_keys=True
    )
    return names.short_hash(content.encode(), _CHARS)


def requested(deployment: LLMDeployment) -> dict[str, Any]:
    """The part of the spec that pods notice. Only what differs from its default: a field that a
    later version adds must not rename the revisions there are."""
    engine = _changed(deployment.engine)
    for settled in ("device", "image"):
        engine.pop(settled, None)
    room = deployment.room_for_adapters
    wanted = {
        "model": _changed(deployment.model),
        "engine": engine,
        "resources": _changed(deployment.resources),
        "cache": cache_source(deployment) if is_fetched(deployment) else {},
        "prefill": _prefill(deployment),
        "group": {} if deployment.group is None else _changed(deployment.group),
        # Room for adapters, not which ones: those are loaded and unloaded while pods run.
        "lora": {} if room is None else {"enabled": True, **_changed(room)},
        "rollout": {
            name: value
            for name, value in _changed(deployment.rollout).items()
            if name == "drain_timeout_s"
        },
        "podTemplate": deployment.pod_template,
    }
    return {name: value for name, value in wanted.items() if value}


def _prefill(deployment: LLMDeployment) -> dict[str, Any]:
    """Both sides have one revision: what changes one of them replaces both."""
    if deployment.prefill is None:
        return {}
    changed = _changed(deployment.prefill)
    for number in ("replicas", "autoscaling"):
        changed.pop(number, None)
    if changed.pop("flip", None) is not None:
        changed["flips"] = True  # by which targets is for pods that run
    return changed


def _settled(deployment: LLMDeployment, settings: OperatorSettings) -> dict[str, Any]:
    """What the spec leaves to the operator's settings, and an administrator changes on purpose."""
    settled: dict[str, Any] = {
        "device": deployment.device,
        "image": image_of(deployment, settings),
    }
    if settings.engine_user != ENGINE_USER:
        settled["user"] = settings.engine_user
    if settings.engine_tls_secret:
        settled["tls"] = settings.engine_tls_secret
    if settings.engine_client_names:
        settled["clients"] = settings.engine_client_names
    if settings.engine_key_secret:
        settled["key"] = [settings.engine_key_secret, settings.engine_key_name]
    if settings.images.pull_secrets and "imagePullSecrets" not in deployment.pod_template.get(
        "spec", {}
    ):
        settled["pullSecrets"] = settings.images.pull_secrets
    return settled


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they would be by themselves."""
    found = {}
    for field in fields(value):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if (own := getattr(value, field.name)) != default:
            found[field.name] = _plain(own)
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _changed(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if hasattr(value, "keys") else value
