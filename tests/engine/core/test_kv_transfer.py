"""Two engines: what one computed the other gets, and every token is the truth of its prefix.

The backend's next token depends on every slot of the KV cache that is seen, so a block with another
one's bytes, or with none, is a wrong token.

Red when: a page is put into another block than was named; a wrong checksum is taken; a peer that
never answers holds a request; engines whose blocks differ exchange them; a partly filled block is
not sent, or more of its tokens are believed than it had; each sequence is a request of its own.
"""

import json
import queue
import random
import socket
import threading
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_peers, kv_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.core.loop import CoreLoop
from octavo_engine.core.process import wire
from octavo_engine.errors import ConfigError
from octavo_engine.kv.restore import place_blocks
from octavo_engine.protocol.prefix_hash import pack_tokens
from octavo_engine.state.kv_source import KVSource
from octavo_engine.tiers import peer_engine
from octavo_engine.tiers.page import block_name, tail_name
from octavo_engine.tiers.peer_wire import FrameKind, PeerChannel
from octavo_engine.tiers.price import is_worth_loading
from tests.engine.backends.driver import random_tokens
from tests.engine.core.test_kv_tiers import PagedBackend, run, run_some, tiny_backend
from tests.fakes.requests import make_prompt, make_request

MIB = 1 / 1024


@pytest.fixture(autouse=True)
def load_always(monkeypatch):
    """This backend computes quicker than any connection brings blocks."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(peer_engine, "RETRY_S", 0.0)


def transfer(role="kv_both", *, port=0, **extra):
    return json.dumps(
        {
            "kv_connector": "OctavoConnector", "kv_role": role, "kv_port": port,
            "kv_connector_extra_config": extra,
        }
    )  # fmt: skip


def make_engine(config, *, num_blocks=40, windows=(None,), name="m", backend=None, **settings):
    backend = backend or PagedBackend(num_blocks, windows=windows)
    engine, info = build_engine(
        EngineConfig(
            device="sim",
            served_model_names=(name,),
            max_model_len=256,
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            sim=SimConfig(kv_blocks=num_blocks),
            kv_transfer_config=config,
            **settings,
        ),
        backend=backend,
    )
    return engine, backend, info.kv_source


@contextmanager
def running(engine, *, closes=True):
    """In a thread of its own, as in a server; while it has no work it serves blocks."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    thread = threading.Thread(target=CoreLoop(engine, inbox, lambda message: None).run)
    thread.start()
    try:
        yield inbox
    finally:
        inbox.put(wire.Shutdown())
        thread.join(10)
        assert not thread.is_alive()
        if closes:
            engine.close()


def greedy(prompt, *, kv_source=None, **given):
    request = make_request(prompt, temperature=0.0, **given)
    return msgspec.structs.replace(request, kv_source=kv_source)


def ask(engine, backend, prompt, num_tokens=4, **given):
    """Its tokens are checked; returns how many of its prompt's were computed."""
    before = backend.num_tokens
    request = greedy(prompt, max_tokens=num_tokens, **given)
    tokens, _ = run(engine, request)
    assert tokens[request.request_id] == backend.continuation(prompt, num_tokens)
    return backend.num_tokens - before - (num_tokens - 1)


@pytest.mark.parametrize("windows", [(None,), (None, 40), (40,), (None, None, 24)])
@pytest.mark.parametrize("host", [0.0, MIB])
def test_a_prompt_computed_by_another_engine_is_loaded(windows, host):
    first, first_backend, source = make_engine(
        transfer("kv_producer"), windows=windows, kv_offloading_size=host
    )
    second, backend, none = make_engine(transfer("kv_consumer"), windows=windows)
    assert none is None
    prompt = make_prompt(100)
    assert ask(first, first_backend, prompt) == 100
    with running(first):
        assert ask(second, backend, prompt, kv_source=source) == 1
        stats = second.stats().tiers
        assert stats.peer_hit_blocks > 0 and stats.failed_reads == 0 and stats.peer_failures == 0
        assert stats.loaded_bytes == stats.peer_hit_blocks * backend.kv_bytes_per_block
        # What came is an ordinary hit from now on.
        assert ask(second, backend, [*prompt, 7, 8], kv_source=source) <= 7
    assert first.stats().tiers.served_bytes > 0
    second.close()


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_partly_filled_blocks_are_loaded_as_far_as_they_agree(windows):
    first, first_backend, source = make_engine(transfer(), windows=windows, num_blocks=200)
    second, backend, _ = make_engine(transfer(), windows=windows, num_blocks=200)
    for number, length in enumerate((5, 16, 40)):
        prompt = make_prompt(length, first=number)
        ask(first, first_backend, prompt, num_tokens=8)
        said = backend.continuation(prompt, 8)
        with_other = [*prompt, *said[:3], 98, 99]
        assert (length + 5) % BLOCK_SIZE > 4, "all differ in a partly filled block"
        with running(first, closes=False):
            # All but the last token was computed there, by no matter how far it went on.
            assert ask(second, backend, [*prompt, *said[:6]], kv_source=source) == 1
            # What follows other tokens than these is not taken.
            assert second.reset_prefix_cache()
            assert ask(second, backend, with_other, kv_source=source) == 2
            # The last one that was sampled there has never been computed.
            assert second.reset_prefix_cache()
            assert ask(second, backend, [*prompt, *said], kv_source=source) == 1
            assert ask(second, backend, [*prompt, *said, 1, 2], kv_source=source) <= 3
            assert second.reset_prefix_cache()
    first.close()
    second.close()


def test_the_last_block_of_a_stream_that_still_runs_is_sent():
    """Others may hear sooner than this engine that it has moved."""
    engine, backend, _ = make_engine(transfer())
    prompt = make_prompt(37)
    request = greedy(prompt, max_tokens=60)
    engine.add(request)
    own, sequence = engine._tiers._own, engine.scheduler.sequences[request.request_id]
    while engine.has_work:
        engine.step()
        num_tokens = sequence.num_computed_tokens
        place, count = divmod(num_tokens, BLOCK_SIZE)
        if not count or sequence.finish_reason is not None:
            continue
        said = [*prompt, *backend.continuation(prompt, 60)]
        tail = said[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE][:15]
        request = own.copy([tail_name(sequence.digests[place - 1], 0, pack_tokens(tail))])
        own.serve()
        (copied,) = request.wait(0.1)
        assert copied.num_tokens == count
        slots = copied.page.view(np.uint64)[:count]
        first = sequence.block_tables[0][place] * BLOCK_SIZE
        assert (slots == backend.kv.reshape(-1)[first : first + count]).all()
    engine.close()


def test_blocks_wanted_before_the_engine_runs_are_copied_when_it_does():
    engine, _, _ = make_engine(transfer())
    request = greedy(make_prompt(40), max_tokens=4)
    engine.add(request)
    digest = engine.scheduler.sequences[request.request_id].digests[0]
    while engine.has_work:
        engine.step()
    wanted = engine._tiers._own.copy([block_name(digest, 0)])
    with running(engine):
        (copied,) = wanted.wait(10.0)
    assert copied.num_tokens == BLOCK_SIZE


def test_blocks_come_while_long_prompts_are_before_the_sequence(monkeypatch):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 30.0)
    first, first_backend, source = make_engine(transfer(), num_blocks=200)
    prompt = make_prompt(100)
    ask(first, first_backend, prompt)
    second, backend, _ = make_engine(transfer(), num_blocks=200)
    others = [greedy(make_prompt(240, first=n), max_tokens=4) for n in (1, 2, 3)]
    for other in others:
        second.add(other)
    second.step()
    request = greedy(prompt, max_tokens=4, kv_source=source)
    second.add(request)
    assert request.request_id in second._tiers._fetches
    with running(first):
        before, deadline = backend.num_tokens, time.monotonic() + 30
        while second._tiers._fetches:
            assert time.monotonic() < deadline
            second._tiers.settle()
            time.sleep(0.001)
        tokens: list[int] = []
        while second.has_work:
            for output in second.step().outputs:
                tokens += output.token_ids if output.request_id == request.request_id else []
    assert tokens == backend.continuation(prompt, 4)
    assert backend.num_tokens - before == 3 * (240 + 3) - 64 + 1 + 3
    second.close()


def test_salted_partly_filled_blocks_are_found_only_by_their_own():
    first, first_backend, source = make_engine(transfer())
    second, backend, _ = make_engine(transfer())
    prompt = make_prompt(10)
    ask(first, first_backend, prompt, cache_salt="a")
    with running(first):
        assert ask(second, backend, prompt, kv_source=source, cache_salt="b") == 10
        assert ask(second, backend, prompt, kv_source=source, cache_salt="a") == 1
    second.close()


def test_sequences_that_wait_together_are_one_request(monkeypatch):
    """Each is admitted once its own blocks are there."""
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 30.0)
    first, first_backend, source = make_engine(transfer(), num_blocks=200)
    prompts = [make_prompt(100 + number, first=number) for number in range(4)]
    for prompt in prompts:
        ask(first, first_backend, prompt)
    second, backend, _ = make_engine(transfer(), num_blocks=200)
    sent, send = [], PeerChannel.send

    def noting(channel, kind, payload=b""):
        sent.append(kind)
        send(channel, kind, payload)

    monkeypatch.setattr(PeerChannel, "send", noting)
    requests = [greedy(prompt, max_tokens=4, kv_source=source) for prompt in prompts]
    with running(first):
        (peer,) = second._tiers._peers.candidates(source)
        gate = threading.Event()
        peer._submit(lambda channel: gate.wait(10), 10, lambda: None)
        begin, fetches = peer.fetch, second._tiers._fetches

        def open_gate(*args, **given):
            begin(*args, **given)
            if len(fetches) == 4:
                gate.set()

        monkeypatch.setattr(peer, "fetch", open_gate)
        tokens, _ = run(second, *requests)
    for request in requests:
        wanted = backend.continuation(request.prompt_token_ids, 4)
        assert tokens[request.request_id] == wanted
    assert sent.count(FrameKind.GET) == 1 and FrameKind.LOOKUP not in sent
    assert second.stats().tiers.peer_hit_blocks == 4 * 7
    second.close()


def test_memory_for_what_others_send_is_written_at_the_start(monkeypatch):
    """What was never written takes many times longer, and streams would wait for it."""
    loads = []

    class Noting(PagedBackend):
        def load_blocks(self, block_ids, pages):
            loads.append(list(block_ids))
            super().load_blocks(block_ids, pages)

    monkeypatch.setattr(kv_tiers, "TOUCHED_BYTES", 6 * PagedBackend.kv_bytes_per_block)
    engine, backend, _ = make_engine(transfer("kv_consumer"), backend=Noting(40))
    (touched,) = loads
    assert len(set(touched)) == 6
    ask(engine, backend, make_prompt(90))  # takes those first
    assert {block.id for block in engine.scheduler.kv.pool.blocks if block.parent} == set(touched)
    engine.close()
    loads.clear()
    engine, _, _ = make_engine(transfer("kv_producer"), backend=Noting(40))
    assert loads == []
    engine.close()


def test_engines_of_the_settings_are_looked_up_for_each_prompt(tmp_path):
    first, first_backend, source = make_engine(transfer(), kv_disk_path=str(tmp_path))
    peer = f"127.0.0.1:{source.port}"
    second, backend, _ = make_engine(transfer("kv_consumer", peers=[peer]), kv_offloading_size=MIB)
    prompt = make_prompt(100)
    ask(first, first_backend, prompt)
    first.reset_prefix_cache()  # what is on disk is served too
    first._tiers.stored[0].store.flush()
    with running(first):
        assert ask(second, backend, prompt) == 4
        assert ask(second, backend, make_prompt(40, first=9)) == 40
    assert second.stats().tiers.peer_hit_blocks == 6
    second.reset_prefix_cache()
    assert ask(second, backend, prompt) == 4  # the host tier keeps what came
    second.close()


def test_salted_requests_find_only_their_own():
    first, first_backend, source = make_engine(transfer())
    second, backend, _ = make_engine(transfer())
    ask(first, first_backend, make_prompt(64), cache_salt="a")
    with running(first):
        assert ask(second, backend, make_prompt(64), cache_salt="b", kv_source=source) == 64
        assert ask(second, backend, make_prompt(64), cache_salt="a", kv_source=source) < 64
    second.close()


@pytest.mark.parametrize("seed", [7, 8])
def test_two_engines_whose_blocks_differ_do_not_exchange_them(caplog, seed):
    first, first_backend, source = make_engine(transfer())
    second, backend, _ = make_engine(
        transfer(), **({"name": "n"} if seed == 7 else {"windows": (40,)})
    )
    prompt = make_prompt(64)
    ask(first, first_backend, prompt)
    with running(first):
        assert ask(second, backend, prompt, kv_source=source) == 64
    wanted = "sim differs" if seed == 7 else "layout differs"
    assert f"its KV blocks are not the same: {wanted}" in caplog.text
    assert second.stats().tiers.peer_failures == 1
    second.close()


@pytest.mark.parametrize(
    "given", [("right secret" * 2, "other secret" * 2), ("right secret" * 2, None)]
)
def test_engines_of_different_secrets_do_not_exchange_blocks(caplog, tmp_path, given):
    files = []
    for number, secret in enumerate(given):
        path = tmp_path / str(number)
        path.write_text(f"{secret}\n")
        files.append({} if secret is None else {"secret_file": str(path)})
    first, first_backend, source = make_engine(transfer(**files[0]))
    second, backend, _ = make_engine(transfer(**files[1]))
    third, third_backend, _ = make_engine(transfer(**files[0]))
    prompt = make_prompt(64)
    ask(first, first_backend, prompt)
    with running(first):
        assert ask(second, backend, prompt, kv_source=source) == 64
        assert "the secrets differ" in caplog.text
        assert ask(third, third_backend, prompt, kv_source=source) == 1
    second.close()
    third.close()


def test_without_a_secret_no_foreign_host_is_connected_to(caplog, monkeypatch):
    engine, backend, _ = make_engine(transfer("kv_consumer"))
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: pytest.fail("it did"))
    prompt = make_prompt(64)
    assert ask(engine, backend, prompt, kv_source=KVSource("192.0.2.1", 9)) == 64
    assert "without a secret_file" in caplog.text
    engine.close()


def test_an_engine_that_is_gone_costs_a_computation():
    first, first_backend, source = make_engine(transfer())
    ask(first, first_backend, make_prompt(100))
    first.close()
    engine, backend, _ = make_engine(transfer("kv_consumer"))
    started_at = time.monotonic()
    assert ask(engine, backend, make_prompt(100), kv_source=source) == 100
    assert time.monotonic() - started_at < 5
    assert engine.stats().tiers.peer_failures == 1
    engine.close()


def test_an_engine_that_does_not_copy_costs_a_computation(monkeypatch):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.1)
    first, first_backend, source = make_engine(transfer())
    prompt = make_prompt(100)
    ask(first, first_backend, prompt)
    second, backend, _ = make_engine(transfer())
    # It is not run: it says what it has, and copies nothing.
    started_at = time.monotonic()
    assert ask(second, backend, prompt, kv_source=source) == 100
    assert time.monotonic() - started_at < 5
    stats = second.stats().tiers
    assert stats.failed_reads >= 1 and stats.peer_hit_blocks == 0
    second.close()
    first.close()


def test_one_that_says_nothing_costs_a_computation(monkeypatch):
    monkeypatch.setattr(kv_peers, "LOOKUP_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = KVSource("127.0.0.1", listener.getsockname()[1])
        engine, backend, _ = make_engine(transfer())
        started_at = time.monotonic()
        assert ask(engine, backend, make_prompt(100), kv_source=source) == 100
        assert time.monotonic() - started_at < 2
    engine.close()


def test_what_is_slower_than_computing_is_not_looked_up(monkeypatch):
    monkeypatch.setattr(kv_tiers, "is_worth_loading", is_worth_loading)
    first, first_backend, source = make_engine(transfer())
    prompt = make_prompt(80)
    ask(first, first_backend, prompt)
    second, backend, _ = make_engine(transfer())
    peers = second._tiers._peers
    (peer,) = peers.candidates(source)
    for _ in range(50):
        peer.meter.observe(1, 3600.0)
    with running(first):
        assert ask(second, backend, prompt, kv_source=source) == 80
    assert second.stats().tiers.refused == 1
    second.close()


def test_prompts_of_one_engine_are_priced_with_those_before_them(monkeypatch):
    """Four prompts at once take four times as long; none is given up for that."""
    first, first_backend, source = make_engine(transfer(), num_blocks=200)
    prompts = [make_prompt(100, first=number) for number in range(4)]
    for prompt in prompts:
        ask(first, first_backend, prompt)
    second, backend, _ = make_engine(transfer(), num_blocks=200)
    prices, computed = [], []

    def price(*, load_s, recompute_s):
        prices.append(load_s)
        computed.append(recompute_s)
        return True

    peers, tiers = second._tiers._peers, second._tiers
    monkeypatch.setattr(second.scheduler._step_time, "prefill_s", float)
    with running(first):
        deadline = time.monotonic() + 5
        monkeypatch.setattr(kv_tiers, "is_worth_loading", price)
        (peer,) = peers.candidates(source)
        held = []
        monkeypatch.setattr(peer, "fetch", lambda *args, **given: held.append((args, given)))
        for prompt in prompts:
            second.add(greedy(prompt, max_tokens=1, kv_source=source))
        second.step()
        assert len(prices) == len(held) == len(tiers._fetches) == 4
        block_s = 7 * backend.kv_bytes_per_block / peer_engine.BYTES_PER_S
        # What came is copied into the pool.
        copied_s = tiers._host_meter.seconds(7 * backend.kv_bytes_per_block)
        latency_s = peer_engine.LATENCY_S + copied_s
        assert prices == pytest.approx([latency_s + (n + 1) * block_s for n in range(4)])
        # Without the other engine all four would be computed one after the other.
        assert computed == [99 + n * 7 * BLOCK_SIZE for n in range(4)]
        monkeypatch.undo()
        for args, given in held:
            peer.fetch(*args, **given)
        while second.has_work:
            assert time.monotonic() < deadline
            second.step()
    assert second.stats().tiers.peer_hit_blocks == 28
    second.close()


@pytest.mark.slow
def test_engines_that_requests_name_are_bounded():
    engine, backend, _ = make_engine(transfer("kv_consumer"))
    peers = engine._tiers._peers
    started_at = time.monotonic()
    for port in range(1, 3 * kv_peers.MAX_NAMED_PEERS):
        ask(engine, backend, make_prompt(20, first=port), kv_source=KVSource("127.0.0.1", port))
    assert len(peers._named) == kv_peers.MAX_NAMED_PEERS
    assert time.monotonic() - started_at < 10
    engine.close()


class BadWire:
    """Between two engines; what passes is delayed, cut or changed at random."""

    def __init__(self, port, chance):
        self._to, self._chance = port, chance
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                return
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source, sink):
        chance = self._chance
        left = chance.choice([1 << 30, chance.randrange(3000)])
        try:
            while data := source.recv(chance.choice([1, 100, 4096])):
                if chance.random() < 0.02:
                    changed = bytearray(data)
                    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                    data = bytes(changed)
                left -= len(data)
                if left < 0:
                    break
                sink.sendall(data)
        except OSError:
            pass
        source.close()
        sink.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_random_lives_over_a_bad_wire_yield_only_true_tokens(monkeypatch, seed, windows):
    # Whether it pays is another test's: what was measured on a busy machine decides it.
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.5)
    monkeypatch.setattr(kv_peers, "LOOKUP_S", 0.5)
    monkeypatch.setattr(peer_engine, "MAX_RETRY_S", 0.0)
    monkeypatch.setattr(peer_engine, "REFUSED_RETRY_S", 0.0)
    chance = random.Random(seed)
    first, first_backend, source = make_engine(transfer(), windows=windows, num_blocks=200)
    prefixes = [make_prompt(chance.randint(16, 150), first=i) for i in range(5)]
    for prefix in prefixes:
        ask(first, first_backend, prefix)
    bad = BadWire(source.port, chance)
    engine, backend, _ = make_engine(
        transfer("kv_consumer", peers=[f"127.0.0.1:{bad.port}"]), windows=windows, num_blocks=40
    )
    with running(first):
        for turn in range(12):
            run_some(engine, backend, prefixes, chance, turn)
    assert engine.stats().tiers.peer_hit_blocks > 0
    bad.close()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_running_streams_move_over_a_bad_wire_with_only_true_tokens(monkeypatch, seed, windows):
    """Their last blocks are partly filled, and written while they are fetched."""
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.5)
    monkeypatch.setattr(peer_engine, "MAX_RETRY_S", 0.0)
    monkeypatch.setattr(peer_engine, "REFUSED_RETRY_S", 0.0)
    num_tails = 0

    def count_tails(kv, sequence, turns):
        nonlocal num_tails
        placed = place_blocks(kv, sequence, turns)
        num_tails += sum(bool(turn.tail) for turn, _ in placed)
        return placed

    monkeypatch.setattr(kv_tiers, "place_blocks", count_tails)
    chance = random.Random(seed)
    first, _, source = make_engine(transfer(), windows=windows, num_blocks=60)
    bad = BadWire(source.port, chance)
    engine, backend, _ = make_engine(transfer("kv_consumer"), windows=windows, num_blocks=40)
    named = KVSource("127.0.0.1", bad.port)
    with running(first) as inbox:
        for turn in range(12):
            moved = []
            for number in range(chance.randint(1, 4)):
                prompt = make_prompt(chance.randint(1, 100), first=10 * turn + number)
                begun = greedy(prompt, max_tokens=60)
                inbox.put(wire.AddRequests([begun]))
                said = backend.continuation(prompt, chance.randint(1, 40))
                moved.append((begun, [*prompt, *said]))
            time.sleep(chance.choice([0.0, 0.01, 0.05]))
            if chance.random() < 0.5:
                inbox.put(wire.Abort([begun.request_id for begun, _ in moved]))
            requests = [greedy(p, max_tokens=chance.randint(1, 30), kv_source=named)
                        for _, p in moved]  # fmt: skip
            tokens, _ = run(engine, *requests)
            for request in requests:
                wanted = backend.continuation(request.prompt_token_ids, request.params.max_tokens)
                assert tokens[request.request_id] == wanted
    assert num_tails > 0 and engine.stats().tiers.peer_hit_blocks > num_tails
    bad.close()
    engine.close()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "torch"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_real_models_say_the_same_with_blocks_of_another_engine(family, dtype):
    prompt = random_tokens(100, seed=1)

    def answer(engine, **given):
        request = greedy(prompt, max_tokens=8, logprobs=2, **given)
        engine.add(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step().outputs
        return [(output.token_ids, output.logprobs) for output in outputs]

    engines = [
        make_engine(transfer(), num_blocks=64, backend=tiny_backend(family, dtype))
        for _ in range(2)
    ]
    (first, _, source), (second, _, _) = engines
    wanted = answer(first)
    with running(first):
        given = answer(second, kv_source=source)
    if dtype == "torch":  # its sums depend on how a prompt is cut into steps
        assert [tokens for tokens, _ in given] == [tokens for tokens, _ in wanted]
        scores = [[one.logprob for _, row in said for one in row] for said in (given, wanted)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    else:
        assert given == wanted
    assert second.stats().tiers.peer_hit_blocks >= 100 // BLOCK_SIZE
    second.close()


CASES = [
    ({"kv_connector": "OctavoConnector"}, "needs the fields kv_connector and kv_role"),
    ({"kv_connector": "OctavoConnector", "kv_role": "x"}, "kv_role must be one of kv_producer"),
    ({"kv_ip": "0.0.0.0"}, "kv_ip other than 127.0.0.1 needs secret_file"),
    ({"kv_port": 70000}, "kv_port must be from 0 to 65535"),
    ({"kv_rank": 1}, "unknown field kv_rank"),
    ({"peers": []}, "peers belongs in kv_connector_extra_config"),
    ({"kv_connector_extra_config": {"peers": ["a"]}}, "peers must be a list of up to 16 HOST:PORT"),
    ({"kv_connector_extra_config": {"x": 1}}, "unknown field x"),
    ({"kv_connector_extra_config": {"migration_s": 61}}, "migration_s must be from 0 to 60"),
    ({"kv_connector_extra_config": {"migration_s": True}}, "migration_s must be from 0 to 60"),
    (
        {"kv_role": "kv_consumer", "kv_connector_extra_config": {"migration_s": 1}},
        "migration_s needs an engine that serves blocks",
    ),
    ({"kv_connector_extra_config": 1}, "kv_connector_extra_config must be an object"),
    ({"kv_buffer_device": "cuda"}, "kv_buffer_device must be cpu"),
]


@pytest.mark.parametrize(("given", "message"), CASES)
def test_settings_that_cannot_work_are_refused(given, message):
    if "kv_connector" not in given:
        given = {"kv_connector": "OctavoConnector", "kv_role": "kv_both", **given}
    with pytest.raises(ConfigError, match=message):
        EngineConfig(kv_transfer_config=json.dumps(given))


def test_what_cannot_be_served_or_read_is_refused_at_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot be served on 127.0.0.1:{port}"):
            make_engine(transfer(port=port))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_engine(transfer(secret_file=str(tmp_path / "none")))
    (tmp_path / "short").write_text("short")
    with pytest.raises(ConfigError, match="at least 16 bytes; it has 5"):
        make_engine(transfer(secret_file=str(tmp_path / "short")))
    with pytest.raises(ConfigError, match="--kv-transfer-config needs --enable-prefix-caching"):
        EngineConfig(
            kv_transfer_config=transfer(), scheduler=SchedulerConfig(enable_prefix_caching=False)
        )
