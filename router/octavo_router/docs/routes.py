"""The router's description of itself. What engines answer is described in engine_openapi.json,
which `python -m octavo_engine.server` writes."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo_common.pages import API_DOCS, InlinePage, read_page
from octavo_router.http.messages import Inbound, Reply
from octavo_router.proxy.paths import describes_proxied

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from octavo_router.http.messages import Handler

_FOLDER: Final = Path(__file__).parent
_ABOUT: Final = (
    "The HTTP interface of an Octavo router. Requests to models are answered by the engines behind "
    "it; names and shapes are OpenAI's where OpenAI has them, and vLLM's where vLLM has more."
)
# Of the routes that the router answers itself; those that are off are not described.
_OWN: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("A page with engines, requests and a chat", "text/html"),
    "/health": ("Whether the router is alive", "application/json"),
    "/ready": ("Whether it takes requests; 503 otherwise", "application/json"),
    "/version": ("The release of this router", "application/json"),
    "/metrics": ("Metrics in Prometheus's text format", "text/plain"),
    "/docs": ("A page that shows this description", "text/html"),
    "/openapi.json": ("This description", "application/json"),
}
_MODELS: Final = ("/v1/models", "/v1/models/{model}")  # answered here, in the engine's shape


class DocsRoutes:
    """Describes the paths of `served`, the router's own handlers."""

    def __init__(self, served: Collection[str], version: Callable[[], str]) -> None:
        self._served = served
        self._version = version
        self._text = b""

    def table(self) -> dict[tuple[str, str], Handler]:
        return {("GET", "/docs"): self.page, ("GET", "/openapi.json"): self.openapi}

    def page(self, request: Inbound) -> Reply:
        page = _api_docs()
        return Reply(200, page.content, "text/html; charset=utf-8", page.headers)

    def openapi(self, request: Inbound) -> Reply:
        if not self._text:  # made when it is read first
            self._text = json.dumps(router_document(self._served, self._version())).encode()
        return Reply(200, self._text, "application/json")


def router_document(served: Collection[str], version: str) -> dict[str, Any]:
    """The OpenAPI document of a router with these routes of its own."""
    document: dict[str, Any] = json.loads((_FOLDER / "engine_openapi.json").read_bytes())
    paths = {
        path: methods
        for path, methods in document["paths"].items()
        if path in _MODELS or describes_proxied(path)
    }
    for path, (summary, media) in _OWN.items():
        if path in served:
            paths[path] = {"get": _own(path, summary, media)}
    document["paths"] = paths
    document["info"] |= {"title": "Octavo router", "version": version, "description": _ABOUT}
    _drop_unused(document)
    return document


def _own(path: str, summary: str, media: str) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", path).strip("_") or "page"
    return {
        "operationId": f"get_{name}",
        "summary": summary,
        "tags": ["Probes and facts"],
        "security": [],
        "responses": {"200": {"description": "Done.", "content": {media: {}}}},
    }


def _drop_unused(document: dict[str, Any]) -> None:
    """Leaves the schemas and errors that the paths refer to, and what these refer to."""
    components = document["components"]
    used: set[tuple[str, str]] = set()
    texts = [json.dumps(document["paths"])]
    while texts:
        for kind, name in re.findall(r'"#/components/(\w+)/([^"]+)"', texts.pop()):
            if (kind, name) not in used:
                used.add((kind, name))
                texts.append(json.dumps(components[kind][name]))
    for kind in ("schemas", "responses"):
        components[kind] = {
            name: value for name, value in components[kind].items() if (kind, name) in used
        }


@cache
def _api_docs() -> InlinePage:
    return read_page(API_DOCS)
