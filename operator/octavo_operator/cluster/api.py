"""What the operator needs from a cluster. KubeCluster is the real one; tests have one in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Kind, Object


class Listing(NamedTuple):
    """Objects of a kind, and the version of the world in which these were all."""

    items: list[Object]
    version: int


class Cluster(Protocol):
    """One API server. Every method may raise ClusterError; none retries, none caches.

    Writes carry preconditions: metadata.uid and metadata.resourceVersion, where a body or patch
    has them, must match what is stored, else Conflict. A status is checked by resourceVersion only.
    """

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object as it is now (a quorum read), or None."""

    async def find(
        self, kind: Kind, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> Listing:
        """All objects of a kind in a namespace, or in all; `selector` by labels, `fields` by
        fields. NotFound where the kind is unknown."""

    async def apply(self, body: Object) -> Object:
        """Server-side apply: the fields in `body`, and no others, become and stay ours."""

    async def apply_status(self, body: Object) -> Object:
        """The same on the status subresource; the object must exist."""

    async def create(self, body: Object) -> Object:
        """Conflict where the name is taken."""

    async def replace(self, body: Object) -> Object:
        """The whole object; its resourceVersion must be current."""

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        """A JSON merge patch. NotFound where the object is gone."""

    async def set_pod_condition(self, namespace: str, name: str, condition: Object) -> Object:
        """Add or exchange one condition of a pod by its type; `condition` also names the pod's
        uid, under "podUid"."""

    async def log(self, namespace: str, pod: str, container: str, *, lines: int) -> str:
        """The last lines that a container has written. Refused where it has not begun."""

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        """In the background. Nothing happens where the object is gone; Conflict where another
        object has the name by now or it has changed."""
