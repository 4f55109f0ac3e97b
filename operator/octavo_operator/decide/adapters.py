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
    from collections.abc import Callable, Sequence

    from octavo_operator.objects.kinds import Object
    from octavo_operator.spec import AdapterSpec, LLMDeployment


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


def decide_adapters(
    deployment: LLMDeployment,
    resources: Sequence[Object],
    owner_of: Callable[[str, Object], str],
) -> AdapterDecision:
    """`resources`: the LLMAdapters that name this deployment. `owner_of`: who has a name that an
    LLMAdapter asks for, in words; "" where nobody else has."""
    taken = [TakenAdapter(adapter) for adapter in deployment.adapters]
    refused: list[RefusedAdapter] = []
    num_pinned = sum(adapter.is_everywhere for adapter in deployment.adapters)
    for body in sorted(resources, key=age_of):
        name = kinds.name_of(body)
        problem = _problem(deployment, body, owner_of)
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


def _problem(
    deployment: LLMDeployment, body: Object, owner_of: Callable[[str, Object], str]
) -> AdapterSpec | RefusedAdapter:
    """The adapter, or why it is not taken."""
    name = kinds.name_of(body)
    try:
        adapter = LLMAdapter.parse_stored(body).adapter
    except SpecInvalid as error:
        return RefusedAdapter(name, Reason(error.reason), str(error))
    if deployment.room_for_adapters is None:
        text = (
            f"The engines of LLMDeployment {deployment.name} take no adapters: it has neither "
            "spec.lora nor spec.adapters"
        )
        return RefusedAdapter(name, Reason.LORA_DISABLED, text)
    if owner := owner_of(adapter.name, body):
        text = f"The name {adapter.name} already belongs to {owner}"
        return RefusedAdapter(name, Reason.ADAPTER_NAME_CONFLICT, text)
    return adapter
