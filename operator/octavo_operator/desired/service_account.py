"""A ServiceAccount without rights or token: engines never talk to the API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.metadata import child
from octavo_operator.objects import names

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment


def service_account(deployment: LLMDeployment) -> dict[str, Any]:
    head = child(deployment, "v1", "ServiceAccount", names.service_account(deployment.name))
    return {**head, "automountServiceAccountToken": False}
