"""Requests made up from the server's own description, and what every answer to them must be."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from octavo_engine.protocol.endpoints import DRAIN_PATH, STREAM_PATH
from tests.fakes.bad_http import BAD_CHUNKS, BAD_REQUESTS, CHUNKED

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.fakes.simulated import Simulated

# One ends the process, one never ends, two stop its work; each has tests of its own.
LEFT_OUT = frozenset((DRAIN_PATH, STREAM_PATH, "/sleep", "/pause"))
MODES = {
    "positive": schemathesis.GenerationMode.POSITIVE,
    "negative": schemathesis.GenerationMode.NEGATIVE,
}
USER = [{"role": "user", "content": "hi"}]


class Contract:
    """An OpenAPI document as judge of answers. Fields that it does not name are not allowed."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._closed = {"components": {"schemas": _closed(document["components"]["schemas"])}}
        self._validators: dict[str, Any] = {}

    def operations(self) -> Iterator[tuple[str, str]]:
        for path, methods in self.document["paths"].items():
            for method in methods:
                yield method.upper(), path

    def check(self, method: str, path: str, answer: httpx.Response) -> None:
        """The status is one the document names, and so are the type and the shape of the body."""
        responses = self.document["paths"][path][method.lower()]["responses"]
        where = f"{method} {path} → {answer.status_code} {answer.text[:300]}"
        assert str(answer.status_code) in responses, f"status is not described: {where}"
        response = responses[str(answer.status_code)]
        if "$ref" in response:
            response = self.document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        content = response.get("content", {})
        media = answer.headers.get("content-type", "").partition(";")[0]
        if not content:
            assert answer.content == b"", where
            return
        assert media in content, f"type {media} is not described: {where}"
        if media == "text/event-stream":
            self._check_events(content[media]["x-event-schema"], answer.text, where)
        elif "schema" in content[media]:
            self._validate(content[media]["schema"], answer.json(), where)

    def _check_events(self, schema: dict[str, Any], text: str, where: str) -> None:
        *frames, end = text.removesuffix("\n\n").split("\n\n")
        if end.startswith("event: "):  # these have names, errors included, and end with the last
            for frame in (*frames, end):
                name, _, content = frame.removeprefix("event: ").partition("\ndata: ")
                data = json.loads(content)
                assert data["type"] == name, where
                self._validate(schema, data, where)
            return
        assert end == "data: [DONE]", where
        for frame in frames:
            data = json.loads(frame.removeprefix("data: "))
            is_error = "error" in data
            self._validate({"$ref": "#/components/schemas/Error"} if is_error else schema, data,
                           where)  # fmt: skip

    def _validate(self, schema: dict[str, Any], value: Any, where: str) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = jsonschema_rs.Draft202012Validator(schema | self._closed)
        errors = [f"{error.instance_path}: {error.message}"[:300]
                  for error in self._validators[key].iter_errors(value)]  # fmt: skip
        assert not errors, f"not as described: {errors[:3]} in {where}"


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(value) for key, value in schema.items()}
    if "properties" in result:
        result.setdefault("additionalProperties", False)
    return result


@dataclass
class Fuzz:
    """Sends what schemathesis makes up, and notes what it met."""

    server: Simulated
    client: httpx.Client
    contract: Contract
    base_url: str = ""  # of what stands in front of it
    statuses: dict[int, int] = field(default_factory=dict)
    _schema: Any = None
    _strategies: dict[tuple[str, str, str], Any] = field(default_factory=dict)

    def batch(self, method: str, path: str, mode: str, *, examples: int, number: int) -> None:
        """Some requests to one route; afterwards nothing is left of them."""
        if self._schema is None:
            self._schema = schemathesis.openapi.from_dict(self.contract.document)
        key = (method, path, mode)
        if key not in self._strategies:
            operation = self._schema[path][method]
            self._strategies[key] = operation.as_strategy(generation_mode=MODES[mode])
        chance = random.Random(number)

        @seed(number)
        @settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(self._strategies[key])
        def send(case: Any) -> None:
            self._send(case, path, chance, is_tame=mode == "positive" and chance.random() < 0.7)

        # A route without parameters has nothing that could be wrong.
        with contextlib.suppress(Unsatisfiable):
            send()
        self.server.check_idle()

    def _send(self, case: Any, path: str, chance: random.Random, *, is_tame: bool) -> None:
        if is_tame and isinstance(case.body, dict):
            case.body = tame(case.body, path, chance)
        wanted = case.as_transport_kwargs(base_url=self.base_url or self.server.url)
        wanted["headers"] = {
            name: value for name, value in wanted["headers"].items() if _is_sendable(name, value)
        }
        request = requests.Request(**wanted).prepare()
        body: Any = request.body
        headers: dict[str, Any] = dict(request.headers)
        answer = self.client.request(
            str(request.method), str(request.url), headers=headers, content=body
        )
        self.judge(answer, case.method.upper(), path)

    def judge(self, answer: httpx.Response, method: str, path: str) -> None:
        self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
        where = f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code < 500 or answer.status_code in (501, 503, 504), where
        if answer.status_code in (404, 405) and path not in str(answer.request.url):
            return  # what was put into the path made another path of it
        self.contract.check(method, path, answer)


def tame(body: dict[str, Any], path: str, chance: random.Random) -> dict[str, Any]:
    """So that more of it is served: few of the fields, and small numbers."""
    needed = {"messages", "prompt", "input", "query", "documents", "tokens", "text_1", "text_2",
              "token_ids", "queries", "max_tokens"}  # fmt: skip
    others = [name for name in body if name not in needed]
    kept = set(chance.sample(others, min(len(others), chance.randrange(3))))
    result = {name: value for name, value in body.items() if name in needed | kept}
    result.pop("model", None)
    if "responses" in path:
        result["input"] = chance.choice(("hi", USER))
    elif "chat" in path or "messages" in path:
        result["messages"] = USER
    elif "completions" in path:
        result["prompt"] = chance.choice(("once", ["once", "twice"], [5, 6, 7], "a" * 300))
    elif path == "/tokenize":
        result.pop("messages", None)
        result["prompt"] = "once"
    elif path == "/detokenize":
        result["tokens"] = [5, 6, 7]
    elif "generate" in path:
        result["token_ids"] = [5, 6, 7]
    if "completions" in path or "generate" in path or "messages" in path:
        result |= chance.choice(TOGETHER)
        if "chat" not in path:
            result.pop("top_logprobs", None)
    for name in ("max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs"):
        if isinstance(result.get(name), int) and not isinstance(result[name], bool):
            result[name] = result[name] % 9 + 1
    return result


TOGETHER: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"n": 3, "temperature": 1.0},
    {"stream": True, "n": 2, "stream_options": {"include_usage": True}},
    {"stop": ["a", "le"]},
    {"return_token_ids": True},
    {"response_format": {"type": "json_object"}, "max_tokens": 20},
    {"stream": True, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}},
)  # fmt: skip


def _is_sendable(name: str, value: Any) -> bool:
    """What no client library sends is sent as raw bytes elsewhere."""
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    return text == text.strip() and text.isascii() and text.isprintable() and name.isascii()


# ── bytes ──


def raw_requests(number: int, count: int) -> Iterator[bytes]:
    """Requests that no client means to send, and mutations of proper ones."""
    chance = random.Random(number)
    corpus = [*BAD_REQUESTS.values(), *(CHUNKED + chunk for chunk in BAD_CHUNKS.values())]
    body = json.dumps({"prompt": "once", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    corpus.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    corpus.append(
        head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    )
    corpus.append(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    corpus.append(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
    yield from corpus
    for _ in range(count):
        data = bytearray(chance.choice(corpus))
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[place : place + 1] = bytes([chance.randrange(256)])
                case 1:
                    del data[place : place + chance.randrange(1, 20)]
                case 2:
                    data[place:place] = chance.choice(
                        (b"\r\n", b"\x00", b"\n", b": ", b"0", b"\xff")
                    )
                case _:
                    data[place:place] = data[: chance.randrange(40)]
        yield bytes(data)


def send_raw(port: int, data: bytes) -> bytes:
    """What comes back until the server closes, once we have said all that we say."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                answer += chunk
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all was sent
        return answer


def check_raw(data: bytes, answer: bytes) -> None:
    """No 5xx but for the version of HTTP; and an error has the error object."""
    for line in answer.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 "):
            status = line.split()[1]
            assert status[:1] in (b"1", b"2", b"4") or status == b"505", (data, answer)
