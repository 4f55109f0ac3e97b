"""/openapi.json, made from the table of routes, the types of bodies and answers, and the errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine import __version__
from octavo_engine.protocol.endpoints import REQUEST_ID_HEADER, TIMEOUT_HEADER
from octavo_engine.server.http.errors import CATALOGUE
from octavo_engine.server.openai import response_schemas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.server.routes import Row

_REF = "#/components/schemas/{name}"
_CONVERTER = re.compile(r"\{(\w+):\w+\}")
_ABOUT = (
    "The HTTP interface of an Octavo engine. Names and shapes are OpenAI's where OpenAI has them, "
    "and vLLM's where vLLM has more."
)
# Which errors can come of what a route does.
_ANY_ROUTE = ("invalid_header", "invalid_http", "method_not_allowed", "url_too_long", "wrong_pod",
              "headers_too_large", "internal_error")  # fmt: skip
_WITH_KEY = ("invalid_api_key", "client_certificate_required")
_ADMIN = ("admin_key_required",)
_WITH_BODY = ("invalid_request", "invalid_json", "body_timeout", "body_too_large",
              "unsupported_media_type")  # fmt: skip
_WORKING = ("model_not_found", "queue_full", "deadline_exceeded")


def document(rows: Sequence[Row], *, root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document of these routes."""
    return _Document(rows).write(root_path)


def errors_of(row: Row) -> list[int]:
    """The statuses of the errors that a route can answer with."""
    codes = list(_ANY_ROUTE)
    if row.access != "public":
        codes += _WITH_KEY
    if row.access == "admin":
        codes += _ADMIN
    if row.body or row.form:
        codes += _WITH_BODY
    statuses = {error.status for error in CATALOGUE if error.code in codes}
    if row.works:
        statuses |= {error.status for error in CATALOGUE if error.code in _WORKING}
    return sorted(statuses | set(row.also))


def without_converters(path: str) -> str:
    """`/v1/models/{model:path}` as others write it."""
    return _CONVERTER.sub(r"{\1}", path)


def section(row: Row) -> str:
    """Where the documents list it."""
    if row.access == "public":
        return "Probes and facts"
    return "Administration" if row.access == "admin" else "Work" if row.works else "Facts"


def operation_id(row: Row) -> str:
    name = re.sub(r"\W+", "_", _CONVERTER.sub(r"\1", row.path)).strip("_")
    return f"{row.method.lower()}_{name}"


class _Document:
    """All types at once: only so do two of one name get two names."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        types: list[Any] = [response_schemas.Error, response_schemas.Probe]
        for row in rows:
            known = (row.body, row.form, row.query, row.answer, row.events, row.error)
            types += [t for t in known if t]
        types = list(dict.fromkeys(types))
        schemas, self._components = msgspec.json.schema_components(types, ref_template=_REF)
        self._schemas = dict(zip(types, schemas, strict=True))

    def write(self, root_path: str) -> dict[str, Any]:
        paths: dict[str, Any] = {}
        for row in self._rows:
            path = without_converters(row.path)
            paths.setdefault(path, {})[row.method.lower()] = self._operation(row, path)
        statuses = sorted({row.status for row in CATALOGUE})
        return {
            "openapi": "3.1.0",
            "info": {"title": "Octavo", "version": __version__, "description": _ABOUT},
            "servers": [{"url": root_path or "/"}],
            "paths": paths,
            "components": {
                "schemas": dict(sorted(self._components.items())),
                "responses": {
                    f"{kind.__name__}{status}": self._refusal(status, kind)
                    for kind in dict.fromkeys(
                        [response_schemas.Error, *(r.error for r in self._rows if r.error)]
                    )
                    for status in statuses
                },
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "keyHeader": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
                },
            },
        }

    def _operation(self, row: Row, path: str) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": operation_id(row),
            "summary": row.says,
            "tags": [section(row)],
            "security": [] if row.access == "public" else [{"key": []}, {"keyHeader": []}, {}],
        }
        if parameters := self._parameters(row, path):
            operation["parameters"] = parameters
        if body := row.body or row.form:
            media = "application/json" if row.body else "multipart/form-data"
            content = {media: {"schema": self._schemas[body]}}
            operation["requestBody"] = {"required": row.needs_body, "content": content}
        responses: dict[str, Any] = {str(row.status): self._answer(row)}
        for status in errors_of(row):
            kind = (row.error or response_schemas.Error).__name__
            ref = {"$ref": f"#/components/responses/{kind}{status}"}
            responses.setdefault(str(status), ref)
        if row.probes:
            content = {"application/json": {"schema": self._schemas[response_schemas.Probe]}}
            responses["503"] = {"description": "Not now; why, is said.", "content": content}
        operation["responses"] = responses
        return operation

    def _parameters(self, row: Row, path: str) -> list[dict[str, Any]]:
        text = {"type": "string", "minLength": 1}
        parameters: list[dict[str, Any]] = [
            {"name": name, "in": "path", "required": True, "schema": text}
            for name in re.findall(r"\{(\w+)\}", path)
        ]
        if row.query is not None:
            name = self._schemas[row.query]["$ref"].rpartition("/")[2]
            fields = self._components[name]
            required = fields.get("required", ())
            parameters += [
                {"name": name, "in": "query", "required": name in required, "schema": schema}
                for name, schema in fields["properties"].items()
            ]
        if row.works:
            milliseconds = {"type": "integer", "minimum": 1, "maximum": 10**12 - 1}
            for name, schema in (
                (REQUEST_ID_HEADER, {"type": "string"}),
                (TIMEOUT_HEADER, milliseconds),
            ):
                parameters.append({"name": name, "in": "header", "schema": schema})
        return parameters

    def _answer(self, row: Row) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if row.answer is not None:
            content["application/json"] = {"schema": self._schemas[row.answer]}
        elif row.media:
            content[row.media] = {}
        if row.events is not None:
            # A stream is text; what the data of each event holds has no word of its own in 3.1.
            event = self._schemas[row.events]
            content["text/event-stream"] = {"x-event-schema": event}
        answer: dict[str, Any] = {
            "description": "Done.",
            "headers": {REQUEST_ID_HEADER: {"schema": {"type": "string"}}},
        }
        if content:
            answer["content"] = content
        return answer

    def _refusal(self, status: int, kind: type[Any]) -> dict[str, Any]:
        kinds = [row for row in CATALOGUE if row.status == status]
        refusal: dict[str, Any] = {
            "description": " ".join(f"`{row.code}`: {row.when}" for row in kinds),
            "content": {"application/json": {"schema": self._schemas[kind]}},
        }
        if any(row.retry_after for row in kinds):
            refusal["headers"] = {"retry-after": {"schema": {"type": "integer"}}}
        return refusal
