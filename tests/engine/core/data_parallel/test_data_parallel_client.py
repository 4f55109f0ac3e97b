"""Two real cores in processes behind one engine: same answers, shared work, one that is killed."""

from __future__ import annotations

import asyncio
import re
import signal
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from octavo_engine.config import EngineConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.connect import in_process
from octavo_engine.core.data_parallel.chosen_rank import CHOSEN_RANK
from octavo_engine.core.data_parallel.data_parallel_client import DataParallelClient
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.pooling.async_pooling import PoolingItem
from octavo_engine.core.process.process_client import ProcessClient
from octavo_engine.core.process.supervision import Timing
from octavo_engine.core.text.submission import Submission
from octavo_engine.errors import ConfigError, EngineDead, InvalidRequest, ModelError, ModelUnknown
from octavo_engine.state.labels import Labels
from octavo_engine.state.pooling import PoolingParams
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.adapters import write_adapter
from tests.fakes.data_parallel import real_config, sim_config
from tests.fakes.generate import generate
from tests.fakes.process import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from octavo_engine.state.outputs import StepOutput

pytestmark = pytest.mark.slow

SIM = sim_config(8, step_base_ms=2.0)
REAL = real_config(8)
QUICK = Timing(first_delay=0.3, last_delay=0.5, fast_failure=0.0, patience=30.0, stop=10.0)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


class Running:
    """`async with Running(SIM) as engine`: its cores are processes, ready on entry."""

    def __init__(self, config: EngineConfig, connect: Any = None) -> None:
        self._config = config
        self._connect = connect or partial(ProcessClient, timing=QUICK)

    async def __aenter__(self) -> AsyncEngine:
        self.engine = await AsyncEngine.start(self._config, connect=self._connect)
        await self.engine.ready()
        return self.engine

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(150):
            await test()

    asyncio.run(bounded())


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not fact():  # noqa: ASYNC110  (facts of other processes)
            await asyncio.sleep(0.005)


def cores_of(engine: AsyncEngine) -> list[Any]:
    assert isinstance(engine._client, DataParallelClient)
    return engine._client._cores


def in_flight(engine: AsyncEngine) -> list[int]:
    return [len(core.sequences) for core in cores_of(engine)]


def kill(engine: AsyncEngine, rank: int) -> None:
    psutil.Process(cores_of(engine)[rank].client.pid).kill()


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def prompt_of(seed: int, length: int = 64) -> list[int]:
    return [(seed * 1000 + place * 7) % 250 + 1 for place in range(length)]


async def answer(
    engine: AsyncEngine, prompt: Any, params: SamplingParams = SHORT, **fields: Any
) -> Any:
    """The last output, with all tokens."""
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    cached = 0
    async for last in generate(engine, prompt, params, request_id="r", **fields):
        cached = max(cached, last.num_cached_tokens)
        for output in last.outputs:
            tokens.setdefault(output.index, []).extend(output.token_ids)
            logprobs.setdefault(output.index, []).extend(output.logprobs or [])
    return tokens, logprobs, cached


def test_answers_have_the_bits_of_one_core() -> None:
    prompts = [
        "The capital of France is",
        "Once upon a time there was a small house at the edge of a forest, and in it",
        "def fibonacci(n):",
    ]
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=2, n=2)
    with LLM.from_config(REAL.replace(num_threads=1)) as llm:
        expected = [
            [(out.token_ids, out.logprobs) for out in each.outputs]
            for each in llm.generate(prompts, drawn, use_tqdm=False)
        ]

    async def test() -> None:
        async with Running(REAL.replace(data_parallel_size=2)) as engine:
            answers = await asyncio.gather(*(answer(engine, each, drawn) for each in prompts))
            got = [
                [(list(tokens[index]), logprobs[index]) for index in sorted(tokens)]
                for tokens, logprobs, _ in answers
            ]
            assert got == [[(list(ids), list(lp or [])) for ids, lp in each] for each in expected]
            assert all(stats.generation_tokens for stats in engine.stats.cores)

    run(test)


def test_each_core_may_have_ranks() -> None:
    prompts = ["The capital of France is", "def fibonacci(n):"]
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM.from_config(REAL.replace(num_threads=1)) as llm:
        alone = [each.outputs[0].token_ids for each in llm.generate(prompts, short, use_tqdm=False)]

    async def test() -> None:
        config = REAL.replace(data_parallel_size=2, tensor_parallel_size=2, num_threads=4)
        before = set(psutil.Process().children(recursive=True))  # of other tests
        async with Running(config) as engine:
            processes = set(psutil.Process().children(recursive=True)) - before
            commands = [command_of(each) for each in processes]
            assert sum("process.child" in command for command in commands) == 2
            assert sum("executor.worker" in command for command in commands) == 2
            answers = await asyncio.gather(*(answer(engine, each, short) for each in prompts))
            assert [tokens[0] for tokens, *_ in answers] == alone
            assert all(stats.generation_tokens for stats in engine.stats.cores)

    run(test)


def test_requests_are_spread_and_a_prefix_finds_its_core() -> None:
    async def test() -> None:
        async with Running(SIM) as engine:
            streams = [
                asyncio.ensure_future(answer(engine, prompt_of(seed), ENDLESS)) for seed in range(6)
            ]
            await until(lambda: sum(in_flight(engine)) == 6)
            assert in_flight(engine) == [3, 3]
            await until(lambda: engine.stats.generation_tokens >= 60)
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
            assert in_flight(engine) == [0, 0]
            for seed in range(6):
                tokens, _, cached = await answer(engine, [*prompt_of(seed), *prompt_of(9, 20)])
                assert len(tokens[0]) == 8
                assert cached >= 48, seed

    run(test)


def test_a_killed_core_ends_its_own_requests_only() -> None:
    async def test() -> None:
        async with Running(SIM) as engine:
            streams = [
                asyncio.ensure_future(answer(engine, prompt_of(seed), ENDLESS)) for seed in range(4)
            ]
            await until(lambda: engine.stats.num_running == 4)
            kill(engine, 1)
            done = await asyncio.gather(*streams, return_exceptions=True)
            lost = [each for each in done if isinstance(each, EngineDead)]
            assert len(lost) == 2
            assert "data-parallel rank 1 of 2: the engine core was ended by SIGKILL" in str(lost[0])
            assert lost[0].retry_after_s is not None
            kept = [each for each in done if not isinstance(each, BaseException)]
            assert [len(tokens[0]) for tokens, *_ in kept] == [400, 400]
            await until(lambda: engine.health().reason == "")
            assert engine.stats.kv_blocks_total == 256, "of the core that computed"
            await asyncio.gather(*(answer(engine, prompt_of(seed)) for seed in range(4)))
            assert engine.stats.kv_blocks_total == 512

    run(test)


def test_one_core_takes_all_while_the_other_is_down_and_none_is_an_error() -> None:
    slow = partial(ProcessClient, timing=Timing(first_delay=5.0, fast_failure=0.0, stop=10.0))

    async def test() -> None:
        async with Running(SIM, slow) as engine:
            kill(engine, 0)
            await until(lambda: "rank 0 of 2" in engine.health().reason)
            assert engine.health().state == "ready"
            epoch = engine.residency.epoch
            for seed in range(3):
                await answer(engine, prompt_of(seed))
            kill(engine, 1)
            await until(lambda: engine.health().state == "dead")
            await until(lambda: engine.residency.epoch != epoch)
            with pytest.raises(EngineDead, match="rank 1 of 2"):
                await answer(engine, prompt_of(1))
            await until(lambda: engine.health().reason == "")
            await answer(engine, prompt_of(1))

    run(test)


def test_a_core_that_is_given_up_ends_the_engine() -> None:
    fragile = partial(
        ProcessClient, timing=Timing(max_fast_failures=1, first_delay=0.05, stop=10.0)
    )

    async def test() -> None:
        async with Running(SIM, fragile) as engine:
            stream = asyncio.ensure_future(answer(engine, prompt_of(1), ENDLESS))
            await until(lambda: engine.stats.num_running)
            kill(engine, 1)
            await until(lambda: engine.health().state == "dead")
            assert "rank 1 of 2" in engine.health().reason
            assert not engine.health().restarts
            tokens, *_ = await stream
            assert len(tokens[0]) == 400

    run(test)


def test_a_model_that_cannot_be_loaded_ends_the_start() -> None:
    async def test() -> None:
        before = set(psutil.Process().children())  # of other tests
        config = EngineConfig(model="/nowhere", device="cpu", data_parallel_size=2)
        engine = await AsyncEngine.start(config)
        with pytest.raises((ConfigError, ModelError)):
            await engine.ready()
        await engine.stop()
        small = REAL.replace(data_parallel_size=2, kv_cache_memory_bytes=1)
        engine = await AsyncEngine.start(small)
        with pytest.raises(ConfigError, match="KV"):
            await engine.ready()
        await engine.stop()
        assert not set(psutil.Process().children()) - before

    run(test)


def test_abort_reaches_the_core_and_drain_waits_for_all() -> None:
    async def test() -> None:
        async with Running(SIM) as engine:
            streams = [
                asyncio.ensure_future(answer(engine, prompt_of(seed), ENDLESS)) for seed in range(4)
            ]
            await until(lambda: engine.stats.num_running == 4)
            assert await engine.abort("r")
            await asyncio.gather(*streams)
            await until(lambda: engine.stats.num_running == 0)
            last = asyncio.ensure_future(answer(engine, prompt_of(5)))
            await until(lambda: sum(in_flight(engine)) == 1)
            assert await engine.drain(30.0)
            await last

    run(test)


class Follower:
    """A router's view of what is resident."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}
        self.has_snapshot = False

    def on_step(self, step: StepOutput) -> None:
        change = step.residency
        if change is None:
            return
        for at in range(0, len(change.evicted), 8):
            self.known.pop(change.evicted[at : at + 8], None)
        for entries in (change.stored, change.snapshot or b""):
            for at in range(0, len(entries), 12):
                self.known[entries[at : at + 8]] = int.from_bytes(
                    entries[at + 8 : at + 12], "little"
                )
        self.has_snapshot = self.has_snapshot or change.snapshot is not None

    def on_lost(self) -> None:
        self.known.clear()


def test_routers_see_what_any_core_holds() -> None:
    async def labelled(engine: AsyncEngine, seed: int) -> None:
        name = bytes([seed]) * 8
        labels = Labels(name + (64).to_bytes(4, "little"), array("I", [3]).tobytes())
        submission = Submission(
            request_id=str(seed), prompt=prompt_of(seed, 70), params=SHORT, labels=labels
        )
        async for _ in engine.iterate(submission):
            pass

    async def test() -> None:
        async with Running(SIM) as engine:
            follower = Follower()
            engine.residency.listen(follower)
            await asyncio.gather(*(labelled(engine, seed) for seed in (1, 2)))
            engine.residency.watch(on=True)
            await until(lambda: follower.has_snapshot)
            assert follower.known == {b"\1" * 8: 64, b"\2" * 8: 64}
            await labelled(engine, 3)
            await until(lambda: len(follower.known) == 3)
            kill(engine, 1)
            await until(lambda: len(follower.known) < 3)
            assert follower.known
            await until(lambda: engine.health().reason == "")
            await asyncio.gather(*(labelled(engine, seed) for seed in (4, 5)))
            await until(lambda: {b"\4" * 8, b"\5" * 8} <= set(follower.known))

    run(test)


def test_a_profile_has_a_file_of_each_core(tmp_path: Path) -> None:
    async def test() -> None:
        async with Running(SIM) as engine:
            await engine.start_profile()
            await asyncio.gather(*(answer(engine, prompt_of(seed)) for seed in range(2)))
            file = tmp_path / "steps.json.gz"
            assert await engine.stop_profile(str(file)) > 0
            assert file.exists()
            assert (tmp_path / "steps-rank1.json.gz").exists()
            with pytest.raises(InvalidRequest):
                await engine.stop_profile(str(tmp_path / "missing" / "steps.json.gz"))

    run(test)


def test_an_adapter_is_loaded_into_all_or_none(tmp_path: Path) -> None:
    layers = {"model.layers.0.self_attn.q_proj": (64, 64)}
    path = str(write_adapter(tmp_path / "adapter", layers, seed=1, rank=4))

    async def test() -> None:
        async with Running(SIM.replace(enable_lora=True)) as engine:
            adapter = await engine.load_adapter("poet", path)
            assert [stats.num_adapters_held for stats in engine.stats.cores] == [1, 1]
            await asyncio.gather(
                *(answer(engine, prompt_of(seed), adapter=adapter) for seed in range(4))
            )
            with pytest.raises(ModelUnknown):
                await engine.load_adapter("gone", str(tmp_path / "gone"))
            loading = asyncio.ensure_future(engine.load_adapter("again", path))
            kill(engine, 1)
            assert (await loading).digest == adapter.digest, "it is in the core that is left"
            await engine.unload_adapter(adapter.digest)

    run(test)


def test_texts_are_embedded_by_both() -> None:
    config = SIM.replace(sim=SimConfig(task="embed", step_base_ms=2.0))

    async def test() -> None:
        async with Running(config, in_process) as engine:
            texts = [[PoolingItem(prompt_of(seed))] for seed in range(4)]
            one = await asyncio.gather(
                *(engine.pool(text, PoolingParams(), request_id="p") for text in texts)
            )
            for (first, *_), text in zip(one, texts, strict=True):
                again, *_ = await engine.pool(text, PoolingParams(), request_id="p")
                assert (first == again).all()
            assert in_flight(engine) == [0, 0]

    run(test)


def tokens_by_core(client: Any) -> list[int]:
    lines = client.get("/metrics").text.splitlines()
    found = dict(
        re.findall(r'^vllm:generation_tokens_total{.*engine="(\d)".*} (\S+)$', line)[0]
        for line in lines
        if line.startswith("vllm:generation_tokens_total{")
    )
    return [int(float(found[rank])) for rank in sorted(found)]


def test_a_request_goes_to_the_core_that_its_header_names() -> None:
    flags = ["--data-parallel-size", "3", "--max-model-len", "256"]
    with serving(*flags) as server, server.client() as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1, "n": 2}

        def send(rank: str, path: str = "completions", fields: Any = body) -> Any:
            headers = {"x-data-parallel-rank": rank}
            return client.post(f"/v1/{path}", json=fields, headers=headers)

        alone = client.post("/v1/completions", json=body).json()["choices"]
        before = tokens_by_core(client)
        for _ in range(3):  # against its prefix, which another core has
            assert send("2").json()["choices"] == alone
        send("1", "chat/completions", {"messages": [{"role": "user", "content": "a"}],
                                       "max_tokens": 5, "ignore_eos": True})  # fmt: skip
        after = tokens_by_core(client)
        assert [new - old for old, new in zip(before, after, strict=True)] == [0, 5, 24]
        assert client.post("/v1/completions", json=body).json()["choices"] == alone
        for wrong in ("3", "-1", "", "02", "x", "1,2", "\u00b2"):
            header = {b"x-data-parallel-rank": wrong.encode("latin-1")}
            answer = client.post("/v1/completions", json=body, headers=header)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                400, "invalid_header", "x-data-parallel-rank",
            )  # fmt: skip
            assert "must be a number from 0 to 2; leave it out" in error["message"]


def test_a_request_for_a_core_that_is_lost_does_not_go_to_another_one() -> None:
    async def test() -> None:
        async with Running(SIM) as engine:
            kill(engine, 1)
            await until(lambda: not cores_of(engine)[1].is_ready)
            CHOSEN_RANK.set(1)
            with pytest.raises(EngineDead, match="data-parallel rank 1 of 2: the engine core"):
                await answer(engine, prompt_of(1))
            CHOSEN_RANK.set(0)
            assert len((await answer(engine, prompt_of(1)))[0][0]) == 8
            await until(lambda: cores_of(engine)[1].is_ready)
            CHOSEN_RANK.set(1)
            for _ in range(3):
                await answer(engine, prompt_of(1))
            assert len(cores_of(engine)[1].prompts) > 0

    run(test)


def test_the_server_sleeps_wakes_and_answers_with_both() -> None:
    flags = ["--data-parallel-size", "2", "--max-model-len", "256", "--dev-mode"]
    with serving(*flags) as server, server.client() as client:
        body = {"model": "demo://smollm2", "prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
        first = client.post("/v1/completions", json=body).json()["choices"]
        assert client.post("/sleep").status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 503
        assert client.post("/wake_up").status_code == 200
        assert client.post("/v1/completions", json=body).json()["choices"] == first
        assert client.get("/ready").json()["state"] == "ready"
        assert client.get("/get_world_size").json()["world_size"] == 2
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
