"""Every label, selector and annotation key the operator writes, and how they are put together."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import (
    ANSWERS_SIDE,
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    ENGINE_COMPONENT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    REVISION_LABEL,
    SIDE_LABEL,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
PART_OF_LABEL = "app.kubernetes.io/part-of"
APP = "octavo"

MODEL_ANNOTATION = "octavo.dev/model"  # on engine pods: what they serve, for people
LEADER_LABEL = "octavo.dev/leader"  # on all pods of a group: the UID of the one that serves
RANK_LABEL = "octavo.dev/rank"  # on the same: 0 serves, workers are 1 and above
GROUP_SIZE_ANNOTATION = "octavo.dev/group-size"  # on pods that have workers: pods, themselves too
ADDRESS_ANNOTATION = "octavo.dev/leader-address"  # on workers' Deployments: where it was
HEADLESS = MappingProxyType({"octavo.dev/service": "engines"})  # on the headless Service

# Keys that a podTemplate may not set: selectors and garbage collection rest on them.
RESERVED_PREFIX = "octavo.dev/"
RESERVED = frozenset((MANAGED_BY_LABEL, COMPONENT_LABEL, NAME_LABEL, INSTANCE_LABEL, PART_OF_LABEL))


def common(deployment_name: str, component: str = ENGINE_COMPONENT) -> dict[str, str]:
    """On every child object."""
    return {
        NAME_LABEL: "octavo-engine",
        INSTANCE_LABEL: deployment_name,
        PART_OF_LABEL: APP,
        MANAGED_BY_LABEL: MANAGED_BY,
        COMPONENT_LABEL: component,
        DEPLOYMENT_LABEL: deployment_name,
    }


def pods(deployment_name: str) -> dict[str, str]:
    """Selects all its pods: those that answer, and prefill pods."""
    return {DEPLOYMENT_LABEL: deployment_name}


def engines(deployment_name: str, component: str = ENGINE_COMPONENT) -> dict[str, str]:
    """Selects the pods of all revisions that answer, or those of another `component`."""
    return {DEPLOYMENT_LABEL: deployment_name, COMPONENT_LABEL: component}


def answering(deployment_name: str) -> dict[str, str]:
    """Selects the pods that answer now, of those that change sides."""
    return {DEPLOYMENT_LABEL: deployment_name, SIDE_LABEL: ANSWERS_SIDE}


def revision(
    deployment_name: str, revision: str, component: str = ENGINE_COMPONENT
) -> dict[str, str]:
    """Selects such pods of one revision. Immutable once a Deployment has it."""
    return {**engines(deployment_name, component), REVISION_LABEL: revision}


def selector_text(labels: Mapping[str, str]) -> str:
    """As `kubectl -l` and the scale subresource take it."""
    return ",".join(f"{key}={labels[key]}" for key in sorted(labels))


def is_reserved(key: str) -> bool:
    return key in RESERVED or key.startswith(RESERVED_PREFIX)
