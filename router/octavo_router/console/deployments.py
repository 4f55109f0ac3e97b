"""The LLMDeployments of the namespaces this router watches, where it may read them."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_router.errors import Unreachable
from octavo_router.http.fetch import Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_router.discovery.kubernetes.account import ServiceAccount

logger = logging.getLogger("octavo.router")

RESOURCE = "/apis/octavo.dev/v1alpha1{scope}/llmdeployments"
EVERY_S = 5.0
MAX_SHOWN = 200


class DeploymentCondition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class DeploymentLoading(msgspec.Struct, frozen=True):
    phase: str = ""
    percent: float | None = None


class DeploymentStatus(msgspec.Struct, frozen=True, rename="camel"):
    conditions: list[DeploymentCondition] = []
    replicas: int = 0
    ready_replicas: int = 0
    loading: DeploymentLoading | None = None


class DeploymentMetadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class Deployment(msgspec.Struct, frozen=True):
    metadata: DeploymentMetadata = DeploymentMetadata()
    status: DeploymentStatus | None = None


class DeploymentList(msgspec.Struct, frozen=True):
    items: list[Deployment] = []


class Deployments:
    """Read at most every few seconds, and only while a viewer is there.

    Optional: a router without the right to read them (403), or a cluster without the kind (404),
    has none to show.
    """

    def __init__(
        self,
        account: ServiceAccount,
        namespaces: Sequence[str],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._account = account
        wanted = namespaces or [account.namespace]
        self._scopes = ["" if name == "*" else f"/namespaces/{name}" for name in wanted]
        self._now = now
        self._polled_at = float("-inf")
        self._rows: list[dict[str, Any]] = []
        self._asking: asyncio.Task[None] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """As known now; asks again beside it when that is old."""
        if self._asking is None and self._now() - self._polled_at >= EVERY_S:
            self._polled_at = self._now()
            self._asking = asyncio.create_task(self._ask(), name="console deployments")
        return self._rows

    async def _ask(self) -> None:
        try:
            self._rows = await self._fetch()
        except (Unreachable, OSError, ValueError, RecursionError) as error:
            logger.debug("Could not list the LLMDeployments: %s", error)
        finally:
            self._asking = None

    async def _fetch(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        async with await Connection.open(self._account.target) as connection:
            for scope in self._scopes:
                path = RESOURCE.format(scope=scope) + f"?limit={MAX_SHOWN}"
                answer = await connection.get(path, headers=self._account.headers())
                if answer.status == 200:
                    listed = msgspec.json.decode(answer.body, type=DeploymentList)
                    rows += map(_row, listed.items)
        return rows[:MAX_SHOWN]


def _row(deployment: Deployment) -> dict[str, Any]:
    status = deployment.status or DeploymentStatus()
    ready = next(
        (each for each in status.conditions if each.type == "Ready"), DeploymentCondition()
    )
    loading = status.loading
    return {
        "namespace": deployment.metadata.namespace,
        "name": deployment.metadata.name,
        "ready": ready.status,
        "reason": ready.reason,
        "message": ready.message,
        "replicas": status.replicas,
        "ready_replicas": status.ready_replicas,
        "phase": loading.phase if loading else "",
        "percent": loading.percent if loading else None,
    }
