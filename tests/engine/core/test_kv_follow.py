"""A prompt that another engine is computing: its blocks come as they are computed, every token is
the truth of its prefix, and an engine that fails in the middle costs the rest of the computation.

Red when: blocks are sent only once the whole prompt is computed; what came before a failure is
thrown away; a prompt that never arrives there, or an engine that falls silent, holds the request.
"""

import random
import socket
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.core import kv_peers, kv_tiers
from octavo_engine.core.process import wire
from octavo_engine.state.kv_source import KVSource
from octavo_engine.tiers import block_server, peer_engine
from tests.engine.backends.driver import random_tokens
from tests.engine.core.test_kv_tiers import PagedBackend, run, tiny_backend
from tests.engine.core.test_kv_transfer import (
    BadWire,
    ask,
    greedy,
    load_always,  # noqa: F401  (a fixture)
    make_engine,
    running,
    transfer,
)
from tests.fakes.requests import make_prompt, make_request

STEP_TOKENS = 64  # of `make_engine`


class GatedBackend(PagedBackend):
    """Computes a step when the test lets it."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.gate = threading.Semaphore(0)
        self.is_open = True  # not gated while it warms up

    def execute(self, *args, **given):
        if not self.is_open:
            assert self.gate.acquire(timeout=20)
        return super().execute(*args, **given)

    def step(self, first):
        """Once the other engine waits for what the step adds."""
        until(lambda: first._tiers._own._follows)
        self.gate.release()

    def open(self):
        self.is_open = True
        self.gate.release()


def computing(source):
    return msgspec.structs.replace(source, is_computing=True)


@contextmanager
def following(prompt, *, num_tokens=4, windows=(None,)):
    """One engine begins a prompt, step by step; a second one follows it on a thread.

    Gives the first one's backend, the second engine, its backend, and a call that waits for its
    answer and returns how many tokens of the prompt it computed.
    """
    first_backend = GatedBackend(40, windows=windows)
    first, _, source = make_engine(transfer(), backend=first_backend, windows=windows)
    second, backend, _ = make_engine(transfer("kv_consumer"), windows=windows)
    first_backend.is_open = False
    computed = []
    thread = threading.Thread(
        target=lambda: computed.append(
            ask(second, backend, prompt, num_tokens, kv_source=computing(source))
        )
    )

    def answer():
        thread.join(20)
        assert computed, "no answer"
        return computed[0]

    with running(first) as inbox:
        inbox.put(wire.AddRequests([greedy(prompt, max_tokens=1)]))
        thread.start()
        try:
            yield first_backend, first, second, answer
        finally:
            first_backend.open()
            thread.join(20)
    second.close()


def num_followed(engine):
    """Blocks that have come so far."""
    fetches = list(engine._tiers._fetches.values())
    return sum(len(read.pages) for fetch in fetches for read in fetch.reads)


def until(is_true):
    end = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_blocks_come_while_the_prompt_is_computed(windows):
    prompt = make_prompt(230)
    with following(prompt, windows=windows) as (gated, first, second, answer):
        seen = 0
        for step in (1, 2, 3):
            gated.step(first)
            # After each step its blocks, one after the other; where windows overlap, some of them.
            whole = step * STEP_TOKENS // BLOCK_SIZE if windows == (None,) else seen + 1
            until(lambda whole=whole: num_followed(second) >= whole)
            seen = num_followed(second)
            if windows == (None,):
                assert seen == whole  # and not one more: the next step is not computed yet
        assert second.stats().queued_tokens == 0  # they are another engine's to compute
        gated.open()
        assert answer() == 230 - 224
        stats = second.stats().tiers
        assert stats.peer_hit_blocks >= 12 and stats.failed_reads == stats.peer_failures == 0


def test_an_engine_lost_in_the_middle_costs_the_rest(monkeypatch):
    prompt = make_prompt(200)
    with following(prompt) as (gated, first, second, answer):
        for number in (1, 2):
            gated.step(first)
            until(lambda number=number: num_followed(second) == number * 4)
        first._tiers._server.close()
        assert answer() == 200 - 128
        assert second.stats().tiers.peer_hit_blocks == 8


def test_a_prompt_that_is_aborted_there_costs_the_rest():
    prompt = make_prompt(200)
    with following(prompt) as (gated, first, second, answer):
        gated.step(first)
        until(lambda: num_followed(second) == 4)
        (sequence,) = first.scheduler.running
        sequence_id = sequence.request_id
        first.abort(sequence_id)  # between two steps: the gate holds the second one
        gated.open()
        assert answer() <= 200 - 64
        assert second.stats().tiers.peer_failures == 0


def test_a_prompt_that_never_arrives_is_computed(monkeypatch):
    monkeypatch.setattr(block_server, "ARRIVAL_S", 0.2)
    first, _, source = make_engine(transfer())
    second, backend, _ = make_engine(transfer("kv_consumer"))
    with running(first):
        assert ask(second, backend, make_prompt(100), kv_source=computing(source)) == 100
    assert second.stats().tiers.peer_failures == 0
    second.close()


def test_what_is_there_already_is_sent_at_once():
    first, first_backend, source = make_engine(transfer())
    prompt = make_prompt(100)
    ask(first, first_backend, prompt)
    second, backend, _ = make_engine(transfer("kv_consumer"))
    started_at = time.monotonic()
    with running(first):
        assert ask(second, backend, prompt, kv_source=computing(source)) == 100 - 96
        assert time.monotonic() - started_at < block_server.ARRIVAL_S
    second.close()


def test_an_engine_that_says_nothing_costs_a_computation(monkeypatch):
    monkeypatch.setattr(peer_engine, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = KVSource("127.0.0.1", listener.getsockname()[1], is_computing=True)
        engine, backend, _ = make_engine(transfer())
        assert ask(engine, backend, make_prompt(100), kv_source=source) == 100
    engine.close()


def test_an_engine_that_computes_too_slowly_is_left(monkeypatch):
    monkeypatch.setattr(kv_tiers, "LEAST_FOLLOW_S", 0.2)
    monkeypatch.setattr(kv_tiers, "PATIENCE", 0.0)
    monkeypatch.setattr(block_server, "SIGN_S", 0.05)
    with following(make_prompt(200)) as (gated, first, second, answer):
        gated.step(first)
        until(lambda: num_followed(second) == 4)
        assert answer() == 200 - 64  # the second step is still held
        # Its connection is closed, and the next prompt gets another one.
        lines = second._tiers._peers._followers.values()
        until(lambda: all(one.num_jobs == 0 for line in lines for one in line))


def test_an_aborted_request_leaves_the_prompt_to_others():
    prompt = make_prompt(200)
    first_backend = GatedBackend(40)
    first, _, source = make_engine(transfer(), backend=first_backend)
    second, _, _ = make_engine(transfer("kv_consumer"))
    first_backend.is_open = False
    with running(first) as inbox:
        inbox.put(wire.AddRequests([greedy(prompt, max_tokens=1)]))
        request = greedy(prompt, max_tokens=4, kv_source=computing(source))
        second.add(request)
        second.step()
        assert second._tiers.is_fetching
        second.abort(request.request_id)
        second.step()
        assert not second._tiers.is_fetching
        first_backend.open()
    second.close()


@pytest.mark.slow
def test_many_prompts_are_followed_a_few_at_a_time():
    first_backend = GatedBackend(400)
    first, _, source = make_engine(transfer(), backend=first_backend, num_blocks=400)
    second, backend, _ = make_engine(transfer("kv_consumer"), num_blocks=400)
    first_backend.is_open = False
    prompts = [make_prompt(150, first=number) for number in range(12)]
    requests = [greedy(p, max_tokens=3, kv_source=computing(source)) for p in prompts]
    with running(first) as inbox:
        for prompt in prompts:
            inbox.put(wire.AddRequests([greedy(prompt, max_tokens=1)]))
        threading.Timer(0.1, first_backend.open).start()
        tokens, _ = run(second, *requests, steps=10**6)
    for prompt, request in zip(prompts, requests, strict=True):
        assert tokens[request.request_id] == backend.continuation(prompt, 3)
    (line,) = second._tiers._peers._followers.values()
    assert len(line) == kv_peers.MAX_FOLLOWED
    assert second.stats().tiers.peer_hit_blocks == 12 * 9
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_random_lives_over_a_bad_wire_yield_only_true_tokens(monkeypatch, seed, windows):
    for module, name, value in (
        (kv_tiers, "LEAST_FOLLOW_S", 0.5), (peer_engine, "SILENCE_S", 0.3),
        (peer_engine, "MAX_RETRY_S", 0.0), (peer_engine, "REFUSED_RETRY_S", 0.0),
        (block_server, "ARRIVAL_S", 0.1), (block_server, "SIGN_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    chance = random.Random(seed)
    first, _, source = make_engine(transfer(), windows=windows, num_blocks=200)
    bad = BadWire(source.port, chance)
    there = msgspec.structs.replace
    engine, backend, _ = make_engine(transfer("kv_consumer"), windows=windows, num_blocks=40)
    with running(first) as inbox:
        for turn in range(12):
            requests = []
            for number in range(chance.randint(1, 4)):
                prompt = make_prompt(chance.randint(20, 190), first=100 * turn + number)
                if chance.random() < 0.9:
                    inbox.put(wire.AddRequests([greedy(prompt, max_tokens=1)]))
                request = make_request(prompt, max_tokens=chance.randint(1, 30), temperature=0.0)
                where = there(computing(source), port=bad.port)
                requests.append(msgspec.structs.replace(request, kv_source=where))
            tokens, endings = run(engine, *requests, steps=10**6)
            for request in requests:
                assert endings[request.request_id] == "length"
                wanted = backend.continuation(request.prompt_token_ids, request.params.max_tokens)
                assert tokens[request.request_id] == wanted
    assert engine.stats().tiers.peer_hit_blocks > 0
    bad.close()
    engine.close()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_real_models_say_the_same(family, dtype):
    prompt = random_tokens(150, seed=1)

    def answer(engine, **given):
        engine.add(greedy(prompt, max_tokens=8, logprobs=2, **given))
        outputs = []
        while engine.has_work:
            outputs += engine.step().outputs
        return [(output.token_ids, output.logprobs) for output in outputs]

    first, _, source = make_engine(transfer(), num_blocks=64, backend=tiny_backend(family, dtype))
    second, _, _ = make_engine(
        transfer("kv_consumer"), num_blocks=64, backend=tiny_backend(family, dtype)
    )
    alone, _, _ = make_engine(None, num_blocks=64, backend=tiny_backend(family, dtype))
    wanted = answer(alone)
    with running(first) as inbox:
        inbox.put(wire.AddRequests([greedy(prompt, max_tokens=1)]))
        assert answer(second, kv_source=computing(source)) == wanted
    assert second.stats().tiers.peer_hit_blocks >= 150 // BLOCK_SIZE
    second.close()
    alone.close()
