"""Engines of several processes: their settings and requests, and which processes they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.errors import EngineDead
from octavo_engine.state.grammar import GrammarSpec
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.models.tiny import tiny_model
from tests.fakes.generate import generate
from tests.fakes.process import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.core.offline.llm import LLM
    from octavo_engine.core.text.outputs import RequestOutput

CONFIG = EngineConfig(
    model="demo://smollm2",
    max_model_len=128,
    num_threads=2,
    kv_cache_memory_bytes=20 * 368_640,  # fewer blocks than the sequences below come to want
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=36, ignore_eos=True, logprobs=2)
CODE = SamplingParams(
    temperature=1.0,
    seed=6,
    max_tokens=20,
    grammar=GrammarSpec(kind="regex", text="[0-9]{3}-[a-z]{4}"),
)
PROMPT = "The capital of France is a city that many people want to see, and its name is"
ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)


def tiny_config(folder: Path, name: str, **changes: Any) -> EngineConfig:
    """A tiny model of random weights, whose files are written into the folder."""
    (folder / "config.json").write_text(json.dumps(tiny_model(name).config))
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="dummy",
        max_model_len=320,
        num_threads=2,
        kv_cache_memory_bytes=8 << 20,
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=96),
    )
    return config.replace(**changes)


def workers_of(process: psutil.Process | None = None) -> list[psutil.Process]:
    """The ranks above 0 that this process has started, or that one."""
    return started_by(process or psutil.Process(), "octavo_engine.executor.worker")


def started_by(process: psutil.Process, module: str) -> list[psutil.Process]:
    """The processes of a module that it has started, and their children."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, perhaps a zombie yet
            if module in child.cmdline():
                found.append(child)
    return found


async def six_streams(engine: AsyncEngine) -> list[AsyncIterator[RequestOutput]]:
    """Without an end; each has begun."""
    streams: list[AsyncIterator[RequestOutput]] = [
        generate(engine, PROMPT, ENDLESS, request_id=str(i)) for i in range(6)
    ]
    for stream in streams:
        await anext(stream)
    return streams


async def all_fail(streams: Sequence[AsyncIterator[RequestOutput]]) -> None:
    """Since the second rank is gone."""
    for stream in streams:
        with pytest.raises(EngineDead, match="rank 1 of 2 was ended by SIGKILL"):
            async for _ in stream:
                pass


async def serves(engine: AsyncEngine) -> None:
    outputs = [o async for o in generate(engine, PROMPT, GREEDY, request_id="after")]
    assert outputs[-1].outputs[0].finish_reason == "length"


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not fact():  # noqa: ASYNC110  (they are another process's)
            await asyncio.sleep(0.01)


def facts(output: RequestOutput) -> Any:
    answer = output.outputs[0]
    return answer.token_ids, answer.text, answer.logprobs


def all_answers(llm: LLM) -> Any:
    """Also of a prompt seen before, of a grammar, and of more at once than there is memory for."""
    first = llm.generate([PROMPT, PROMPT + " not"], GREEDY, use_tqdm=False)
    again = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert again[0].num_cached_tokens
    coded = llm.generate("A code:", CODE, use_tqdm=False)
    drawn = llm.generate([f"{number}. Once" for number in range(8)], DRAWN, use_tqdm=False)
    return [facts(output) for output in (*first, *again, *coded, *drawn)]


def served(*more: str) -> Any:
    """The answer of a server with these flags too, which ends well."""
    flags = ("demo://smollm2", "--device", "cpu", "--max-model-len", "128", *more)
    body = {"prompt": PROMPT, "max_tokens": 16, "seed": 4, "temperature": 1.0, "logprobs": 1}
    with serving(*flags) as server, server.client() as client:
        choices = client.post("/v1/completions", json=body).json()["choices"]
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    return choices
