"""Which adapters an LLMDeployment's engines shall have: its spec's, and those of LLMAdapters.

A name belongs to one thing. What LLMDeployments name in their specs comes first; among LLMAdapters
the oldest has the name. Whatever is not taken gets a reason, for its own status.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo_operator.errors import SpecInvalid
from octavo_operator.objects import kinds
from octavo_operator.reasons import Reason
from octavo_operator.spec.adapters import LLMAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.objects.kinds import Object
    from octavo_operator.spec import AdapterSpec, LLMDeployment


class AdapterClaim(NamedTuple):
    """An LLMAdapter, and who has the name that it claims."""

    body: Object
    owner: str  # in words; "" where it is this one


class TakenAdapter(NamedTuple):
    """One that engines shall have."""

    adapter: AdapterSpec
    resource: str = ""  # the LLMAdapter that it comes from; "": the spec


@dataclass(frozen=True, slots=True)
class RefusedAdapter:
    """An LLMAdapter that cannot be carried out."""

    resource: str
    reason: Reason
    message: str


class AdapterDecision(NamedTuple):
    taken: tuple[TakenAdapter, ...] = ()
    refused: tuple[RefusedAdapter, ...] = ()


def decide_adapters(deployment: LLMDeployment, claims: Sequence[AdapterClaim]) -> AdapterDecision:
    """`claims`: of the LLMAdapters that name this deployment."""
    taken = [TakenAdapter(adapter) for adapter in deployment.adapters]
    refused: list[RefusedAdapter] = []
    num_pinned = sum(adapter.is_everywhere for adapter in deployment.adapters)
    for claim in sorted(claims, key=lambda claim: age_of(claim.body)):
        name = kinds.name_of(claim.body)
        problem = _problem(deployment, claim)
        if isinstance(problem, RefusedAdapter):
            refused.append(problem)
            continue
        room = deployment.room_for_adapters
        num_pinned += problem.pinned
        if room is not None and problem.pinned and num_pinned > room.slots:
            text = f"spec.pinned: engines have room for {room.slots}, and all of it is pinned"
            refused.append(RefusedAdapter(name, Reason.SPEC_INVALID, text))
            continue
        taken.append(TakenAdapter(problem, name))
    return AdapterDecision(tuple(taken), tuple(refused))


def age_of(body: Object) -> tuple[str, str, str]:
    """The oldest is the smallest; of equal age the first by name."""
    created = str(body["metadata"].get("creationTimestamp") or "")
    return created, kinds.namespace_of(body), kinds.name_of(body)


def _problem(deployment: LLMDeployment, claim: AdapterClaim) -> AdapterSpec | RefusedAdapter:
    """The adapter, or why it is not taken."""
    name = kinds.name_of(claim.body)
    try:
        adapter = LLMAdapter.parse_stored(claim.body).adapter
    except SpecInvalid as error:
        return RefusedAdapter(name, Reason(error.reason), str(error))
    if deployment.room_for_adapters is None:
        text = (
            f"The engines of LLMDeployment {deployment.name} take no adapters: it has neither "
            "spec.lora nor spec.adapters"
        )
        return RefusedAdapter(name, Reason.LORA_DISABLED, text)
    if claim.owner:
        text = f"The name {adapter.name} already belongs to {claim.owner}"
        return RefusedAdapter(name, Reason.ADAPTER_NAME_CONFLICT, text)
    return adapter
