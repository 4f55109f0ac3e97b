"""The traffic of the router's benchmarks: which requests clients send, and what engines answer.

Everything comes from a `Mix` and a seed. `MIXES` is the data; to measure other traffic, add a row.
A request is made once and has a mark in its last message, which the load replaces by a number of
eight digits: no two requests of a run are the same, while their first parts are, as conversations
that share a system prompt.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from email.utils import formatdate
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK: Final = "@@@@@@@@"  # of a request's number
NUM_GROUPS: Final = 64  # system prompts
NUM_REQUESTS: Final = 512  # of `request_bytes`
MODELS: Final = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"bench"}]}'
_TEXT: Final = (
    "the counter is reset by holding its left key for a second page manual answer question desk "
    "please “quoted” naïve façade line\nbreak tab\there back\\slash 3.14 42 {brace} [list] "
    "which rule applies to customers in Zürich when an order was sent twice and paid once"
)
_WORDS: Final = _TEXT.split(" ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One kind of traffic, and how the router is set up for it."""

    name: str
    weight: float = 0.0  # in the figure over all mixes
    body_bytes: tuple[int, int] = (400, 9000)  # spread evenly over the orders of magnitude
    answer_bytes: tuple[int, int] = (60, 4000)  # of the text, in the same way
    streamed: float = 0.0  # share of requests
    events: tuple[int, int] = (4, 64)  # of a stream, one token each
    events_per_write: int = 4
    has_unique_answers: bool = True  # an id of its own and a `date` in every answer
    has_credentials: bool = True  # clients send a key, whether or not the router asks for one
    num_tenants: int = 0  # with keys whose rates are limited; 0: the router asks for no key
    uses_tls: bool = False  # between clients and router
    trace_ratio: float = 0.0  # share of requests whose spans go to a collector


MIXES: Final = {
    mix.name: mix
    for mix in (
        # What the benchmark was before: every head and every answer has the same bytes.
        Mix(
            name="uniform", body_bytes=(1300, 1300), answer_bytes=(31, 31),
            has_unique_answers=False, has_credentials=False,
        ),
        Mix(name="whole"),
        Mix(name="streams", streamed=1.0),
        Mix(name="plain", streamed=1 / 3, weight=0.6),
        Mix(name="tls", streamed=1 / 3, weight=0.2, uses_tls=True),
        Mix(name="keys", streamed=1 / 3, weight=0.2, num_tenants=16, trace_ratio=0.1),
    )
}  # fmt: skip


def key_of(tenant: int) -> str:
    return f"sk-bench-{tenant:04d}"


# -- requests


@dataclass(frozen=True, slots=True)
class Template:
    """One request, cut where its number goes."""

    before: bytes
    after: bytes

    def numbered(self, number: int) -> bytes:
        return b"%b%08d%b" % (self.before, number % 10**8, self.after)


def requests(mix: Mix, count: int, *, client: int = 0, seed: int = 0) -> list[Template]:
    """What one client sends, in its order. A client has one library, whose heads look alike."""
    rng = random.Random(seed * 1_000_003 + client)
    head = _UNIFORM if not mix.has_unique_answers else _LIBRARIES[client % len(_LIBRARIES)]
    key = key_of(client % mix.num_tenants) if mix.num_tenants else "EMPTY"
    credentials = f"Authorization: Bearer {key}\r\n" if mix.has_credentials else ""
    templates = []
    for _ in range(count):
        body = _body(mix, rng)
        lines = head.format(credentials=credentials, length=len(body), mark=MARK)
        before, after = body.split(MARK.encode())
        if MARK in lines:  # a request id
            lines = lines.replace(MARK, f"{rng.getrandbits(32):08x}")
        templates.append(Template(lines.encode() + before, after))
    return templates


def request_bytes(which: int, number: int) -> bytes:
    """One of `NUM_REQUESTS` whole requests without a stream, numbered."""
    return _some_requests()[which % NUM_REQUESTS].numbered(number)


@cache
def _some_requests() -> list[Template]:
    return requests(MIXES["whole"], NUM_REQUESTS)


def _body(mix: Mix, rng: random.Random) -> bytes:
    size = _between(mix.body_bytes, rng)
    group = min(int(rng.expovariate(8 / NUM_GROUPS)), NUM_GROUPS - 1)  # some are used far more
    texts = random.Random(group)
    messages = [
        {"role": "system", "content": f"Desk {group:04d}. " + _text(texts, min(size // 2, 3000))}
    ]
    if size > 2000:  # a conversation
        messages.append({"role": "user", "content": _text(texts, size // 8)})
        messages.append({"role": "assistant", "content": _text(texts, size // 8)})
    fields: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 16}
    if mix.has_unique_answers:
        fields |= {"temperature": 0.7, "user": f"user-{rng.randrange(10**6)}", "top_p": 0.95}
        fields = dict(rng.sample(sorted(fields.items()), rng.randint(3, len(fields))))
        fields = {"model": "m", "messages": messages} | fields
    if rng.random() < mix.streamed:
        fields["stream"] = True
        if rng.random() < 0.5:
            fields["stream_options"] = {"include_usage": True}
    if mix.has_unique_answers:
        fields = dict(rng.sample(list(fields.items()), len(fields)))
    question = {"role": "user", "content": f"Question {MARK}: "}
    messages.append(question)
    is_ascii = rng.random() < 0.5
    missing = size - len(_dump(fields, is_ascii=is_ascii))
    if mix.body_bytes[0] == mix.body_bytes[1]:
        question["content"] += "x" * missing
    else:
        question["content"] += _text(rng, missing)
    return _dump(fields, is_ascii=is_ascii)


def _dump(fields: dict[str, Any], *, is_ascii: bool) -> bytes:
    return json.dumps(fields, ensure_ascii=is_ascii, separators=(", ", ": ")).encode()


def _text(rng: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += " ".join(rng.choices(_WORDS, k=16)) + " "
    return text[: max(size, 1)]


def _between(bounds: tuple[int, int], rng: random.Random) -> int:
    low, high = bounds
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


_UNIFORM = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{credentials}"
    "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
)
_LIBRARIES = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip, deflate\r\n"
    "Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    "User-Agent: OpenAI/Python 1.51.0\r\nX-Stainless-Lang: python\r\n"
    "X-Stainless-Package-Version: 1.51.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
    "X-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.11.9\r\n{credentials}"
    "X-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\n"
    "Content-Length: {length}\r\n\r\n",
    "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: keep-alive\r\n"
    "{credentials}content-type: application/json\r\naccept: */*\r\naccept-language: *\r\n"
    "sec-fetch-mode: cors\r\nuser-agent: node\r\naccept-encoding: gzip, deflate\r\n"
    "content-length: {length}\r\n\r\n",
    # A gateway, which gives each request an id.
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n"
    "{credentials}Content-Type: application/json\r\nUser-Agent: Go-http-client/1.1\r\n"
    "X-Forwarded-For: 10.1.2.3\r\nX-Forwarded-Proto: https\r\nX-Request-Id: {mark}-0000\r\n"
    "Accept-Encoding: gzip\r\n\r\n",
)


# -- answers


class Answers:
    """What an engine answers: whole, or as a stream in several writes."""

    def __init__(self, mix: Mix, *, variants: int = 512, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._mix = mix
        self._count = 0
        self._whole = [_whole(mix, rng) for _ in range(variants)]
        self._streams = [_stream(mix, rng) for _ in range(variants)]
        self.renew_date()

    def renew_date(self) -> None:
        """Once a second, as servers do it."""
        now = formatdate(usegmt=True) if self._mix.has_unique_answers else ""
        self._date = f"date: {now}\r\nserver: uvicorn\r\n".encode()

    def _next_id(self) -> bytes:
        self._count += 1
        return b"%032x" % (self._count * 0x9E3779B97F4A7C15 % 2**128)

    def whole(self) -> bytes:
        """Head and body."""
        body = self._whole[self._count % len(self._whole)]
        number = self._next_id() if self._mix.has_unique_answers else b"0" * 32
        return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n%b\r\n%b" % (
            self._date, len(body) + 30, b"content-type: application/json\r\n", body % number,
        )  # fmt: skip

    def stream(self) -> Iterator[bytes]:
        """The pieces that are written one after the other."""
        first, *pieces = self._streams[self._count % len(self._streams)]
        number = self._next_id()
        yield b"HTTP/1.1 200 OK\r\n%bcontent-type: text/event-stream; charset=utf-8\r\n%b\r\n%b" % (
            self._date, b"transfer-encoding: chunked\r\n", first.replace(b"%s", number),
        )  # fmt: skip
        for piece in pieces:
            yield piece.replace(b"%s", number)


def _whole(mix: Mix, rng: random.Random) -> bytes:
    """With a place for the id."""
    size = _between(mix.answer_bytes, rng)
    message = {"role": "assistant", "content": _text(rng, size).replace("%", "")}
    count = 1 + size // 4
    answer = {
        "id": "chatcmpl-%s", "object": "chat.completion", "created": 1764000000, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 290, "completion_tokens": count, "total_tokens": 290 + count},
    }  # fmt: skip
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _stream(mix: Mix, rng: random.Random) -> list[bytes]:
    """Writes of several chunks, each an event, with places for the id."""
    count = _between(mix.events, rng)
    events = [_event({"content": rng.choice(_WORDS).replace("%", "") + " "}) for _ in range(count)]
    events.append(_event({}, finish_reason="stop"))
    events.append(b"data: [DONE]\n\n")
    # The first token alone, as it comes when the prompt was computed.
    steps = [1] + [mix.events_per_write] * (len(events) // mix.events_per_write + 1)
    ends = list(accumulate(steps))
    writes = [events[end - step : end] for step, end in zip(steps, ends, strict=True)]
    pieces = [b"".join(map(_chunk, write)) for write in writes if write]
    pieces[-1] += b"0\r\n\r\n"
    return pieces


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    event = {
        "id": "chatcmpl-%s", "object": "chat.completion.chunk", "created": 1764000000,
        "model": "m", "choices": [choice],
    }  # fmt: skip
    return b"data: %b\n\n" % json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _chunk(event: bytes) -> bytes:
    length = len(event) + 30 * event.count(b"%s")
    return b"%x\r\n%b\r\n" % (length, event)
