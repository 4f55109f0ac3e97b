"""docs/api.md and docs/errors.md, written from the table of routes and the table of errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.server.docs.openapi import document, section, without_converters
from octavo_engine.server.http.errors import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from octavo_engine.server.routes import Row

_MADE = "<!-- Made by `python -m octavo_engine.server`; do not edit. -->\n"

_ERRORS_HEAD = """\
# Errors

Every error of the engine's HTTP interface has this form, with the status below. Tell errors apart
by `code`: messages may change, codes do not.

```json
{"error": {"message": "n must be at least 1", "type": "invalid_request_error",
           "param": "n", "code": "invalid_request"}}
```

In a stream that began with status 200 the same object is the data of one more event, and
`data: [DONE]` follows. Every answer carries `x-request-id`, which is in the server's log too.
"""

_ERRORS_TAIL = """\

A client that leaves gets no answer; the log counts it as 499. The router has errors of its own, see
[router.md](router.md).

`/v1/messages` and the paths below it have Anthropic's form, with the same status and message; its
`type` is Anthropic's word: `request_too_large` for 413, `overloaded_error` for 503, `api_error` for
what is the server's fault, else the type above.

```json
{"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens is required"},
 "request_id": "4f1c"}
```

A stream of `/v1/messages` that breaks ends with an event `error` of that form. One of
`/v1/responses` ends with an event `error`, which has `code`, `message` and `param`, and
`response.failed`.
"""

# What switches a route on, by the setting that its row needs.
_FLAGS = {
    "dev_mode": "--dev-mode",
    "tokenizer_info": "--enable-tokenizer-info-endpoint",
    "files_dir": "--files-dir",
}

_API_HEAD = """\
# The HTTP interface

What `octavo serve` answers. The server itself describes the same at `/openapi.json`, for machines,
and at `/docs`, for people; `--no-docs` turns both off. Names and shapes are OpenAI's where OpenAI
has them, and vLLM's where vLLM has more.

- **Keys.** `Authorization: Bearer KEY` or `X-Api-Key: KEY`, where the server was given any
  (`--api-key`, `--api-key-file`). Routes for administration want an admin key if there are any
  (`--admin-api-key`, `--admin-api-key-file`).
- **Bodies** are JSON, `content-type: application/json`, unless a route has another type.
- **Unknown fields** of a body are ignored and named in the header `x-unknown-fields`, with the
  nearest known name: `max_token (did you mean max_tokens?)`. `--strict-fields` refuses them (400).
- **Request ids.** `x-request-id` comes back as it was sent, or is made up; log lines carry it.
- **Deadlines.** `x-octavo-timeout-ms` limits how long the whole answer may take; the server's own
  `--request-timeout` may be shorter. After it: 504. Where so many wait that it could not be kept:
  503 at once, with `Retry-After`.
- **Streams.** With `"stream": true` the answer is `text/event-stream`: `data: {…}` per output,
  `data: [DONE]` at the end. `/v1/responses` and `/v1/messages` name their events (`event: …`)
  and end with their last one. What a client does not read is kept for it; after two seconds its
  answer is not computed further, and holds no place and no memory, until it reads on. One that
  takes next to nothing of it for `--write-timeout` (60 s) is disconnected, also where its answer is
  over.
- **Load.** `endpoint-load-metrics-format: TEXT` or `JSON` brings the engine's load with an answer
  of chat or completions that is not streamed, as ORCA has it, in `endpoint-load-metrics`.
- **Errors** are in [errors.md](errors.md).

A star marks what must be given in a body, and what is always there in an answer.
"""


def errors_page() -> str:
    lines = ["| status | type | code | param | Retry-After | when |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.status} | {row.type} | `{row.code}` | {row.param or '—'} | "
        f"{row.retry_after or '—'} | {row.when} |"
        for row in CATALOGUE
    ]
    return "\n".join([_MADE + _ERRORS_HEAD, *lines]) + "\n" + _ERRORS_TAIL


def api_page(rows: Sequence[Row]) -> str:
    api = document(rows)
    parts = [_MADE + _API_HEAD]
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(section(row), []).append(row)
    for title, members in sections.items():
        parts.append(f"## {title}\n")
        parts.append("\n".join(_table(api, members)) + "\n")
    parts.append("## Bodies and answers\n")
    schemas = api["components"]["schemas"]
    parts += ["\n".join(_schema(name, schemas[name])) for name in sorted(schemas)]
    return "\n".join(parts)


def _table(api: dict[str, Any], rows: Iterable[Row]) -> Iterator[str]:
    yield "| route | what | body | answer | event |"
    yield "|---|---|---|---|---|"
    for row in rows:
        path = without_converters(row.path)
        operation = api["paths"][path][row.method.lower()]
        needs = f" (with `{flag}`)" if (flag := _FLAGS.get(row.needs)) else ""
        answer: dict[str, Any] = operation["responses"][str(row.status)].get("content", {})
        media = next(iter(answer), "")
        whole: dict[str, Any] = answer.get(media, {})
        content: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
        body = next((part.get("schema") for part in content.values()), None)
        event = answer.get("text/event-stream", {}).get("x-event-schema")
        cells = [_type(body), _type(whole.get("schema")) or media, _type(event)]
        shown = " | ".join(cell or "—" for cell in cells)
        yield f"| `{row.method} {path}` | {row.says}{needs} | {shown} |"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if about := schema.get("description"):
        yield " ".join(about.split()) + "\n"
    if not schema.get("properties"):
        return
    required = schema.get("required", ())
    yield "| field | type |"
    yield "|---|---|"
    for field, inner in schema["properties"].items():
        mark = "\\*" if field in required else ""
        yield f"| `{field}`{mark} | {_type(inner)} |"
    yield ""


def _type(schema: dict[str, Any] | None) -> str:
    if schema is None:
        return ""
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        return f"[{name}](#{name.lower().replace('.', '')})"
    if inner := schema.get("anyOf"):
        return " or ".join(_type(part) for part in inner)
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return "list of " + _type(schema.get("items") or {})
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return "map to " + _type(schema["additionalProperties"])
    return str(schema.get("type", "anything"))
