"""Which of the named namespaces can be watched: a deleted one takes its Role along, and every watch
in it is refused from then on. kopf ends where one of its watches does, so it gets only the others.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from octavo_operator.errors import ApiRefused, ClusterError
from octavo_operator.watch.world import WATCHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.cluster.api import Cluster

logger = logging.getLogger("octavo.operator.namespaces")

ASK_AGAIN_S = 30.0
NO_SUCH_OBJECT = "metadata.name=octavo-none"  # an empty list costs nothing


async def permitted(cluster: Cluster, namespaces: Sequence[str]) -> tuple[str, ...]:
    """Those in which nothing that has to be watched is refused. Where the API server does not
    answer, nothing is: watches wait for it."""
    refusals = await asyncio.gather(*(_refusal(cluster, namespace) for namespace in namespaces))
    found = []
    for namespace, refusal in zip(namespaces, refusals, strict=True):
        if refusal is None:
            found.append(namespace)
        else:
            details = {"namespace": namespace, "error": str(refusal)}
            logger.warning("Namespace is not watched: permission denied", extra=details)
    return tuple(found)


async def until_permitted(cluster: Cluster, namespaces: Sequence[str], every_s: float) -> None:
    """Returns when one of them can be watched again; never where there are none."""
    while True:
        await asyncio.sleep(every_s)
        for namespace in namespaces:
            if await _refusal(cluster, namespace) is None:
                return


async def _refusal(cluster: Cluster, namespace: str) -> ApiRefused | None:
    for kind in WATCHED:
        try:
            await cluster.find(kind, namespace, fields=NO_SUCH_OBJECT)
        except ApiRefused as error:
            return error
        except ClusterError:
            continue
    return None
