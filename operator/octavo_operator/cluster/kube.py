"""The Kubernetes API over HTTP: one request per method, typed errors, no retries, no cache."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec

from octavo_operator.cluster.api import Listing
from octavo_operator.cluster.connections import HttpSession
from octavo_operator.errors import (
    ApiRefused,
    ClusterError,
    ClusterUnavailable,
    Conflict,
    Gone,
    NotFound,
    SettingsInvalid,
)
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from octavo_operator.cluster.kube_config import KubeConfig
    from octavo_operator.objects.kinds import Kind, Object

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
PAGE = 250  # objects in memory at once as dicts, when a kind is listed
TOKEN_MAX_AGE_S = 60.0
MAX_RETRY_AFTER_S = 300.0
MAX_LOG_BYTES = 16 * 2**10


class KubeCluster:
    """A Cluster. Use as `async with`."""

    def __init__(
        self,
        config: KubeConfig,
        *,
        field_manager: str,
        timeout_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._manager = field_manager
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        self._clock = clock
        self._session: HttpSession | None = None
        self._tls: ssl.SSLContext | None = None
        self._token = ""
        self._token_at = float("-inf")
        self._is_token_refused = False

    async def __aenter__(self) -> Self:
        self._tls = self._config.ssl_context()
        self._session = HttpSession(
            tls=self._tls,
            limit=32,
            timeout=self._timeout,
            headers={"Accept": "application/json", "User-Agent": self._manager},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self._call("GET", kind.path(namespace, name))
        except NotFound:
            return None

    async def find(
        self, kind: Kind, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> Listing:
        query = {"limit": str(PAGE)}
        query |= {"labelSelector": selector} if selector else {}
        query |= {"fieldSelector": fields} if fields else {}
        items: list[Object] = []
        while True:
            try:
                page = await self._call("GET", kind.path(namespace), query=query)
            except Gone:
                # The continue token has expired in the middle: begin again, all at once.
                if "continue" not in query:
                    raise
                items, query = (
                    [],
                    {k: v for k, v in query.items() if k not in ("limit", "continue")},
                )
                continue
            items += page.get("items") or []
            token = page["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        for item in items:  # lists leave them out
            item["apiVersion"], item["kind"] = kind.api_version, kind.name
        return Listing(items, int(page["metadata"].get("resourceVersion") or 0))

    async def apply(self, body: Object) -> Object:
        return await self._apply(body, "")

    async def apply_status(self, body: Object) -> Object:
        return await self._apply(body, "status")

    async def create(self, body: Object) -> Object:
        path = kinds.kind_of(body).path(kinds.namespace_of(body))
        return await self._call("POST", path, body, query=self._managed())

    async def replace(self, body: Object) -> Object:
        path = kinds.kind_of(body).path(kinds.namespace_of(body), kinds.name_of(body))
        return await self._call("PUT", path, body, query=self._managed())

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Object, *, subresource: str = ""
    ) -> Object:
        path = kind.path(namespace, name, subresource)
        return await self._call("PATCH", path, patch, content_type=MERGE, query=self._managed())

    async def set_pod_condition(self, namespace: str, name: str, condition: Object) -> Object:
        fields = {key: value for key, value in condition.items() if key != "podUid"}
        patch = {"metadata": {"uid": condition["podUid"]}, "status": {"conditions": [fields]}}
        path = kinds.POD.path(namespace, name, "status")
        return await self._call("PATCH", path, patch, content_type=STRATEGIC, query=self._managed())

    async def log(self, namespace: str, pod: str, container: str, *, lines: int) -> str:
        query = {"container": container, "tailLines": str(lines), "limitBytes": str(MAX_LOG_BYTES)}
        content = await self._send("GET", kinds.POD.path(namespace, pod, "log"), query=query)
        return content.decode(errors="replace")

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        preconditions = {"uid": uid}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": preconditions,
        }
        try:
            await self._call("DELETE", kind.path(namespace, name), options)
        except NotFound:
            return

    async def serves(self, kind: Kind) -> bool:
        """Whether the cluster has this kind. Raises ClusterError where it does not answer."""
        root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
        try:
            found = await self._call("GET", root)
        except NotFound:
            return False
        return any(entry.get("name") == kind.plural for entry in found.get("resources") or [])

    async def _apply(self, body: Object, subresource: str) -> Object:
        kind = kinds.kind_of(body)
        path = kind.path(kinds.namespace_of(body), kinds.name_of(body), subresource)
        query = {**self._managed(), "force": "true"}
        return await self._call("PATCH", path, body, content_type=APPLY, query=query)

    def _managed(self) -> dict[str, str]:
        return {"fieldManager": self._manager, "fieldValidation": "Ignore"}

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> Object:
        content = await self._send(method, path, body, content_type=content_type, query=query)
        try:
            decoded: Object = msgspec.json.decode(content, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise ClusterUnavailable(f"{method} {path}: not JSON: {error}") from None
        return decoded

    async def _send(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> bytes:
        assert self._session is not None, "use as async with"
        headers = {"Content-Type": content_type} if body is not None else {}
        if token := await self._fresh_token():
            headers["Authorization"] = f"Bearer {token}"
        try:
            async with self._session.http.request(
                method,
                self._config.server + path,
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
            ) as answer:
                content = await answer.read()
                status, retry_after = answer.status, answer.headers.get("Retry-After", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, aiohttp.ClientConnectorCertificateError):
                await self._renew_authorities()
            text = str(error) or type(error).__name__
            raise ClusterUnavailable(f"{method} {path}: {text}") from error
        if status == 401:
            self._token_at = float("-inf")  # read it anew before the next try
            self._is_token_refused = True
        if status >= 400:
            raise error_of(status, content, retry_after)
        return content

    async def _renew_authorities(self) -> None:
        """Those of the cluster may have changed since we began: before the next try."""
        pem = await asyncio.to_thread(self._config.read_authorities)
        if self._tls is not None and pem:
            self._tls.load_verify_locations(cadata=pem)

    async def _fresh_token(self) -> str:
        now = self._clock()
        if now - self._token_at >= TOKEN_MAX_AGE_S:
            try:
                self._token = await asyncio.to_thread(
                    self._config.read_token, renew=self._is_token_refused
                )
            except SettingsInvalid as error:  # it was fine once: so may it be again
                raise ClusterUnavailable(str(error)) from error
            self._token_at, self._is_token_refused = now, False
        return self._token


def error_of(status: int, content: bytes, retry_after: str = "") -> ClusterError:
    """The exception for an answer of 400 and above."""
    try:
        answer = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    message = str(answer.get("message") or content[:500].decode(errors="replace") or status)
    reason = str(answer.get("reason") or "")
    if status == 404:
        return NotFound(message, status=status, reason=reason)
    if status == 409:
        return Conflict(message, status=status, reason=reason)
    if status == 410:
        return Gone(message, status=status, reason=reason)
    if status in (401, 408, 429) or status >= 500:
        # NOTE: a webhook that cannot be called is a 500, and no fault of the API server.
        if "webhook" in message:
            return ApiRefused(message, status=status, reason=reason)
        return ClusterUnavailable(
            message, status=status, reason=reason, retry_after_s=_seconds(retry_after)
        )
    # Immutable fields and failed precondition tests both return 422.
    return ApiRefused(message, status=status, reason=reason)


def _seconds(text: str) -> float | None:
    """Whatever a proxy put there must not stop us for long."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds >= 0 else None
