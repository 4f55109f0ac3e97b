"""Reads anew, from the API server, what watches may not have reported yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_operator.objects import kinds, labels

if TYPE_CHECKING:
    from octavo_operator.cluster.api import Cluster
    from octavo_operator.decide.observed import DeploymentKey
    from octavo_operator.objects.kinds import Object
    from octavo_operator.watch.world import World


async def reread_deployment(cluster: Cluster, world: World, body: Object) -> Object | None:
    """The resource as the API server has it now, or None where it is gone: children of what is
    gone would be created, and collected, for ever."""
    namespace, name = kinds.namespace_of(body), kinds.name_of(body)
    found = await cluster.get(kinds.LLM_DEPLOYMENT, namespace, name)
    if found is None or kinds.uid_of(found) != kinds.uid_of(body):
        world.drop(kinds.LLM_DEPLOYMENT, body)
    if found is None:
        return None
    world.keep(kinds.LLM_DEPLOYMENT, found)
    return found


async def reread_children(cluster: Cluster, world: World, key: DeploymentKey) -> None:
    """Its Deployments and pods: the next decision may delete some."""
    selector = labels.selector_text(labels.pods(key.name))
    for kind in (kinds.DEPLOYMENT, kinds.POD):
        listing = await cluster.find(kind, key.namespace, selector=selector)
        world.replace_children(key, kind, listing)
