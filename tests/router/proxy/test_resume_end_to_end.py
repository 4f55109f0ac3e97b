"""Engines are killed in the middle of their streams; the client's stream knows nothing of it.

Real engine processes, real sockets, SIGKILL. The joined stream is compared with one that the
surviving engine gives for the same seed without a break.
"""

from __future__ import annotations

import http.client
import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil
import pytest

from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_router.proxy.resume import StreamMemory
from octavo_router.residency import native
from tests.engine.server.generation.test_resume import reported
from tests.fakes.process import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.process import ServeProcess

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Stream:
    """A request that a router sent, and what comes back over one connection."""

    def __init__(
        self, server: ServeProcess, path: str, content: bytes, *, resumes: bool = False
    ) -> None:
        host = server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=60)
        headers = {"content-type": "application/json", STREAM_HEADER: "tokens"}
        if resumes:
            headers[RESUME_HEADER] = "1"
        self._connection.request("POST", path, content, headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()

    def read(self) -> bytes:
        """What has come; empty at the end, however that came about."""
        try:
            return self._answer.read1(1 << 16)
        except (http.client.IncompleteRead, ConnectionError):
            return b""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()


def hot_memory() -> StreamMemory:
    hot = native.load()
    return StreamMemory(hot.split_token_lines, hot.find_event_end)


Kill: TypeAlias = "tuple[int, Callable[[], object]]"  # after so many bytes of its stream, how


def play(
    servers: list[ServeProcess], path: str, body: dict[str, Any], kills: list[Kill]
) -> tuple[bytes, StreamMemory]:
    """The stream that a client gets while all servers but the last die one after the other."""
    content = json.dumps({**body, "stream": True}).encode()
    memory, relayed = hot_memory(), b""
    for server, kill in zip(servers, [*kills, None], strict=True):
        request = memory.resume_body(content) if memory.can_resume else content
        memory.start_over()
        seen = 0
        with Stream(server, path, request, resumes=memory.can_resume) as stream:
            while data := stream.read():
                relayed += memory.feed(data)
                seen += len(data)
                if kill is not None and seen >= kill[0]:
                    kill[1]()
                    kill = None
        if memory.missing:
            return relayed + memory.missing, memory
    return relayed, memory


def unbroken(server: ServeProcess, path: str, body: dict[str, Any], memory: StreamMemory) -> bytes:
    """What the client should have got: the engine's own answer for the seed that was in use."""
    frame = memory.resume_body(b"")[4:]
    with Stream(server, path, json.dumps({**body, "stream": True}).encode()) as stream:
        raw = b""
        while data := stream.read():
            raw += data
    whole = hot_memory()
    clean = whole.feed(raw)
    assert whole.is_done
    return clean.replace(whole.id.encode(), json.loads(frame)["id"].encode())


def same(one: bytes, other: bytes) -> None:
    """But for the time of day and for when its pieces came."""
    first, second = reported(one), reported(other)
    assert len(first.pop("heads")) == len(second.pop("heads")) == 1
    del first["steps"], second["steps"]
    assert first == second
    assert all(choice["ends"] for choice in first["choices"].values())


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_engines_cost_nobody_an_answer(seed):
    rng = random.Random(seed)
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "n": 2,
        "seed": 2**40 + seed,
        "max_tokens": 80,
        "logprobs": True,
        "stop": ["zebra"],
        "stream_options": {"include_usage": True},
    }
    with ExitStack() as stack:
        flags = ("m", "--sim-step-base-ms", "3")
        servers = [stack.enter_context(serving(*flags)) for _ in range(4)]
        kills: list[Kill] = [
            (rng.randrange(1, 12_000), server.process.kill) for server in servers[:-1]
        ]
        relayed, memory = play(servers, CHAT, body, kills)
        assert memory.is_done and memory.num_tokens == 160
        same(relayed, unbroken(servers[-1], CHAT, body, memory))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "maxItems": 20,
                   "minItems": 12, "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "greet", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
    ids=["grammar", "tool call"],
)  # fmt: skip
def test_an_answer_that_must_follow_a_grammar_goes_on_where_it_was(more):
    """The engine that takes over has to be at the same place of the grammar."""
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "seed": 77,
        "max_tokens": 120,
        "stream_options": {"include_usage": True},
        **more,
    }
    with ExitStack() as stack:
        flags = ("m", "--sim-step-base-ms", "3")
        servers = [stack.enter_context(serving(*flags)) for _ in range(3)]
        first, second, last = servers
        kills: list[Kill] = [(2500, first.process.kill), (1500, second.process.kill)]
        relayed, memory = play(servers, CHAT, body, kills)
        assert memory.is_done and memory.num_tokens > 20
        assert first.process.poll() is not None and second.process.poll() is not None
        same(relayed, unbroken(last, CHAT, body, memory))


def test_the_core_of_a_real_engine_is_killed_and_another_one_goes_on():
    """The API process lives and says engine_dead inside the stream; the client does not hear it."""
    flags = ("demo://smollm2", "--device", "cpu", "--kv-cache-memory-bytes", "64MiB")
    body = {
        "prompt": "My favourite animals are 🦊 and",
        "n": 2,
        "seed": 12,
        "max_tokens": 40,
        "repetition_penalty": 1.1,
        "logprobs": 1,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with serving(*flags) as first, serving(*flags) as second:
        (core,) = psutil.Process(first.process.pid).children()
        relayed, memory = play([first, second], COMPLETIONS, body, [(5_000, core.kill)])
        assert first.process.poll() is None and b"engine_dead" not in relayed
        assert memory.is_done and memory.num_tokens == 80
        same(relayed, unbroken(second, COMPLETIONS, body, memory))


def test_what_a_drain_cuts_short_goes_on_elsewhere():
    """The first engine says that it must go; nobody but the router hears of it."""
    body = {"prompt": ["a", "b"], "seed": 3, "max_tokens": 100}
    with (
        serving("m", "--sim-step-base-ms", "10", "--shutdown-timeout", "0.1") as first,
        serving("m", "--sim-step-base-ms", "3") as second,
    ):
        leave = (2_000, first.process.terminate)
        relayed, memory = play([first, second], COMPLETIONS, body, [leave])
        assert first.wait() == 0
        assert memory.is_done and b"server_shutdown" not in relayed
        same(relayed, unbroken(second, COMPLETIONS, body, memory))
