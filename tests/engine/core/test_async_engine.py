"""The engine over asyncio, its core in a thread: streams, slow readers, cancellation, drain."""

import asyncio
import dataclasses
import itertools
import threading
import time
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.build import build_engine
from octavo_engine.core.process import wire
from octavo_engine.core.process.in_process_client import InProcessClient
from octavo_engine.core.text.resumed import ResumedOutput
from octavo_engine.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
)
from octavo_engine.kv import manager
from octavo_engine.protocol import prefix_hash
from octavo_engine.protocol.loading import LoadProgress
from octavo_engine.state.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes.backend import FakeBackend
from tests.fakes.generate import generate
from tests.fakes.requests import make_prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_config(**scheduler):
    return EngineConfig(
        device="sim",
        max_model_len=512,
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_queue": 500, **scheduler}),
        sim=SimConfig(kv_blocks=256, time_scale=0.0),
    )


SLOW = dataclasses.replace(make_config(), sim=SimConfig(kv_blocks=256, step_base_ms=20.0))


class Running:
    """`async with Running(backend) as engine`: ready on entry, stopped on exit."""

    def __init__(self, backend=None, config=None):
        build = build_engine if backend is None else partial(build_engine, backend=backend)
        self.connect = partial(InProcessClient, build=build)
        self.config = config or make_config()

    async def __aenter__(self):
        self.engine = await AsyncEngine.start(self.config, connect=self.connect)
        await self.engine.ready()
        return self.engine

    async def __aexit__(self, *_):
        await self.engine.stop()


class Gate:
    """Holds the core at the beginning of each step, while closed, until let on."""

    def __init__(self, backend, *, closed=False):
        self.reached, self._permits = threading.Event(), threading.Semaphore(0)
        self.closed = closed
        backend.on_execute = self

    def __call__(self, step):
        if self.closed:
            self.reached.set()
            assert self._permits.acquire(timeout=20)

    def let_one_step_on(self):
        """If one waits."""
        if self.reached.is_set():
            self.reached.clear()
            self._permits.release()

    def open(self):
        self.closed = False
        self._permits.release()


def run(test):
    asyncio.run(asyncio.wait_for(test, 120))


async def until(fact):
    async with asyncio.timeout(60):
        while not fact():  # noqa: ASYNC110  (facts of another thread)
            await asyncio.sleep(0.002)


async def collect(engine, prompt, params=GREEDY, **options):
    """Each answer's text and tokens by index, and the last output."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    last = None
    async for last in generate(engine, prompt, params, **{"request_id": "r", **options}):
        for output in last.outputs:
            texts[output.index] = texts.get(output.index, "") + output.text
            tokens[output.index] = tokens.get(output.index, []) + output.token_ids
    return texts, tokens, last


def test_streamed_and_whole_answers_are_the_same_and_true():
    async def test():
        backend = FakeBackend(256)
        async with Running(backend) as engine:
            for length in (1, 15, 16, 17, 100):
                prompt = make_prompt(length, first=length)
                texts, tokens, last = await collect(engine, prompt)
                whole = [
                    o async for o in generate(engine, prompt, GREEDY, request_id="w", stream=False)
                ]
                assert len(whole) == 1 and whole[0].finished and last.finished
                assert (
                    tokens[0] == backend.continuation(prompt, 12) == whole[0].outputs[0].token_ids
                )
                assert texts[0] == whole[0].outputs[0].text
                assert whole[0].outputs[0].num_tokens == 12

    run(test())


def test_the_end_that_only_the_tokenizer_knows_ends_an_answer_too():
    """Of fine-tuned models config.json often names the base model's end alone."""

    async def test():
        backend, prompt = FakeBackend(256), make_prompt(9)
        async with Running(backend) as engine:
            truth = backend.continuation(prompt, 3)
            assert truth[-1] not in (*engine.info.eos_token_ids, *truth[:-1])
            engine.tokenizer.eos_token_ids = (truth[-1],)
            params = SamplingParams(temperature=0.0, max_tokens=12)
            _, tokens, last = await collect(engine, prompt, params)
            assert tokens[0] == truth
            assert last.outputs[0].finish_reason == "stop"

    run(test())


def test_two_hundred_at_once_each_get_their_own():
    async def test():
        backend = FakeBackend(256)
        async with Running(backend) as engine:
            prompts = [make_prompt(5 + i % 30, first=i) for i in range(200)]
            answers = await asyncio.gather(
                *(collect(engine, p, stream=bool(i % 2)) for i, p in enumerate(prompts))
            )
            for prompt, (_, tokens, _) in zip(prompts, answers, strict=True):
                assert tokens[0] == backend.continuation(prompt, 12)
            assert engine.num_in_flight == 0
            assert engine.stats.num_running == engine.stats.num_waiting == 0
            assert engine.stats.generation_tokens == 200 * 12

    run(test())


def test_a_stop_string_across_tokens_ends_the_answer_and_its_sequence():
    async def test():
        async with Running() as engine:
            seeded = SamplingParams(seed=4, max_tokens=60)
            texts, _, _ = await collect(engine, "tell me", seeded)
            stop = texts[0][20:27]
            params = SamplingParams(seed=4, max_tokens=60, stop=(stop,))
            stopped, tokens, last = await collect(engine, "tell me", params)
            assert stopped[0] == texts[0][: texts[0].find(stop)]
            assert last.outputs[0].stop_reason == stop
            assert len(tokens[0]) == texts[0].find(stop) + 7
            await until(lambda: engine.stats.num_running == 0)

    run(test())


def test_n_answers_come_in_one_stream_and_differ():
    async def test():
        async with Running() as engine:
            params = SamplingParams(n=3, seed=1, max_tokens=30)
            texts, tokens, _ = await collect(engine, "hi", params)
            assert sorted(texts) == [0, 1, 2] and len(set(texts.values())) == 3
            assert all(len(t) == 30 for t in tokens.values())
            alone, _, _ = await collect(engine, "hi", SamplingParams(seed=1, max_tokens=30))
            assert alone[0] == texts[0]

    run(test())


def test_the_prompt_of_n_answers_is_sent_and_named_once(monkeypatch):
    hashed: list[int] = []
    chain = prefix_hash.chain_digests

    def spy(parent, token_ids, **options):
        hashed.append(len(token_ids))
        return chain(parent, token_ids, **options)

    monkeypatch.setattr(manager, "chain_digests", spy)

    async def test():
        async with Running() as engine:
            sent: list[int] = []
            send = engine._client.send

            def counted(message):
                sent.append(len(wire.encode(message)))
                send(message)

            monkeypatch.setattr(engine._client, "send", counted)
            prompt = make_prompt(320)
            hashed.clear()
            _, one, _ = await collect(engine, prompt, GREEDY)
            _, many, _ = await collect(engine, prompt, msgspec.structs.replace(GREEDY, n=20))
            assert list(many.values()) == [one[0]] * 20
            assert sum(hashed) < 2 * 320 + 20 * 16  # of each prompt once; then what is left over
            assert sent[1] < sent[0] + 20 * 150

    run(test())


def test_a_slow_reader_loses_nothing_and_gets_larger_pieces():
    async def test():
        backend = FakeBackend(256)
        gate = Gate(backend)
        async with Running(backend) as engine:
            gate.closed = True
            stream = generate(engine, [1, 2, 3], GREEDY, request_id="slow")
            first_news = asyncio.ensure_future(anext(stream))
            assert await asyncio.to_thread(gate.reached.wait, 10)
            gate.let_one_step_on()
            first = await first_news
            assert len(first.outputs[0].token_ids) == 1
            gate.open()
            await until(lambda: engine.stats.generation_tokens == 12)
            second = await anext(stream)
            assert second.finished
            tokens = first.outputs[0].token_ids + second.outputs[0].token_ids
            assert tokens == backend.continuation([1, 2, 3], 12)
            await stream.aclose()

    run(test())


@pytest.mark.slow
def test_a_reader_that_stands_still_holds_no_row_and_no_memory(monkeypatch):
    """Its sequence goes on where it was, token for token, once it reads again."""
    monkeypatch.setattr("octavo_engine.core.text.output_stream.SUSPEND_AFTER_S", 0.05)

    async def test():
        backend = FakeBackend(256)
        backend.on_execute = lambda step: time.sleep(0.005)
        async with Running(backend, make_config(max_num_seqs=1)) as engine:
            long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
            stream = generate(engine, [1, 2, 3], long, request_id="slow")
            news = [await anext(stream)]
            await until(lambda: engine.stats.num_running == engine.stats.kv_blocks_used == 0)
            done = engine.stats.generation_tokens
            assert done < 200
            _, other, _ = await collect(engine, [5], GREEDY)  # the only row is free
            assert other[0] == backend.continuation([5], 12)
            news += [piece async for piece in stream]
            assert [t for piece in news for t in piece.outputs[0].token_ids] == (
                backend.continuation([1, 2, 3], 200)
            )
            still = generate(engine, [1, 2, 3], long, request_id="leaves")
            await anext(still)
            await until(lambda: engine.stats.num_running == 0)
            await still.aclose()
            await until(lambda: not engine.stats.kv_blocks_used and engine.num_in_flight == 0)

    run(test())


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_closing_the_iterator_aborts_in_the_core(phase):
    async def test():
        backend = FakeBackend(256)
        gate = Gate(backend)
        async with Running(
            backend, make_config(max_num_seqs=1, max_num_batched_tokens=16)
        ) as engine:
            long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
            if phase == "waiting":
                first = generate(engine, [9], long, request_id="first")
                await anext(first)
            gate.closed = phase != "decode"
            stream = generate(engine, make_prompt(100), long, request_id="victim")
            pending = asyncio.ensure_future(anext(stream))
            if phase == "prefill":
                assert await asyncio.to_thread(gate.reached.wait, 10)
            elif phase == "waiting":
                await until(lambda: gate.let_one_step_on() or engine.stats.num_waiting == 1)
            else:
                await pending
                pending = asyncio.ensure_future(anext(stream))
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            await stream.aclose()
            if phase == "waiting":
                await until(lambda: gate.let_one_step_on() or engine.stats.num_waiting == 0)
                assert engine.stats.num_running == 1
                await first.aclose()
            gate.open()
            await until(lambda: engine.stats.num_running == 0)
            assert engine.stats.kv_blocks_used == 0 and engine.num_in_flight == 0
            assert (await collect(engine, [5]))[1][0] == backend.continuation([5], 12)

    run(test())


def test_abort_by_id_ends_all_of_that_id_with_what_they_have():
    async def test():
        async with Running(config=SLOW) as engine:
            params = SamplingParams(max_tokens=400, n=2)
            streams = [generate(engine, "hi", params, request_id="same") for _ in range(2)]
            for stream in streams:
                await anext(stream)
            assert await engine.abort("same") is True
            for stream in streams:
                last = [output async for output in stream][-1]
                assert last.finished
            assert await engine.abort("same") is False
            await until(lambda: engine.stats.num_running == 0)

    run(test())


def test_bad_requests_are_refused_before_they_reach_the_core():
    async def test():
        async with Running() as engine:
            steps = engine.stats.steps
            for prompt, params, kind in (
                ([], GREEDY, InvalidRequest),
                ([512], GREEDY, InvalidRequest),
                ([1] * 512, GREEDY, ContextLengthExceeded),
                ("hi", SamplingParams(max_tokens=512), ContextLengthExceeded),
            ):
                with pytest.raises(kind):
                    await collect(engine, prompt, params)
            assert engine.stats.steps == steps and engine.num_in_flight == 0

    run(test())


def test_what_cannot_be_sent_to_the_core_leaves_nothing_behind(monkeypatch):
    async def test():
        async with Running() as engine:

            def send(message):
                if isinstance(message, wire.AddRequests):
                    raise wire.WireError("too large")

            monkeypatch.setattr(engine._client, "send", send)
            with pytest.raises(InvalidRequest, match="cannot be sent to the engine"):
                await collect(engine, "hi")
            assert engine.num_in_flight == 0 and not len(engine._outputs)
            assert await engine.drain(0.5)

    run(test())


def test_a_full_queue_refuses_one_request_and_serves_the_others():
    async def test():
        backend = FakeBackend(256)
        gate = Gate(backend)
        async with Running(backend, make_config(max_num_seqs=1, max_queue=2)) as engine:
            gate.closed = True
            first = asyncio.ensure_future(collect(engine, [1]))
            assert await asyncio.to_thread(gate.reached.wait, 10)
            rest = [asyncio.ensure_future(collect(engine, [2 + i])) for i in range(4)]
            await until(lambda: engine.num_in_flight == 5)
            gate.open()
            answers = await asyncio.gather(first, *rest, return_exceptions=True)
            refused = [a for a in answers if isinstance(a, QueueFull)]
            assert len(refused) == 2 and all(r.retry_after_s for r in refused)
            assert sum(isinstance(a, tuple) for a in answers) == 3

    run(test())


def test_not_a_number_fails_its_request_alone():
    async def test():
        backend = FakeBackend(256)
        async with Running(backend) as engine:
            backend.fail_after([1, 2, 3, *backend.continuation([1, 2, 3], 4)])
            good = asyncio.ensure_future(collect(engine, [7, 7]))
            got = []
            with pytest.raises(GenerationFailed):
                async for output in generate(engine, [1, 2, 3], GREEDY, request_id="bad"):
                    got += output.outputs[0].token_ids
            assert got == backend.continuation([1, 2, 3], 4)
            assert (await good)[1][0] == backend.continuation([7, 7], 12)

    run(test())


def test_a_passed_deadline_ends_a_waiting_request():
    async def test():
        backend = FakeBackend(256)
        gate = Gate(backend)
        async with Running(backend, make_config(max_num_seqs=1)) as engine:
            gate.closed = True
            first = asyncio.ensure_future(collect(engine, [1]))
            assert await asyncio.to_thread(gate.reached.wait, 10)
            late = asyncio.ensure_future(collect(engine, [2], deadline_s=0.0))
            await until(lambda: engine.num_in_flight == 2)
            gate.open()
            with pytest.raises(DeadlineExceeded):
                await late
            assert (await first)[1][0] == backend.continuation([1], 12)

    run(test())


def test_a_resumed_answer_goes_on_where_it_broke():
    async def test():
        async with Running() as engine:
            params = SamplingParams(seed=9, max_tokens=40)
            texts, tokens, _ = await collect(engine, "go", params)
            for cut in (1, 17, 39):
                reported = [ResumedOutput(tokens[0][:cut])]
                rest, more, last = await collect(engine, "go", params, resumed=reported)
                assert tokens[0][:cut] + more[0] == tokens[0]
                assert texts[0].endswith(rest[0]) and len(rest[0]) == 40 - cut
                assert last.outputs[0].num_tokens == 40

    run(test())


def test_cached_prompt_tokens_are_reported():
    async def test():
        async with Running() as engine:
            prompt = make_prompt(64)
            assert (await collect(engine, prompt))[2].num_cached_tokens == 0
            cached = [
                o.num_cached_tokens async for o in generate(engine, prompt, GREEDY, request_id="2")
            ]
            assert cached[0] == 63
            await engine.reset_prefix_cache()
            again = [
                o async for o in generate(engine, prompt, GREEDY, request_id="3", stream=False)
            ]
            assert again[0].num_cached_tokens == 0

    run(test())


def test_a_tenants_salt_keeps_its_cache_apart():
    async def test():
        async with Running() as engine:
            prompt = make_prompt(64)
            cached = []
            for salt in ("a", "b", "a"):
                stream = generate(
                    engine, prompt, GREEDY, request_id=salt, cache_salt=salt, stream=False
                )
                cached += [output.num_cached_tokens async for output in stream]
            assert cached == [0, 0, 63]

    run(test())


@asynccontextmanager
async def held_step():
    """An engine, its backend, the gate in which its step waits, and the request of that step."""
    backend = FakeBackend(256)
    gate = Gate(backend)
    async with Running(backend) as engine:
        gate.closed = True
        running = asyncio.ensure_future(collect(engine, [1]))
        assert await asyncio.to_thread(gate.reached.wait, 10)
        yield engine, backend, gate, running


def test_draining_finishes_what_runs_and_takes_nothing_new():
    async def test():
        async with held_step() as (engine, backend, gate, running):
            drained = asyncio.ensure_future(engine.drain(20))
            await until(lambda: engine.health().state == "draining")
            with pytest.raises(EngineDead, match="shutting down") as caught:
                await collect(engine, [2])
            assert caught.value.code == "draining"
            gate.open()
            assert await drained is True
            assert (await running)[1][0] == backend.continuation([1], 12)

    run(test())


def test_draining_fails_what_is_left_at_its_deadline_so_that_others_can_go_on_with_it():
    async def test():
        async with held_step() as (engine, _, gate, running):
            assert await engine.drain(0.0) is False
            with pytest.raises(EngineDead) as caught:
                await running
            assert caught.value.code == "server_shutdown"
            gate.open()

    run(test())


def test_stopping_ends_what_is_in_flight_with_a_clean_error():
    async def test():
        running = Running(config=SLOW)
        engine = await running.__aenter__()
        stream = generate(engine, "hi", SamplingParams(max_tokens=400), request_id="r")
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        await engine.stop()
        assert engine.health().state == "dead"

    run(test())


def test_a_core_that_breaks_is_reported_with_its_reason():
    async def test():
        backend = FakeBackend(256)
        async with Running(backend) as engine:

            def explode(step):
                raise RuntimeError("sticky")

            backend.on_execute = explode
            for kind in (GenerationFailed, GenerationFailed, EngineDead, EngineDead):
                with pytest.raises(kind):
                    await collect(engine, [1])
            health = engine.health()
            assert health.state == "dead" and not health.is_live
            assert "3 steps in a row failed" in health.reason

    run(test())


def test_while_loading_the_engine_says_so_and_takes_nothing():
    async def test():
        loading = threading.Event()

        def build(config, *, progress):
            progress(25, 100)
            assert loading.wait(60)
            return build_engine(config, progress=progress)

        connect = partial(InProcessClient, build=build)
        engine = await AsyncEngine.start(make_config(), connect=connect)
        await until(lambda: engine.health().progress == 0.25)
        assert engine.health().loading == LoadProgress("loading", 25, 100)
        assert engine.health().state == "loading" and engine.health().is_live
        with pytest.raises(EngineDead) as caught:
            await collect(engine, [1])
        assert (caught.value.code, caught.value.status) == ("loading", 503)
        loading.set()
        info = await engine.ready()
        assert (engine.health().state, info) == ("ready", engine.info)
        await engine.stop()

    run(test())


def test_a_failed_start_is_its_own_sentence():
    async def test():
        config = EngineConfig(device="sim", max_model_len=5000, sim=SimConfig(kv_blocks=10))
        engine = await AsyncEngine.start(config)
        with pytest.raises(ConfigError, match="the simulated KV pool holds 10"):
            await engine.ready()
        assert engine.health().state == "dead"
        assert "the simulated KV pool holds 10" in engine.health().reason
        await engine.stop()

    run(test())


def test_stopping_while_loading_ends_the_wait():
    async def test():
        release = threading.Event()

        def build(config, *, progress):
            assert release.wait(60)
            return build_engine(config, progress=progress)

        engine = await AsyncEngine.start(
            make_config(), connect=partial(InProcessClient, build=build)
        )
        waiting = asyncio.ensure_future(engine.ready())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, release.set)
        await engine.stop()
        with pytest.raises(Exception, match="stopped while it loaded"):
            await waiting

    run(test())


@pytest.mark.parametrize("n", [1, 3])
def test_each_piece_of_news_is_what_the_output_kind_says(n):
    params = SamplingParams(
        seed=5, n=n, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )

    async def test():
        async with Running(config=SLOW) as engine:

            async def reported(kind):
                wish = msgspec.structs.replace(params, output_kind=kind)
                news = generate(engine, make_prompt(20), wish, request_id="r")
                return [output async for output in news]

            deltas = await reported(RequestOutputKind.DELTA)
            wholes = await reported(RequestOutputKind.CUMULATIVE)
            finals = await reported(RequestOutputKind.FINAL_ONLY)
        joined = deltas[0].copy()
        for output in deltas[1:]:
            joined.absorb(output)
        assert len(finals) == 1 and len(wholes) > 1
        for last in (finals[-1], wholes[-1]):
            assert last.finished and [answer.index for answer in last.outputs] == list(range(n))
            assert [a.text for a in last.outputs] == [a.text for a in joined.outputs]
            assert [a.logprobs for a in last.outputs] == [a.logprobs for a in joined.outputs]
            assert last.prompt_logprobs == joined.prompt_logprobs
        for before, after in itertools.pairwise(wholes):  # nothing is taken back or changed later
            assert len(before.outputs) <= len(after.outputs)
            known = {answer.index: answer for answer in after.outputs}
            for answer in before.outputs:
                assert known[answer.index].token_ids[: len(answer.token_ids)] == answer.token_ids
                assert len(answer.logprobs) == len(answer.token_ids) <= answer.num_tokens
        lengths = [sum(len(a.token_ids) for a in output.outputs) for output in wholes]
        assert lengths == sorted(set(lengths))

    run(test())


def test_a_request_may_want_larger_pieces_than_the_engine_gives():
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True, stream_interval=5)

    async def test():
        async with Running() as engine:
            news = generate(engine, make_prompt(20), params, request_id="r")
            lengths = [len(output.outputs[0].token_ids) async for output in news]
        assert sum(lengths) == 12
        assert all(length >= 5 for length in lengths[1:-1])

    run(test())


@pytest.mark.parametrize("interval", [0, -1])
def test_a_piece_of_no_tokens_is_refused(interval):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stream_interval=interval)
    assert caught.value.param == "stream_interval"
