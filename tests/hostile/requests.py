"""Generated requests at scale: every operation of the API, called in process, without sockets.

    python -m tests.hostile.requests [--count N] [--seconds S] [--seed N] [--path PATH] [--router]

With a router they go through it, over sockets.

Bodies come from the OpenAPI description, from valid requests with changed values, and from changed
bytes. Each must end, with a status below 500 (or 501, 503, 504) and, where it failed, with the
error object; nothing is left of them in the engine. One that fails is kept. SIGTERM
ends a run as its time does, with its counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import psutil

from tests.fakes.api_fuzz import LEFT_OUT, TOGETHER, USER
from tests.fakes.http_client import RawClient
from tests.hostile.hunt import CORPUS
from tests.hostile.mutations import VALUES, changed_value, mutated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp

    from tests.fakes.router_process import RouterProcess
    from tests.fakes.simulated import Simulated

    Send = Callable[["Request"], Awaitable[tuple[int, bytes]]]

AT_A_TIME: Final = 64
BATCH: Final = 512  # between two looks at what is left behind
TIMEOUT_S: Final = 60.0
GROWTH_MIB: Final = 256.0  # of the resident memory, from the thousandth request on
_MAY_FAIL: Final = (501, 503, 504)
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": {
    "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}}  # fmt: skip
# Valid requests, whose values are changed; other operations have those of their description only.
VALID: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/completions": [
        {"prompt": "once", "max_tokens": 4, **one} for one in TOGETHER
    ] + [{"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2, "echo": True, "seed": 1,
          "logit_bias": {"5": 1.5}, "stop": ["a"], "presence_penalty": 0.5, "min_p": 0.1}],
    "/v1/chat/completions": [
        {"messages": USER, "max_tokens": 4, "temperature": 1, "top_logprobs": 2, "logprobs": True},
        {"messages": USER, "max_tokens": 9, "tools": [_TOOL], "stream": True},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]}],
         "max_completion_tokens": 3},
        {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "1"}], "max_tokens": 3},
        {"messages": USER, "max_tokens": 12, "response_format": _SCHEMA, "n": 2, "seed": 3},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 4, "stream": True, "instructions": "be brief"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
         "max_output_tokens": 4, "text": {"format": {"type": "json_object"}}, "store": True},
    ],
    "/v1/messages": [
        {"messages": USER, "max_tokens": 4, "system": "s", "stop_sequences": ["a"], "stream": True},
        {"messages": USER, "max_tokens": 4, "tools": [{"name": "f", "input_schema": {}}],
         "tool_choice": {"type": "auto"}, "metadata": {"user_id": "u"}},
    ],
    "/tokenize": [{"prompt": "once"}, {"messages": USER, "add_generation_prompt": False}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/inference/v1/generate": [{"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}],
}  # fmt: skip


@dataclass(slots=True)
class Request:
    """One, as the application gets it."""

    method: str
    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]]
    query: bytes = b""

    def dump(self) -> bytes:
        head = f"{self.method} {self.path}?{self.query.decode('latin-1')}\n{self.headers}\n\n"
        return head.encode() + self.body


@dataclass(slots=True)
class RequestCounts:
    """What became of them."""

    statuses: Counter[int] = field(default_factory=Counter)
    tried: int = 0
    slowest_s: float = 0.0
    growth_mib: float = 0.0
    router_growth_mib: list[float] = field(default_factory=list)  # of one at most


class BadAnswer(AssertionError):
    """An answer that may not be; `request` led to it."""

    def __init__(self, request: Request, what: str) -> None:
        super().__init__(f"{request.method} {request.path}: {what}\n{request.dump()[:1500]!r}")
        self.request = request


class Generator:
    """Requests from the description, of all operations in turn."""

    def __init__(self, document: dict[str, Any], seed: int, path: str | None) -> None:
        self._rng = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self.operations = [
            (method.upper(), where, operation)
            for where, methods in document["paths"].items()
            for method, operation in methods.items()
            if where not in LEFT_OUT
            and "profile" not in where  # it writes files
            and (path is None or path in where)
        ]

    def requests(self) -> Iterator[Request]:
        while True:
            yield self._one(*self._rng.choice(self.operations))

    def _one(self, method: str, path: str, operation: dict[str, Any]) -> Request:
        rng = self._rng
        headers = [(b"host", b"x")]
        content = operation.get("requestBody", {}).get("content", {})
        body = b""
        if content:
            media = next(iter(content))
            body = self._body(path, content[media].get("schema", {}))
            if rng.random() < 0.02:
                media = rng.choice(("", "text/plain", "application/json; charset=x", "multipart/x"))
            headers.append((b"content-type", media.encode()))
        headers += [
            (name, rng.randbytes(9).hex().encode())
            for name in (b"x-request-id", b"traceparent", b"x-request-timeout", b"authorization")
            if rng.random() < 0.02
        ]
        parts = ["x", "%00", quote(str(rng.choice(VALUES))[:40], safe=""), "..", "resp_1", "sim"]
        while "{" in path:
            begin, end = path.index("{"), path.index("}")
            path = path[:begin] + rng.choice(parts) + path[end + 1 :]
        query = b"" if rng.random() < 0.9 else quote(str(rng.choice(VALUES))).encode()[:200]
        return Request(method, path, body, headers, query)

    def _body(self, path: str, schema: dict[str, Any]) -> bytes:
        rng = self._rng
        valid = VALID.get(path)
        kind = rng.random()
        if valid and kind < 0.12:
            return json.dumps(rng.choice(valid)).encode()
        if valid and kind < 0.6:
            value = changed_value(rng, rng.choice(valid))
            return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
        if kind < 0.85:
            return json.dumps(self._value(schema, 0)).encode()
        seeds = [json.dumps(one).encode() for one in valid or [self._value(schema, 0)]]
        return mutated(rng, seeds, json_share=0.0)

    def _value(self, schema: Any, depth: int) -> Any:
        rng = self._rng
        if not isinstance(schema, dict) or depth > 6 or rng.random() < 0.05:
            return rng.choice(VALUES)
        if "$ref" in schema:
            return self._value(self._schemas[schema["$ref"].rpartition("/")[2]], depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._value(rng.choice(schema[name]), depth + 1)
        if "enum" in schema or "const" in schema:
            return rng.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        match rng.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                items = schema.get("items", {})
                return [self._value(items, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
            case "string":
                return rng.choice(("", "hi", "once upon", "sim", "é💥", "\0", "a" * 500))
            case "integer":
                low = schema.get("minimum", 0)
                return rng.choice((low, low + 1, low - 1, schema.get("maximum", 9), 3, 2**63))
            case "number":
                return rng.choice((0.0, 0.5, 1, schema.get("maximum", 2.0), -1e9, 1e308))
            case "boolean":
                return rng.random() < 0.5
        return rng.choice(VALUES)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng = self._rng
        names = schema.get("properties", {})
        required = set(schema.get("required", ()))
        share = rng.choice((0.03, 0.1, 0.4))
        return {
            name: self._value(child, depth + 1)
            for name, child in names.items()
            if (name in required and rng.random() < 0.97) or rng.random() < share
        }


async def call(app: ASGIApp, request: Request) -> tuple[int, bytes]:
    """The status and the body of the answer."""
    status, parts = 0, []
    messages = [{"type": "http.request", "body": request.body, "more_body": False}]
    is_over = asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(bytes(message.get("body", b"")))

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": request.method, "path": request.path, "raw_path": request.path.encode(),
        "query_string": request.query, "root_path": "", "headers": request.headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    is_over.set()
    return status, b"".join(parts)


class Connections:
    """As `call`, to a router, over connections that are kept. What is not strictly HTTP fails."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[RawClient] = []

    async def send(self, request: Request) -> tuple[int, bytes]:
        client = self._idle.pop() if self._idle else await RawClient.open(self._port)
        await client.send(self._bytes(request))
        answer = await client.answer(is_head=request.method == "HEAD")
        if answer.header("connection") == "close":
            client.writer.close()
        else:
            self._idle.append(client)
        return answer.status, answer.body

    def _bytes(self, request: Request) -> bytes:
        query = b"?" + request.query if request.query else b""
        fields = [(b"host", f"127.0.0.1:{self._port}".encode()), *request.headers[1:]]
        if request.body or request.method in ("POST", "PUT", "PATCH"):
            fields.append((b"content-length", str(len(request.body)).encode()))
        lines = [b"%b: %b\r\n" % field for field in fields]
        head = b"%b %b%b HTTP/1.1\r\n" % (request.method.encode(), request.path.encode(), query)
        return head + b"".join(lines) + b"\r\n" + request.body

    async def close(self) -> None:
        for client in self._idle:
            client.writer.close()


async def check(send: Send, request: Request, counts: RequestCounts) -> None:
    """Raises BadAnswer."""
    began_at = time.monotonic()
    try:
        status, body = await asyncio.wait_for(send(request), TIMEOUT_S)
    except TimeoutError:
        raise BadAnswer(request, "it did not end") from None
    except Exception as error:
        raise BadAnswer(request, f"{type(error).__name__}: {error}") from error
    counts.slowest_s = max(counts.slowest_s, time.monotonic() - began_at)
    counts.statuses[status] += 1
    counts.tried += 1
    if not 200 <= status < 500 and status not in _MAY_FAIL:
        raise BadAnswer(request, f"{status} {body[:300]!r}")
    if status >= 400 and request.method != "HEAD":
        try:
            answer = json.loads(body)
        except ValueError:
            raise BadAnswer(request, f"{status}, no JSON: {body[:300]!r}") from None
        said = answer.get("error", answer) if isinstance(answer, dict) else None
        if not (isinstance(said, dict) and "message" in said) or b"Traceback" in body:
            raise BadAnswer(request, f"{status}, no error object: {body[:300]!r}")


def fuzz(server: Simulated, *, count: int, seconds: float, seed: int, path: str | None = None,
         router: RouterProcess | None = None,
         is_stopped: Callable[[], bool] = lambda: False) -> RequestCounts:  # fmt: skip
    """Raises BadAnswer, AssertionError where something is left behind.

    `router`: one in front of the server, whose own description is taken. `is_stopped` is a way to
    end sooner.
    """
    if router is None:
        send: Send = partial(call, server.app)
        _, text = _on_loop(server, send(Request("GET", "/openapi.json", b"", [])))
    else:
        connections = Connections(router.port)
        send = connections.send
        _, text = _on_loop(server, send(Request("GET", "/openapi.json", b"", [(b"host", b"x")])))
    requests = Generator(json.loads(text), seed, path).requests()
    pids = [os.getpid(), *([] if router is None else [router.process.pid])]
    before: list[float] = []
    counts, ends_at = RequestCounts(), time.monotonic() + seconds

    async def ask_some(number: int) -> None:
        """Each of them by one of so many at a time."""
        some = islice(requests, number)

        async def one_by_one() -> None:
            for request in some:
                await check(send, request, counts)

        await asyncio.gather(*(one_by_one() for _ in range(AT_A_TIME)))

    while counts.tried < count and time.monotonic() < ends_at and not is_stopped():
        if not before and counts.tried > 1000:
            gc.collect()
            before = [_resident_mib(pid) for pid in pids]
        _on_loop(server, ask_some(BATCH))
        server.check_idle()
    if router is not None:
        _on_loop(server, connections.close())
    if before:
        gc.collect()
        growth = [_resident_mib(pid) - was for pid, was in zip(pids, before, strict=True)]
        counts.growth_mib, *counts.router_growth_mib = growth
        assert max(growth) <= GROWTH_MIB, counts
    return counts


def _resident_mib(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 2**20


def _on_loop(server: Simulated, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(2 * TIMEOUT_S)


def keep(request: Request) -> Path:
    folder = CORPUS.parent / "requests-that-failed"
    folder.mkdir(exist_ok=True)
    data = request.dump()
    path = folder / sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def main() -> int:
    from octavo_engine.server.settings import ServerSettings
    from tests.fakes.router_process import routing
    from tests.fakes.simulated import simulating

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--path", help="only routes whose path contains this")
    parser.add_argument("--router", action="store_true", help="with a router in front")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sys.stdout.write(f"seed {args.seed}\n")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(dev_mode=True, tokenizer_info=True, files_dir=folder)
        with (
            simulating(settings=settings) as server,
            routing("--upstreams", server.url) if args.router else nullcontext() as router,
        ):
            try:
                counts = fuzz(
                    server, count=args.count, seconds=args.seconds, seed=args.seed,
                    path=args.path, router=router, is_stopped=stopped.is_set,
                )  # fmt: skip
            except BadAnswer as error:
                sys.stdout.write(f"{error}\nkept in {keep(error.request)}\n")
                return 1
    sys.stdout.write(
        f"{counts.tried} requests, {dict(sorted(counts.statuses.items()))}, slowest"
        f" {counts.slowest_s:.2f} s, memory grown by {counts.growth_mib:.1f} MiB"
        f"{''.join(f', of the router by {mib:.1f} MiB' for mib in counts.router_growth_mib)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
