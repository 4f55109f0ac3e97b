"""Texts through the whole stack: many callers, one core, and every way in which a call can end."""

from __future__ import annotations

import asyncio
import functools

import msgspec
import numpy as np
import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.info import ModelInfo
from octavo_engine.core.pooling.async_pooling import AsyncPooling, PoolingItem, check_items
from octavo_engine.core.pooling.tokenize import batch, pair, prompt_of, single
from octavo_engine.core.process import wire
from octavo_engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    RequestError,
)
from octavo_engine.state.pooling import PoolingOutput, PoolingParams
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from tests.fakes.generate import generate

EMBED = PoolingParams()
INFO = ModelInfo(
    names=("m",), max_model_len=8, vocab_size=100, eos_token_ids=(), num_blocks=0, kv_bytes=0,
    backend="fake", default_params={}, load_seconds=0.0, cache_key=b"", tasks=("embed",),
    embedding_size=16, dimensions=(4, 8), prompts={"query": "Q: "}, default_prompt=None,
)  # fmt: skip


def in_loop(story):
    @functools.wraps(story)
    def test():
        asyncio.run(asyncio.wait_for(story(), 60))

    return test


def config(**fields) -> EngineConfig:
    sim = SimConfig(task="embed", time_scale=fields.pop("time_scale", 0.0))
    return EngineConfig(device="sim", model="sim", max_model_len=64, sim=sim, **fields)


def items(*texts: str) -> list[PoolingItem]:
    return [PoolingItem(list(text.encode())) for text in texts]


@pytest.mark.parametrize(
    "tokens, params, message",
    [
        ([], EMBED, "input has no tokens"),
        ([1] * 9, EMBED, "9 tokens, but the model takes at most 8"),
        ([100], EMBED, "token id 100 is not in the vocabulary of 100"),
        ([-1], EMBED, "token id -1"),
        ([1], PoolingParams(dimensions=5), "dimensions must be 4, 8 for this model; got 5"),
        ([1], PoolingParams(task="classify"), "the model m cannot classify; it can embed"),
    ],
)
def test_bad_input_is_named(tokens, params, message):
    with pytest.raises(RequestError, match=message):
        check_items([PoolingItem(tokens)], params, INFO)


def test_an_error_names_the_index_of_a_bad_input():
    check_items([PoolingItem([1] * 8)], PoolingParams(dimensions=8), INFO)
    check_items([PoolingItem([1], [0])], PoolingParams(dimensions=16), INFO)
    with pytest.raises(ContextLengthExceeded, match="input 1 has 9 tokens"):
        check_items([PoolingItem([1]), PoolingItem([1] * 9)], EMBED, INFO)
    with pytest.raises(InvalidRequest, match="2 tokens, but 1 type ids"):
        check_items([PoolingItem([1, 2], [0])], EMBED, INFO)
    with pytest.raises(InvalidRequest, match="at least one text"):
        check_items([], EMBED, INFO)


def test_vectors_that_no_message_holds_are_refused_before_they_are_computed(monkeypatch):
    info = msgspec.structs.replace(INFO, tasks=("token_embed", "embed"))
    monkeypatch.setattr(wire, "MAX_FRAME", 2 * wire.ENVELOPE + 8 * 16 * 4)
    per_token = PoolingParams(task="token_embed")
    check_items([PoolingItem([1] * 8)], per_token, info)
    monkeypatch.setattr(wire, "MAX_FRAME", wire.MAX_FRAME - 1)
    with pytest.raises(InvalidRequest, match="their vectors take 512 bytes") as caught:
        check_items([PoolingItem([1] * 8)], per_token, info)
    assert caught.value.param == "input"
    check_items([PoolingItem([1] * 8)], EMBED, info)
    check_items([PoolingItem([1] * 8)], PoolingParams(task="token_embed", dimensions=8), info)


def test_texts_become_items():
    tokenizer = ByteTokenizer()
    assert single(tokenizer, "ab", 8, False) == PoolingItem([256, 97, 98])
    with pytest.raises(ContextLengthExceeded, match=r"the input has 4 tokens.*at most 3"):
        single(tokenizer, "abc", 3, False)
    with pytest.raises(ContextLengthExceeded, match="input 1 has 4 tokens"):
        batch(tokenizer, ["a", "abc"], 3, False)
    assert [len(i.token_ids) for i in batch(tokenizer, ["a", "abcdef"], 3, True)] == [2, 3]
    assert pair(tokenizer, "a", "b", None) == PoolingItem([256, 97, 256, 98], [0, 0, 1, 1])
    assert len(pair(tokenizer, "aaaa", "bb", 5).token_ids) == 5
    assert (prompt_of(INFO, None), prompt_of(INFO, "query")) == ("", "Q: ")
    with pytest.raises(InvalidRequest, match="no prompt 'x'; there is: query"):
        prompt_of(INFO, "x")


@in_loop
async def test_many_callers_get_each_their_own():
    engine = await AsyncEngine.start(config())
    await engine.ready()
    texts = [f"text {i % 7}" for i in range(50)]
    answers = await asyncio.gather(
        *(engine.pool(items(text, "x"), EMBED, request_id=str(i)) for i, text in enumerate(texts))
    )
    for i, (first, second) in enumerate(answers):
        np.testing.assert_array_equal(first, answers[i % 7][0])
        np.testing.assert_array_equal(second, answers[0][1])
        assert first.shape == (64,)
    (rows,) = await engine.pool(items("abc"), PoolingParams(task="token_embed"), request_id="t")
    assert rows.shape == (3, 64)
    assert engine.num_in_flight == 0
    await engine.stop()


@in_loop
async def test_the_deadline_the_wrong_task_and_the_drain():
    engine = await AsyncEngine.start(config())
    await engine.ready()
    with pytest.raises(DeadlineExceeded):
        await engine.pool(items("late"), EMBED, request_id="a", deadline_s=-1.0)
    with pytest.raises(InvalidRequest) as caught:
        await anext(generate(engine, "x", SamplingParams(), request_id="b"))
    assert caught.value.code == "wrong_task"
    assert await engine.drain(1.0)
    with pytest.raises(EngineDead) as refused:
        await engine.pool(items("x"), EMBED, request_id="c")
    assert refused.value.code == "draining"
    await engine.stop()


@in_loop
async def test_a_cancelled_call_leaves_nothing_behind():
    scheduler = SchedulerConfig(max_num_batched_tokens=64)
    engine = await AsyncEngine.start(config(time_scale=1.0, scheduler=scheduler))
    await engine.ready()
    call = asyncio.create_task(
        engine.pool(items(*["x" * 60] * 1000), EMBED, request_id="many")  # 8 s of steps
    )
    await asyncio.sleep(0)  # it has begun
    assert engine.num_in_flight == 1000
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.num_in_flight == 0
    (vector,) = await engine.pool(items("next"), EMBED, request_id="next", deadline_s=4.0)
    assert vector.shape == (64,)
    assert engine.stats.num_waiting == 0
    await engine.stop()


class Desk:
    """A desk whose core is this test."""

    def __init__(self) -> None:
        self.sent: list[wire.ToEngine] = []
        self.desk = AsyncPooling(self.sent.append)

    def start(self, *texts: str) -> asyncio.Task:
        return asyncio.create_task(
            self.desk.pool(items(*texts), EMBED, request_id="r", deadline_s=None)
        )

    async def ids(self) -> list[str]:
        await asyncio.sleep(0)  # the call has begun
        message = self.sent.pop(0)
        assert isinstance(message, wire.AddPooling)
        return [request.request_id for request in message.requests]


def output(request_id: str, value: float) -> PoolingOutput:
    return PoolingOutput(request_id=request_id, data=np.array([value], np.float32).tobytes())


@in_loop
async def test_answers_may_come_in_any_order_and_several_steps():
    rig = Desk()
    call = rig.start("a", "b", "c")
    a, b, c = await rig.ids()
    rig.desk.receive([output(c, 3.0)])
    rig.desk.receive([output(a, 1.0), output("unknown", 9.0), output(b, 2.0)])
    assert [row.tolist() for row in await call] == [[1.0], [2.0], [3.0]]
    assert rig.sent == [] and rig.desk.num_in_flight == 0
    await rig.desk.idle()


@in_loop
async def test_the_first_failure_ends_the_call_and_aborts_the_rest():
    for fail, kind in (
        (lambda d, i: d.receive([PoolingOutput(request_id=i, error="NaN")]), GenerationFailed),
        (lambda d, i: d.refuse(i, QueueFull("full")), QueueFull),
    ):
        rig = Desk()
        call = rig.start("a", "b", "c")
        _, b, _ = await rig.ids()
        fail(rig.desk, b)
        with pytest.raises(kind):
            await call
        (message,) = rig.sent
        assert isinstance(message, wire.Abort) and len(message.request_ids) == 2
        assert rig.desk.num_in_flight == 0
        assert not rig.desk.refuse(b, QueueFull("again"))


@in_loop
async def test_a_lost_core_ends_every_call():
    rig = Desk()
    calls = [rig.start("a", "b"), rig.start("c")]
    await rig.ids()
    await rig.ids()
    rig.desk.lose_all(EngineDead("gone"))
    for call in calls:
        with pytest.raises(EngineDead):
            await call
    assert rig.sent == [] and rig.desk.num_in_flight == 0
