"""What a router predicts from the stream, against the cached tokens that the engine then reports.

A recorded trace gives lengths and shared prefixes, cut down so that a pool of a few hundred blocks
overflows all the time. Its prompts come as token ids, as text and as chats, with and without salts,
and chats go on for some turns, in the words of chat completions, of Anthropic's messages and of
responses. The router is a plain dict that knows frames and nothing else.

Red when: an eviction is not told; a key is stored before its block can be found; a text is placed
too late in the prompt; a token is counted that merges with what follows; an answer is promised that
the next turn reads as other tokens; a hidden block counts as reachable.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import pytest

from octavo_engine.backends.sim.backend import KV_BYTES_PER_TOKEN, SimBackend
from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.build import build_engine
from octavo_engine.core.connect import in_process
from octavo_engine.core.process.in_process_client import InProcessClient
from octavo_engine.protocol import route_keys
from octavo_engine.protocol.stream import DELTA, HELLO, SNAPSHOT
from octavo_engine.server.app import build_app
from octavo_engine.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from octavo_engine.core.process.client import Listener
    from octavo_engine.server.routers.push_stream import Subscriber
    from octavo_engine.server.service import Service

pytestmark = pytest.mark.slow

TRACE = Path(
    os.environ.get("OCTAVO_TRACE", Path(__file__).parents[3] / "data/mooncake_excerpt.jsonl")
)
NUM_REQUESTS = int(os.environ.get("OCTAVO_TRACE_REQUESTS", "200"))
TRACE_BLOCK, BLOCK = 512, 32  # tokens that an id of the trace stands for: there, and here
MAX_PROMPT = 1500
TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also did many "
    "fragmentation Kubernetes, scheduler; (1999) résumé naïve 東京 C++ x=y*2; don't it's 3.14159"
)
WORDS = tuple(TEXT.split())


# ── the router ──


@dataclass
class Index:
    """What a router knows of one engine."""

    tokens: dict[int, int] = field(default_factory=dict)
    in_tiers: dict[int, tuple[str, int]] = field(default_factory=dict)  # by key: medium, tokens
    num_evicted: int = 0
    is_whole: bool = False  # a snapshot has come

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            kind, fields = msgspec.msgpack.decode(data[at + 4 : at + 4 + length])
            at += 4 + length
            if kind == DELTA:
                self.num_evicted += len(fields["evicted"]) // 8
                for (key,) in struct.iter_unpack("<Q", fields["evicted"]):
                    self.tokens.pop(key, None)
                    self.in_tiers.pop(key, None)
            self.is_whole |= kind == SNAPSHOT and fields["last"]
            if kind in (DELTA, SNAPSHOT):
                for key, tokens in struct.iter_unpack("<QI", fields["stored"]):
                    self.tokens[key] = tokens
                    self.in_tiers.pop(key, None)
                for medium, packed in fields["tiers"].items():
                    for key, tokens in struct.iter_unpack("<QI", packed):
                        self.in_tiers[key] = (medium, tokens)
            else:
                assert kind == HELLO

    def predict(self, body: dict[str, Any], kind: route_keys.Kind) -> int:
        canonical = route_keys.canonical(body, kind=kind)
        assert canonical is not None
        keys = route_keys.lookup_keys(canonical)
        return next((tokens for key in reversed(keys) if (tokens := self.find(key))), 0)

    def find(self, key: int) -> int:
        """The tokens, wherever they are; 0: nowhere."""
        return self.tokens.get(key, 0) or self.in_tiers.get(key, ("", 0))[1]


@dataclass
class Figures:
    errors: list[int] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        errors = np.abs(self.errors)
        return (
            f"{len(errors)} requests, {self.cached / self.prompt:.1%} of {self.prompt} tokens "
            f"cached; within a block: {np.mean(errors <= BLOCK_SIZE):.2%}, "
            f"mean error {errors.mean():.1f} tokens, largest {errors.max()}"
        )

    @property
    def share_within_a_block(self) -> float:
        return float(np.mean(np.abs(self.errors) <= BLOCK_SIZE))


PATHS: dict[route_keys.Kind, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


def reported(kind: route_keys.Kind, result: Any) -> tuple[int, int, str]:
    """An answer's prompt tokens, those of them that were cached, and its text."""
    usage = result["usage"]
    if kind == "messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, result["content"][0]["text"]
    if kind == "responses":
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, result["output"][0]["content"][0]["text"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    choice = result["choices"][0]
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    return usage["prompt_tokens"], cached, text


class Bench:
    """An engine behind its API, and a router's view of it, kept in step."""

    def __init__(self, service: Service, client: httpx.AsyncClient) -> None:
        self.service = service
        self.index = Index()
        self.figures = Figures()
        self._client = client
        self._subscriber: Subscriber = service.hub.subscribe()

    async def ask(self, kind: route_keys.Kind, body: dict[str, Any]) -> str:
        """The answer's text; what was predicted and what was found is noted."""
        await self.catch_up()
        predicted = self.index.predict(body, kind)
        answer = await self._client.post(PATHS[kind], json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        prompt, cached, text = reported(kind, answer.json())
        figures = self.figures
        figures.errors.append(predicted - cached)
        figures.cached += cached
        figures.prompt += prompt
        return text

    async def _snapshot(self) -> Index:
        other = self.service.hub.subscribe()
        snapshot = Index()
        while not snapshot.is_whole:
            snapshot.feed(await other.read())
        self.service.hub.leave(other)
        return snapshot

    async def catch_up(self) -> None:
        """Read until all that was known to the engine when this was called is known here."""
        await self.service.model.labeller.idle()
        for _ in range(100):
            reported, true = self.index, await self._snapshot()
            while self._subscriber.has_news:
                self.index.feed(await self._subscriber.read())
            if reported.in_tiers.keys() == true.in_tiers.keys():
                break
            await asyncio.sleep(0.02)  # a block has just been written to the disk
        assert reported.tokens.keys() == true.tokens.keys(), "deltas and snapshot differ"
        assert reported.in_tiers.keys() == true.in_tiers.keys(), "deltas and snapshot differ"
        # One name may have been given by several prompts: the last word may be any of theirs. Or by
        # blocks of one prompt, which leave the pool one by one.
        for held, slack in ((reported.tokens, BLOCK_SIZE), (reported.in_tiers, 2 * BLOCK_SIZE)):
            assert all(abs(reported.find(key) - true.find(key)) <= slack for key in held)


@asynccontextmanager
async def bench(config: EngineConfig, connect: Any) -> AsyncIterator[Bench]:
    async with serving(config, connect) as (service, client):
        yield Bench(service, client)


@asynccontextmanager
async def serving(
    config: EngineConfig, connect: Any
) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """No router has come yet."""
    engine = await AsyncEngine.start(config, connect=connect)
    try:
        await engine.ready()
        app = build_app(engine, ServerSettings())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield app.state.service, client
    finally:
        await engine.stop()


# ── the engine ──


class ProseBackend(SimBackend):
    """Says what a text says, token by token, so that its answers read back as they were made."""

    def __init__(self, config: EngineConfig, prose: list[int]) -> None:
        super().__init__(config)
        self._prose = np.array(prose, np.int32)

    def _sample(self, sampling: Any) -> Any:
        sampled = super()._sample(sampling)
        wishes = sampling.table[sampling.rows]
        place = wishes["seed"] % np.uint64(1 << 20) + np.asarray(sampling.positions, np.uint64)
        said = self._prose[(place % np.uint64(len(self._prose))).astype(np.int64)]
        # Greedy ones say what the simulator says: tokens that nobody would write.
        sampled.tokens[:] = np.where(wishes["temperature"] > 0, said, sampled.tokens)
        return sampled


def simulated(prose: str, num_blocks: int, **settings: Any) -> Any:
    """The tokenizer and chat template of a real model, the scheduler, and no arithmetic."""

    def connect(config: EngineConfig, listener: Listener) -> InProcessClient:
        def build(config: EngineConfig, *, progress: Any) -> Any:
            from octavo_engine.core.model_files import load_model_tokenizer, resolve

            tokenizer = load_model_tokenizer(config, resolve(config))
            sim = SimConfig(vocab_size=tokenizer.vocab_size, time_scale=0.0)
            backend = ProseBackend(config.replace(sim=sim), tokenizer.encode(prose))
            return build_engine(config, progress=progress, backend=backend)

        return InProcessClient(config, listener, build=build)

    config = EngineConfig(
        model="demo://smollm2", max_model_len=4096,
        kv_cache_memory_bytes=num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN,
        scheduler=SchedulerConfig(max_num_batched_tokens=512), seed=3, **settings,
    )  # fmt: skip
    return bench(config, connect)


# ── the load ──


def requests() -> Iterator[dict[str, Any]]:
    opening: Any = gzip.open if TRACE.suffix == ".gz" else open
    with opening(TRACE, "rt") as lines:
        for _, line in zip(range(NUM_REQUESTS), lines, strict=False):
            yield json.loads(line)


def prose(number: int, num_words: int) -> str:
    """The same for the same number."""
    rng = random.Random(number)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    return " ".join(words)


def pieces(request: dict[str, Any]) -> list[tuple[int, int]]:
    """(id, tokens) of the prompt's blocks, cut down."""
    total = min(request["input_length"] * BLOCK // TRACE_BLOCK + 1, MAX_PROMPT)
    ids = request["hash_ids"]
    return [
        (number, min(BLOCK, total - start))
        for number, start in zip(ids, range(0, total, BLOCK), strict=False)
    ]


async def replay(bench: Bench, *, with_calls: bool = False) -> None:
    rng = random.Random(7)
    open_chats: list[tuple[route_keys.Kind, dict[str, Any]]] = []
    for request in requests():
        blocks = pieces(request)
        shape = blocks[0][0] % 4
        body: dict[str, Any] = {"max_tokens": 1 + request["output_length"] % 60}
        if blocks[0][0] % 3 == 1:
            body["cache_salt"] = "tenant"
        if shape == 0:
            body["prompt"] = [
                random.Random(n * 1000 + i).randrange(2000)
                for n, size in blocks
                for i in range(size)
            ]
            await bench.ask("completion", body)
        elif shape == 1:
            body["prompt"] = " ".join(prose(n, size) for n, size in blocks)
            await bench.ask("completion", body)
        else:
            texts = [prose(n, size) for n, size in blocks]
            messages = [{"role": "user", "content": " ".join(texts)}]
            if shape == 3:
                messages.insert(0, {"role": "system", "content": prose(-1, 40)})
            body["messages"] = messages
            body["temperature"] = 0.0 if blocks[0][0] % 7 == 0 else 1.0
            kind = DIALECTS[blocks[0][0] % 5]
            await say(bench, body, kind)
            open_chats.append((kind, body))
        if open_chats and rng.random() < 0.6:
            kind, body = open_chats[rng.randrange(len(open_chats))]
            if with_calls and kind != "chat" and rng.random() < 0.4:
                call = f"call_{rng.randrange(10**9)}"
                body["messages"][-1]["call"] = call
                message = {"role": "tool", "call": call}
            else:
                message = {"role": "user"}
            body["messages"].append(message | {"content": prose(rng.randrange(10**6), 12)})
            await say(bench, body, kind)
            if sum(len(m["content"]) for m in body["messages"]) > 5000:
                open_chats.remove((kind, body))


async def say(bench: Bench, body: dict[str, Any], kind: route_keys.Kind = "chat") -> None:
    answer = await bench.ask(kind, DRESS[kind](body))
    body["messages"].append({"role": "assistant", "content": answer})


# ── the same conversation in each client's words ──

DIALECTS: tuple[route_keys.Kind, ...] = ("chat", "messages", "responses", "messages", "responses")


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    return body


def as_messages(body: dict[str, Any]) -> dict[str, Any]:
    dressed: dict[str, Any] = {**body, "model": "demo://smollm2", "messages": []}
    for message in body["messages"]:
        text: Any = {"type": "text", "text": message["content"]}
        match message:
            case {"role": "system"}:
                dressed["system"] = [text | {"cache_control": {"type": "ephemeral"}}]
            case {"role": "tool", "call": call}:
                result = {"type": "tool_result", "tool_use_id": call, "content": [text]}
                dressed["messages"].append({"role": "user", "content": [result]})
            case {"role": role, "call": call}:
                use = {"type": "tool_use", "id": call, "name": "look", "input": {"at": 1}}
                dressed["messages"].append({"role": role, "content": [text, use]})
            case {"role": role}:
                dressed["messages"].append({"role": role, "content": [text]})
    return dressed


def as_responses(body: dict[str, Any]) -> dict[str, Any]:
    dressed = {
        name: value for name, value in body.items() if name not in ("messages", "max_tokens")
    }
    dressed |= {"max_output_tokens": body["max_tokens"], "store": False}
    items: list[dict[str, Any]] = []
    for message in body["messages"]:
        text = message["content"]
        match message:
            case {"role": "system"}:
                dressed["instructions"] = text
            case {"role": "tool", "call": call}:
                items.append({"type": "function_call_output", "call_id": call, "output": text})
            case {"role": "assistant"}:
                part = {"type": "output_text", "text": text, "annotations": []}
                items.append({"type": "message", "role": "assistant", "content": [part]})
                if call := message.get("call"):
                    requested = {"call_id": call, "name": "look", "arguments": '{"at": 1}'}
                    items.append({"type": "function_call", **requested})
            case {"role": role}:
                items.append({"role": role, "content": text})
    return dressed | {"input": items}


DRESS: dict[route_keys.Kind, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "chat": as_chat, "messages": as_messages, "responses": as_responses,
}  # fmt: skip


def test_a_recorded_load_is_predicted(capsys):
    """At least 999 of 1000 within a block of 16 tokens, while the pool overflows."""

    async def work() -> tuple[Figures, int]:
        async with simulated(prose(99, 4000), num_blocks=400) as bench:
            await replay(bench)
            return bench.figures, bench.index.num_evicted

    figures, num_evicted = asyncio.run(work())
    with capsys.disabled():
        print(  # noqa: T201  (the figure is what this is about)
            f"\nresidency prediction: {figures}; {num_evicted} keys evicted"
        )
    assert num_evicted > 1000
    assert figures.share_within_a_block >= 0.999


def test_a_recorded_load_is_predicted_with_what_tiers_hold(capsys, monkeypatch, tmp_path):
    """The pool, host memory and the disk all overflow; whatever any of them has is loaded."""
    monkeypatch.setattr("octavo_engine.core.kv_tiers.is_worth_loading", lambda **_: True)
    block_gib = BLOCK_SIZE * KV_BYTES_PER_TOKEN / (1 << 30)
    tiers = {
        "kv_offloading_size": 300 * block_gib,
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": 1500 * block_gib,
    }

    async def work() -> tuple[Figures, Index, dict[str, int]]:
        async with simulated(prose(99, 4000), num_blocks=300, **tiers) as bench:
            await replay(bench)
            kept = bench.service.engine.stats.tiers
            hits = {"CPU": kept.host_hit_blocks, "DISK": kept.disk_hit_blocks}
            return bench.figures, bench.index, hits

    figures, index, hits = asyncio.run(work())
    with capsys.disabled():
        print(f"\nresidency prediction with tiers: {figures}; hits {hits}")  # noqa: T201
    assert min(hits.values()) > 100, hits
    assert {medium for medium, _ in index.in_tiers.values()} == {"CPU", "DISK"}
    # Of a block in a tier all tokens are found or none.
    assert np.abs(figures.errors).max() <= 2 * BLOCK_SIZE, figures
    assert figures.share_within_a_block >= 0.95, figures


def test_calls_of_tools_are_predicted_within_two_blocks(monkeypatch):
    """Where a call stands among the prompt's tokens is not known, only between which texts."""
    monkeypatch.setattr("tests.engine.server.routers.test_residency_prediction.NUM_REQUESTS", 60)

    async def work() -> Figures:
        async with simulated(prose(99, 4000), num_blocks=400) as bench:
            await replay(bench, with_calls=True)
            figures: Figures = bench.figures
            return figures

    figures = asyncio.run(work())
    assert len(figures.errors) > 80
    assert np.abs(figures.errors).max() <= 2 * BLOCK_SIZE, figures
    assert figures.share_within_a_block >= 0.98, figures


QUESTIONS = (
    "What is the capital of France?",
    "And of Japan? Please tell me something about its history as well, in two sentences.",
    "Write a Python function that adds two numbers.\n\nUse type hints.",
    "Thank you! Now translate 'good morning' into Spanish, German and French.",
)


def test_chats_with_a_real_model_are_predicted_turn_by_turn():
    """Sampled answers of a real model, read back through its tokenizer and template."""

    async def work() -> tuple[Figures, list[int]]:
        config = EngineConfig(
            model="demo://smollm2", device="cpu", max_model_len=1024, num_threads=1, seed=5,
            kv_cache_memory_bytes=64 * 2**20,
        )  # fmt: skip
        later: list[int] = []
        async with bench(config, in_process) as engine:
            for number in range(4):
                body: dict[str, Any] = {"messages": [], "max_tokens": 24, "seed": number}
                if number % 2:
                    persona = "You are a helpful assistant who answers briefly and politely."
                    body["messages"].append({"role": "system", "content": persona})
                for turn, question in enumerate(QUESTIONS):
                    body["messages"].append({"role": "user", "content": question})
                    await say(engine, body)
                    if turn:
                        later.append(engine.figures.errors[-1])
            await engine.catch_up()
            return engine.figures, later

    figures, later = asyncio.run(work())
    assert np.abs(figures.errors).max() <= BLOCK_SIZE, figures
    assert figures.cached > figures.prompt // 2
    assert np.abs(later).max() <= BLOCK_SIZE


def test_before_the_first_router_nothing_is_named_and_afterwards_what_is_used_again():
    """Servers that no router listens to do not pay for keys."""
    question = {"role": "user", "content": "What is the capital of France? " * 8}
    body: dict[str, Any] = {"messages": [question], "max_tokens": 4}

    async def work() -> None:
        config = EngineConfig(model="sim", device="sim", max_model_len=1024)
        async with serving(config, in_process) as (service, client):
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert service.model._labeller is None
            bench = Bench(service, client)
            await bench.catch_up()
            assert bench.index.tokens == {}
            await bench.ask("chat", body)  # found in the cache, and named now
            assert bench.figures.cached > 0
            await bench.ask("chat", body)
            # Within a chunk of the data, whose bytes are tokens here.
            assert abs(bench.figures.errors[-1]) <= route_keys.CHUNK_BYTES < bench.figures.cached

    asyncio.run(work())
