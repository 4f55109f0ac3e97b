"""CORS for the pages of named origins; a preflight that is refused says why as all errors do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from octavo_engine.protocol.endpoints import REQUEST_ID_HEADER
from octavo_engine.server.http.errors import HttpError, error_body

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers

    from octavo_engine.server.settings import ServerSettings

# What starlette calls the parts it refuses, and the flags that allow them.
_FLAGS = {
    "origin": "--allowed-origins",
    "method": "--allowed-methods",
    "headers": "--allowed-headers",
}


def allow_origins(app: Starlette, settings: ServerSettings) -> None:
    app.add_middleware(
        _Cors,
        allow_origins=list(settings.allowed_origins),
        allow_methods=list(settings.allowed_methods),
        allow_headers=list(settings.allowed_headers),
        allow_credentials=settings.allow_credentials,
        expose_headers=[REQUEST_ID_HEADER, "retry-after"],
    )


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        refused = bytes(response.body).decode().removeprefix("Disallowed CORS ").split(", ")
        flags = ", ".join(flag for name, flag in _FLAGS.items() if name in refused)
        error = HttpError(
            response.status_code,
            f"pages of this origin may not make this request: see {flags}",
            code="invalid_header",
            param="origin" if "origin" in refused else f"access-control-request-{refused[0]}",
        )
        kept = {
            name: value
            for name, value in response.headers.items()
            if name not in ("content-length", "content-type")
        }
        return Response(error_body(error), error.status, kept, "application/json")
