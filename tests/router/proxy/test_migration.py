"""An engine drains, and its running streams go on elsewhere with their KV blocks.

Real engine processes; the router's memory of each stream leads it from one to the other.

Red when: the drained engine leaves before its blocks are fetched, finishes what could move, or the
one that goes on computes a token again whose keys and values were there.
"""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo_engine.config import BLOCK_SIZE
from tests.fakes.kv_transfer_flags import transfer
from tests.fakes.process import serving
from tests.router.proxy.test_resume_end_to_end import (
    COMPLETIONS,
    Stream,
    hot_memory,
    same,
    unbroken,
)

if TYPE_CHECKING:
    from octavo_router.proxy.resume import StreamMemory
    from tests.fakes.process import ServeProcess

pytestmark = pytest.mark.slow

SLOW_PROMPTS = ("--sim-prefill-token-ms", "2", "--sim-kv-blocks", "4096")
NUM_STREAMS = 32


@pytest.fixture(autouse=True)
def connections() -> None:
    """No router runs here: once is enough."""


class Moved:
    """One client's stream that two engines answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.memory: StreamMemory = hot_memory()
        self.relayed = b""
        self.num_sent = 0  # tokens of prompt and answer that the second engine was sent

    def begin(self, server: ServeProcess, begun: threading.Semaphore, wanted: int) -> None:
        """Until the engine ends it. `begun` is released after so many tokens."""
        content = json.dumps({**self.body, "stream": True}).encode()
        with Stream(server, COMPLETIONS, content) as stream:
            is_counted = False
            while data := stream.read():
                self.relayed += self.memory.feed(data)
                if not is_counted and self.memory.num_tokens >= wanted:
                    is_counted = True
                    begun.release()

    def go_on(self, server: ServeProcess) -> None:
        memory = self.memory
        assert memory.can_resume, memory.lost_with
        self.num_sent = memory.prompt_tokens + memory.num_tokens
        request = memory.resume_body(json.dumps({**self.body, "stream": True}).encode())
        memory.start_over()
        with Stream(server, COMPLETIONS, request, resumes=True) as stream:
            while data := stream.read():
                self.relayed += memory.feed(data)
        assert memory.is_done

    @property
    def num_blocks(self) -> int:
        """Of what was sent, but for the token whose KV nobody has computed yet."""
        return -(-(self.num_sent - 1) // BLOCK_SIZE)


def move(
    bodies: list[dict[str, Any]], first: ServeProcess, second: ServeProcess, *, wanted: int = 40
) -> list[Moved]:
    streams = [Moved(body) for body in bodies]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(streams)) as pool:

        def run(one: Moved) -> None:
            one.begin(first, begun, wanted)
            one.go_on(second)

        running = [pool.submit(run, one) for one in streams]
        for _ in streams:
            assert begun.acquire(timeout=60)
        first.process.terminate()
        for done in running:
            done.result(timeout=120)
    return streams


def metric(server: ServeProcess, name: str, labels: str = "") -> float:
    text = httpx.get(server.url + "/metrics").text
    found = re.search(rf"^{name}\{{.*{labels}.*\}} (\S+)$", text, re.M)
    return 0.0 if found is None else float(found[1])


def peer_hits(server: ServeProcess) -> float:
    return metric(server, "octavo_kv_tier_hit_blocks_total", 'tier="peer"')


def computed(server: ServeProcess) -> float:
    """Tokens of prompts that it did not find."""
    given = metric(server, "octavo_prompt_tokens_total")
    return given - metric(server, "octavo_prompt_tokens_cached_total")


def body(number: int, **more: Any) -> dict[str, Any]:
    prompt = f"{number:02} " + "one two three four " * 8
    return {"prompt": prompt, "seed": number, "max_tokens": 200, "ignore_eos": True, **more}


def test_streams_of_a_draining_engine_go_on_with_their_blocks():
    slow = ("--sim-step-base-ms", "10", *SLOW_PROMPTS, "--max-num-seqs", "64")
    quick = ("--sim-step-base-ms", "1", *SLOW_PROMPTS, "--max-num-seqs", "64")
    with (
        serving("m", *slow, *transfer("kv_both", migration_s=5)) as first,
        serving("m", *quick, *transfer("kv_both")) as second,
    ):
        bodies = [body(number) for number in range(NUM_STREAMS)]
        streams = move(bodies, first, second)
        assert first.wait() == 0
        assert peer_hits(second) == sum(one.num_blocks for one in streams)
        assert computed(second) == 0
        for one in streams:
            assert b"server_shutdown" not in one.relayed and one.memory.num_tokens == 200
            same(one.relayed, unbroken(second, COMPLETIONS, one.body, one.memory))


@pytest.mark.parametrize(
    "more",
    [{"n": 3}, {"temperature": 0.0}, {"prompt": ["a b c " * 20, "d e f " * 20]}],
    ids=["n", "greedy", "prompts"],
)
def test_all_kinds_of_answers_move(more):
    slow = ("--sim-step-base-ms", "10", *SLOW_PROMPTS)
    with (
        serving("m", *slow, *transfer("kv_both", migration_s=2)) as first,
        serving("m", *SLOW_PROMPTS, *transfer("kv_consumer")) as second,
    ):
        (one,) = move([body(7, **more)], first, second)
        assert first.wait() == 0 and peer_hits(second) > 0
        same(one.relayed, unbroken(second, COMPLETIONS, one.body, one.memory))


def test_an_engine_that_gets_no_blocks_computes_them():
    slow = ("--sim-step-base-ms", "10", *SLOW_PROMPTS)
    with (
        serving("m", *slow, *transfer("kv_producer", migration_s=1)) as first,
        serving("m") as second,
    ):
        (one,) = move([body(7)], first, second)
        assert first.wait() == 0 and peer_hits(second) == 0
        same(one.relayed, unbroken(second, COMPLETIONS, one.body, one.memory))
