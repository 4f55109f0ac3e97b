"""A client that disconnects frees its KV within two steps, whatever it had requested."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.config import SchedulerConfig, SimConfig
from octavo_engine.grammar import compiler as grammar_compiler
from tests.fakes.server import post
from tests.fakes.simulated import CONFIG, Simulated, simulating

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 400, "ignore_eos": True}
SLOW = CONFIG.replace(
    sim=SimConfig(kv_blocks=512, step_base_ms=4.0, time_scale=1.0),
    scheduler=SchedulerConfig(max_num_seqs=4, max_queue=64),
)


@dataclasses.dataclass
class Watched:
    """Steps of the core, counted; each abort and each step's leftovers noted with the count."""

    server: Simulated
    steps: int = 0
    aborted_at: int | None = None
    freed_at: int | None = None

    def __post_init__(self) -> None:
        core, engine = self.server.core, self.server.engine
        step, send_abort = core.step, engine._send_abort

        def counted() -> Any:
            output = step()
            self.steps += 1
            return output

        def noted(ids: Any, **how: Any) -> None:
            if self.aborted_at is None and ids:
                self.aborted_at = self.steps
            send_abort(ids, **how)

        core.step = counted
        engine._send_abort = noted  # type: ignore[method-assign,assignment]  # watched

    def num_sequences(self) -> int:
        return len(self.server.core.scheduler.sequences)

    def free(self) -> None:
        """Until no block is held; then nothing at all may be left."""
        leftovers = self.server.leftovers

        def is_free() -> bool:
            if leftovers()["blocks"] or self.num_sequences():
                return False
            self.freed_at = self.freed_at or self.steps
            return True

        self.server.until(is_free, "blocks freed")
        self.server.check_idle()


@pytest.fixture(scope="module")
def server() -> Iterator[Simulated]:
    with simulating(SLOW) as server:
        yield server


def ask(server: Simulated, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(post(path, json.dumps(LONG | body).encode()))
    return connection


@pytest.mark.parametrize("how", ["closes", "resets"])
@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        (COMPLETIONS, {"prompt": "a", "stream": True}, 1),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": "a", "n": 3, "temperature": 1.0}, 3),
        (COMPLETIONS, {"prompt": "a", "n": 3, "temperature": 1.0, "stream": True}, 3),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "stream": True}, 3),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 2),
        (COMPLETIONS, {"prompt": ["a", "b", "c", "d", "e", "f"]}, 3),  # the others wait for a row
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream": True}, 1),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_client_that_vanishes_frees_its_blocks_within_two_steps(
    server, path, body, sequences, how
):
    watched = Watched(server)
    connection = ask(server, path, body)
    server.until(lambda: watched.num_sequences() == sequences and watched.steps > 3, "running")
    assert server.leftovers()["blocks"] > 0

    if how == "resets":
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    watched.free()

    assert watched.aborted_at is not None
    assert watched.freed_at is not None
    assert watched.freed_at - watched.aborted_at <= 2


def test_a_client_that_waits_in_the_queue_leaves_it(server):
    watched = Watched(server)
    running = [ask(server, COMPLETIONS, {"prompt": "abcd"[i]}) for i in range(4)]
    server.until(lambda: len(server.core.scheduler.running) == 4, "all rows taken")
    waiting = ask(server, COMPLETIONS, {"prompt": "e"})
    server.until(lambda: len(server.core.scheduler.waiting) == 1, "queued")

    waiting.close()
    server.until(lambda: len(server.core.scheduler.waiting) == 0, "left the queue")
    assert len(server.core.scheduler.running) == 4  # the others go on
    for connection in running:
        connection.close()
    watched.free()


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing(server, monkeypatch):
    begun, may_go_on = threading.Event(), threading.Event()
    compile_ = grammar_compiler.GrammarCompiler._compile

    def slow(self: Any, *args: Any) -> Any:
        begun.set()
        assert may_go_on.wait(60)
        return compile_(self, *args)

    monkeypatch.setattr(grammar_compiler.GrammarCompiler, "_compile", slow)
    watched = Watched(server)
    body = {"prompt": "a", "response_format": {"type": "json_object"}}
    connection = ask(server, COMPLETIONS, body)
    assert begun.wait(60)
    server.until(lambda: len(server.core._grammars or ()) == 1, "compiling")

    connection.close()
    server.check_idle()  # while the compiler still works
    assert not may_go_on.is_set()
    may_go_on.set()
    assert watched.num_sequences() == 0


def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing(server):
    for body in (b'{"prompt": "a', b""):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        data = post(COMPLETIONS, b'{"prompt": "a"}')
        connection.sendall(data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + body)
        connection.close()
    server.check_idle()
