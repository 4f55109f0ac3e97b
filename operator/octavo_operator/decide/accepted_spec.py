"""Which spec is carried out: the current one, or the last one that was accepted.

A spec that is refused must not freeze what runs: gates, scaling and waking go on by the spec that
was accepted before. That one is kept in the status, as text, so that a restarted operator has it
too and no schema of another version can prune it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_operator.desired import check_autoscaler
from octavo_operator.desired.revision import image_of
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import LLMDeployment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_operator.decide.observed import DeploymentKey
    from octavo_operator.objects.kinds import Object
    from octavo_operator.settings import OperatorSettings

MAX_SPEC_BYTES = 262_144  # with the spec itself it fits into etcd; the schema has it as characters
# The API server's encoder, which escapes what HTML and JavaScript read otherwise: six bytes each.
_ESCAPED = re.compile("[<>&\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Accepted:
    """A spec that can be carried out."""

    deployment: LLMDeployment
    generation: int  # of the spec
    spec: str  # as canonical JSON
    refusal: SpecInvalid | None = None  # why the written spec is not the one

    def to_status(self) -> Object:
        if _stored_bytes(self.spec) > MAX_SPEC_BYTES:
            return {}
        return {"generation": self.generation, "spec": self.spec}


def _stored_bytes(text: str) -> int:
    """At most, of a string as the API server writes it into etcd: UTF-8 with JSON's escapes."""
    return len(msgspec.json.encode(_ESCAPED.sub("......", text)))


def accept(
    body: Object, taken: Mapping[str, DeploymentKey], settings: OperatorSettings
) -> Accepted:
    """`taken`: served names that belong to other LLMDeployments. Raises SpecInvalid where neither
    the written spec nor an earlier one can be carried out."""
    try:
        deployment = LLMDeployment.parse_stored(body)
        _check(deployment, taken, settings)
        text = msgspec.json.encode(body["spec"], order="deterministic").decode()
        return Accepted(deployment, deployment.generation, text)
    except SpecInvalid as error:
        refusal = error
    earlier = accepted_of(body)
    if earlier is None:
        raise refusal
    generation, text = earlier
    spec = msgspec.json.decode(text)
    try:
        deployment = LLMDeployment.parse_stored({**body, "spec": spec})
    except SpecInvalid:  # accepted by a newer version
        raise refusal from None
    return Accepted(deployment, generation, text, refusal)


def _check(
    deployment: LLMDeployment, taken: Mapping[str, DeploymentKey], settings: OperatorSettings
) -> None:
    """What the parser cannot see. Raises SpecInvalid."""
    for name in deployment.names:
        if (owner := taken.get(name)) is None:
            continue
        is_near = owner.namespace == deployment.namespace
        where = "" if is_near else f" in namespace {owner.namespace}"
        raise SpecInvalid(
            "spec.model" if name in deployment.model.names else "spec.adapters",
            f"uses the name {name}, which already belongs to LLMDeployment {owner.name}{where}",
            reason="ServedNameConflict",
        )
    check_autoscaler(deployment, settings)
    image_of(deployment, settings)


def accepted_of(body: Mapping[str, Any]) -> tuple[int, str] | None:
    """The generation and text of the spec that was accepted last; None where there is none, or
    it was edited into something else."""
    stored = (body.get("status") or {}).get("accepted")
    if not isinstance(stored, dict):
        return None
    generation, text = stored.get("generation"), stored.get("spec")
    if not isinstance(generation, int) or not isinstance(text, str):
        return None
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    return generation, text


def served_names(spec: object, deployment_name: str) -> tuple[str, ...]:
    """The names of models and adapters in a spec that need not be valid."""
    model = spec.get("model") if isinstance(spec, dict) else None
    model = model if isinstance(model, dict) else {}
    aliases = model.get("aliases")
    names = [model.get("servedName") or deployment_name]
    names += aliases if isinstance(aliases, list) else []
    adapters = spec.get("adapters") if isinstance(spec, dict) else None
    names += [
        adapter["name"]
        for adapter in (adapters if isinstance(adapters, list) else ())
        if isinstance(adapter, dict) and "name" in adapter
    ]
    return tuple(dict.fromkeys(str(name) for name in names))
