"""Prompts that one engine computes for another one's answer: handed over, or done where they are
answered, and never lost on the way."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import KeyConfig
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.flow.keys import KeyTable, make_table
from octavo_router.proxy.exchange import ProxyExchange
from octavo_router.routing.policies import Policies
from octavo_router.routing.prefill_decode import PrefillDecode
from tests.fakes import vllm_pair as recorded
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import Rig, on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, closed_port, fixed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONG = "one two three four " * 40
WHERE = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "é", "x": 1.5}
COUNTED = {**CHAT, "usage": {"prompt_tokens": 400, "completion_tokens": 1, "total_tokens": 401}}
COMPUTED = json.dumps({**COUNTED, "kv_transfer_params": WHERE}).encode()


async def keeps_the_cache(peer: Peer, request: Received) -> None:
    assert request.json["kv_transfer_params"]["do_remote_decode"] is True
    await peer.answer(COMPUTED)


async def counts(peer: Peer, request: Received) -> None:
    await peer.answer(json.dumps(COUNTED).encode())


@asynccontextmanager
async def paired(
    *answering: ScriptedUpstream, prompts: tuple[int, ...], table: KeyTable | None = None
) -> AsyncIterator[Rig]:
    """Engines that answer, and ports of those that compute prompts."""
    async with routing_to(*(one.port for one in answering), table=table) as rig:
        rig.registry.replace(
            "prefill",
            [
                EndpointSpec(
                    id=f"p{number}", address=Address("127.0.0.1", port), names=("m",),
                    role="prefill", kind="openai",
                )
                for number, port in enumerate(prompts)
            ],
        )  # fmt: skip
        for number in range(len(prompts)):
            rig.registry.report(rig.registry.endpoints[f"p{number}"], "ready")
        policy = PrefillDecode(
            rig.proxy.dispatcher.underway,  # type: ignore[attr-defined]  # the real one
            min_tokens=32, balance_factor=1.25, balance_slack=8,
        )  # fmt: skip
        rig.proxy.dispatcher.policies = Policies(policy)  # type: ignore[attr-defined]
        yield rig
        await rig.settled()


def counted(rig: Rig) -> dict[str, int]:
    return {key[0]: count for key, count in rig.metrics.pool("default").prompts.items()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@on_loop
async def test_a_long_prompt_is_computed_elsewhere_and_fetched(path: str, stream: bool):
    body = (
        chat(LONG, stream=stream, max_tokens=50)
        if path == "/v1/chat/completions"
        else {"model": "m", "prompt": LONG, "stream": stream, "max_tokens": 50}
    )
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with (
        ScriptedUpstream() as decode,
        ScriptedUpstream(keeps_the_cache) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(body, path)
        assert answer.status == 200
        assert stream or answer.json == CHAT
        (question,), (requested,) = prefill.requests, decode.requests
        assert question.json["max_tokens"] == 1
        assert question.json["stream"] is False
        assert "stream_options" not in question.json
        assert requested.json == {**body, "kv_transfer_params": WHERE}
        assert question.header("x-request-id") == requested.header("x-request-id")
        await rig.settled()
        assert counted(rig) == {"ok": 1}
        assert rig.records[0].endpoint.endswith(str(decode.port))
        assert rig.records[0].attempts == 1


@on_loop
async def test_a_short_prompt_and_one_that_is_known_there_stay_where_they_are_answered():
    async with (
        ScriptedUpstream(counts) as decode,
        ScriptedUpstream(keeps_the_cache) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.ask(chat(LONG[::-1]))  # the first to tell how many tokens a text has
        prefill.requests.clear()
        assert (await client.ask(chat("hi"))).status == 200
        assert not prefill.requests
        for _ in range(2):
            assert (await client.ask(chat(LONG))).status == 200
        assert len(prefill.requests) == 1  # what was fetched once lies there
        assert len(decode.requests) == 4


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"max_tokens": 1},
        {"prompt": [LONG, LONG]},
        {"prompt": [[1] * 400, [2] * 400]},
        {"kv_transfer_params": {"do_remote_decode": True}},
    ],
    ids=lambda more: next(iter(more)),
)
@on_loop
async def test_what_one_engine_must_do_alone_it_does_alone(more: dict[str, Any]):
    body = {"model": "m", "prompt": LONG, "max_tokens": 9, **more}
    table = make_table([KeyConfig(tenant="ours", key="k", trusted=True)], {})
    async with (
        ScriptedUpstream() as decode,
        ScriptedUpstream(keeps_the_cache) as prefill,
        paired(decode, prompts=(prefill.port,), table=table) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(body, "/v1/completions", "authorization: Bearer k\r\n")
        assert answer.status == 200
        assert not prefill.requests
        assert [one.json for one in decode.requests] == [body]


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("is full", "refused"),
        ("breaks", "error_5xx"),
        ("refuses the request", "rejected"),
        ("dies", "broken"),
        ("is closed", "connect_failed"),
        ("keeps nothing", "bad_answer"),
        ("answers nonsense", "bad_answer"),
        ("is slow", "timeout"),
    ],
)
@on_loop
async def test_whatever_happens_to_the_prompt_the_request_is_answered(how: str, outcome: str):
    async def failing(peer: Peer, request: Received) -> None:
        match how:
            case "is full":
                await peer.answer(b"{}", status="503 Service Unavailable")
            case "breaks":
                await peer.answer(b"{}", status="500 Internal Server Error")
            case "refuses the request":
                await peer.answer(b"{}", status="400 Bad Request")
            case "keeps nothing":
                await peer.answer(json.dumps({**CHAT, "kv_transfer_params": None}).encode())
            case "answers nonsense":
                await peer.answer(b'{"kv_transfer_params": {')
            case "is slow":
                await peer.left()
            case _:
                peer.reset()

    async with (
        ScriptedUpstream() as decode,
        ScriptedUpstream(failing) as prefill,
        paired(
            decode, prompts=(closed_port() if how == "is closed" else prefill.port,)
        ) as rig,
        await RawClient.open(rig.port) as client,
    ):  # fmt: skip
        body = chat(LONG)
        await client.post(body)
        if how == "is slow":
            await rig.until(lambda: len(prefill.requests) == 1)
            await rig.given_up(rig.registry.endpoints["p0"], after_s=400.0)
        answer = await client.answer()
        assert answer.json == CHAT
        assert [one.json for one in decode.requests] == [body]  # as the client wrote it
        await rig.settled()
        assert counted(rig) == {outcome: 1}
        assert [record.outcome for record in rig.records] == ["ok"]


@on_loop
async def test_a_client_that_leaves_takes_its_prompt_along():
    async def waiting(peer: Peer, request: Received) -> None:
        await peer.left()

    async with (
        ScriptedUpstream() as decode,
        ScriptedUpstream(waiting) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
    ):
        async with await RawClient.open(rig.port) as client:
            await client.post(chat(LONG))
            await rig.until(lambda: len(prefill.requests) == 1)
        await rig.settled()
        await rig.until(lambda: all(peer.has_left.is_set() for peer in prefill.peers))
        assert not decode.requests
        assert [record.outcome for record in rig.records] == ["client_gone"]


async def full(peer: Peer, request: Received) -> None:
    await peer.answer(b"{}", status="503 Service Unavailable")


@on_loop
async def test_another_try_asks_for_the_prompt_again():
    async with (
        ScriptedUpstream(full) as first,
        ScriptedUpstream() as second,
        ScriptedUpstream(keeps_the_cache) as prefill,
        paired(first, second, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        rig.endpoints[1].token_s *= 1e9  # the first is asked first
        answer = await client.ask(chat(LONG))
        assert answer.json == CHAT
        assert len(prefill.requests) == 2  # the first one's cache may have been fetched
        for decode in (first, second):
            assert decode.requests[0].json["kv_transfer_params"] == WHERE


@on_loop
async def test_another_try_without_a_prompt_is_the_request_as_it_was_written():
    async def once(peer: Peer, request: Received) -> None:
        await (keeps_the_cache if len(prefill.requests) == 1 else full)(peer, request)

    async with (
        ScriptedUpstream(full) as first,
        ScriptedUpstream() as second,
        ScriptedUpstream(once) as prefill,
        paired(first, second, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        rig.endpoints[1].token_s *= 1e9
        body = chat(LONG)
        assert (await client.ask(body)).json == CHAT
        assert [one.json for one in second.requests] == [body]
        await rig.settled()
        assert counted(rig) == {"ok": 1, "refused": 1}


@on_loop
async def test_an_engine_that_fetches_a_prompt_is_not_taken_to_compute_it():
    async def slow(peer: Peer, request: Received) -> None:
        assert rig.endpoints[0].pending_tokens == 0
        assert rig.endpoints[0].in_flight == 1
        await fixed(peer, request)

    async with (
        ScriptedUpstream(slow) as decode,
        ScriptedUpstream(keeps_the_cache) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat(LONG))).json == CHAT


@on_loop
async def test_a_prompt_that_failed_is_not_tried_elsewhere_again():
    async with (
        ScriptedUpstream(full) as first,
        ScriptedUpstream() as second,
        ScriptedUpstream(full) as prefill,
        paired(first, second, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        rig.endpoints[1].token_s *= 1e9
        assert (await client.ask(chat(LONG))).json == CHAT
        assert len(prefill.requests) == 1
        assert (len(first.requests), len(second.requests)) == (1, 1)


@on_loop
async def test_prompts_go_where_their_prefix_was_computed():
    async with (
        ScriptedUpstream(counts) as one,
        ScriptedUpstream(counts) as two,
        ScriptedUpstream(keeps_the_cache) as left,
        ScriptedUpstream(keeps_the_cache) as right,
        paired(one, two, prompts=(left.port, right.port)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for turn in range(3):
            await client.ask(chat(LONG + f" and then {turn} " * 60))
        # Of two alike the one that was asked longest ago would be next.
        assert (len(left.requests), len(right.requests)) == (3, 0)


@on_loop
async def test_who_asks_is_told_where_the_prompt_was_computed():
    async with (
        ScriptedUpstream() as decode,
        ScriptedUpstream(keeps_the_cache) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat(LONG), more="x-octavo-explain: 1\r\n")
        reported = json.loads(answer.header("x-octavo-explain") or "")
        assert reported["prompt_computed_at"] == f"127.0.0.1:{prefill.port}"
        assert reported["policy"] == "prefill-decode"


@on_loop
async def test_without_an_engine_for_prompts_each_is_computed_where_it_is_answered():
    async with (
        ScriptedUpstream(fixed) as decode,
        paired(decode, prompts=()) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat(LONG))).json == CHAT
        assert counted(rig) == {}


# The engine with the cache is gone before the one that answers has fetched it.

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


async def was_recorded(peer: Peer, request: Received) -> None:
    await peer.answer(recorded.COMPUTED)


async def stream_of(peer: Peer, *pieces: bytes) -> None:
    await peer.begin_stream()
    for piece in pieces:
        await peer.chunk(piece)
    await peer.end_stream()


def asking_for(path: str, *, stream: bool) -> dict[str, Any]:
    if path == CHAT_PATH:
        return chat(LONG, stream=stream, max_tokens=50)
    return {"model": "m", "prompt": LONG, "stream": stream, "max_tokens": 50}


@pytest.mark.parametrize(
    ("path", "failing"),
    [
        (TEXT_PATH, ()),
        (CHAT_PATH, ()),
        (TEXT_PATH, (recorded.FAILED_EVENTS,)),
        (CHAT_PATH, (recorded.ROLE + recorded.FAILED_EVENTS,)),
        (CHAT_PATH, (recorded.ROLE, recorded.FAILED_EVENTS)),
        (CHAT_PATH, (recorded.ROLE[:99], recorded.ROLE[99:], recorded.FAILED_EVENTS[:20],
                     recorded.FAILED_EVENTS[20:])),
    ],
    ids=["text", "chat", "text streamed", "chat streamed", "role before", "in pieces"],
)  # fmt: skip
@on_loop
async def test_a_cache_that_is_gone_costs_the_client_nothing(path: str, failing: tuple[bytes, ...]):
    events = recorded.CHAT_EVENTS if path == CHAT_PATH else recorded.COMPLETION_EVENTS

    async def answering(peer: Peer, request: Received) -> None:
        if "kv_transfer_params" not in request.json:
            await (stream_of(peer, *events) if failing else peer.answer(recorded.COMPUTED))
        elif failing:
            await stream_of(peer, *failing)
        else:
            await peer.answer(recorded.FAILED, status="500 Internal Server Error")

    async with (
        ScriptedUpstream(answering) as decode,
        ScriptedUpstream(was_recorded) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        body = asking_for(path, stream=bool(failing))
        answer = await client.ask(body, path, more="x-octavo-explain: 1\r\n")
        assert answer.status == 200
        assert answer.body == (b"".join(events) if failing else recorded.COMPUTED)
        assert "prompt_computed_at" not in json.loads(answer.header("x-octavo-explain") or "")
        where = {"kv_transfer_params": json.loads(recorded.WHERE)}
        assert [one.json for one in decode.requests] == [body | where, body]
        assert len(prefill.requests) == 1
        await rig.settled()
        assert counted(rig) == {"ok": 1, "not_fetched": 1}
        assert [(one.outcome, one.attempts) for one in rig.records] == [("ok", 2)]
        assert rig.endpoints[0].state == "ready"


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_an_engine_that_fails_anyway_is_asked_no_third_time(stream: bool):
    async def failing(peer: Peer, request: Received) -> None:
        if stream:
            await stream_of(peer, recorded.ROLE, recorded.FAILED_EVENTS)
        else:
            await peer.answer(recorded.FAILED, status="500 Internal Server Error")

    async with (
        ScriptedUpstream(failing) as decode,
        ScriptedUpstream(was_recorded) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(asking_for(CHAT_PATH, stream=stream))
        assert answer.status == (200 if stream else 500)
        assert answer.body == (
            recorded.ROLE + recorded.FAILED_EVENTS if stream else recorded.FAILED
        )
        assert len(decode.requests) == 2
        await rig.settled()
        assert [one.outcome for one in rig.records] == ["upstream_error"]


@on_loop
async def test_who_will_speak_is_told_with_the_first_word_and_nothing_later_is_kept_back():
    goes_on = asyncio.Event()

    async def speaking(peer: Peer, request: Received) -> None:
        role, first, *rest = recorded.CHAT_EVENTS
        await peer.begin_stream()
        await peer.chunk(role)
        await peer.chunk(first)
        await goes_on.wait()
        await peer.chunk(b"".join(rest))
        await peer.end_stream()

    async with (
        ScriptedUpstream(speaking) as decode,
        ScriptedUpstream(was_recorded) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(asking_for(CHAT_PATH, stream=True))
        seen = b""
        while b'"content":"The"' not in seen:
            seen += await client.reader.read(65536)
        assert b'"role":"assistant"' in seen
        goes_on.set()
        while recorded.DONE not in seen:
            seen += await client.reader.read(65536)
        assert len(decode.requests) == 1
        await rig.settled()
        assert counted(rig) == {"ok": 1}


@pytest.mark.parametrize("begins", [False, True], ids=["no head", "a head and the role"])
@on_loop
async def test_a_stream_that_waits_for_a_cache_in_vain_is_begun_again(begins: bool):
    asked_again_at = 0.0

    async def hanging(peer: Peer, request: Received) -> None:
        nonlocal asked_again_at
        if "kv_transfer_params" not in request.json:
            asked_again_at = time.monotonic()
            await stream_of(peer, *recorded.CHAT_EVENTS)
            return
        if begins:
            await peer.begin_stream()
            await peer.chunk(recorded.ROLE)
        await peer.left()

    async with (
        ScriptedUpstream(hanging) as decode,
        ScriptedUpstream(was_recorded) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(asking_for(CHAT_PATH, stream=True))
        await rig.until(lambda: len(decode.requests) == 1)
        (exchange,) = rig.proxy.exchanges
        assert isinstance(exchange, ProxyExchange)
        await rig.until(lambda: not begins or exchange._account.first_at is not None)
        rig.later(400.0)
        answer = await client.answer()
        assert answer.body == b"".join(recorded.CHAT_EVENTS)
        assert decode.peers[0].has_left.is_set()  # the first attempt was cancelled
        await rig.settled()
        assert counted(rig) == {"ok": 1, "not_fetched": 1}
        (record,) = rig.records
        assert record.ttft_s is not None
        # A role that was kept back is no first token.
        assert record.ended_at - record.duration_s + record.ttft_s >= asked_again_at


@on_loop
async def test_an_answer_that_ends_before_it_has_begun_is_none():
    async def silent(peer: Peer, request: Received) -> None:
        await stream_of(peer)

    async with (
        ScriptedUpstream(silent) as decode,
        ScriptedUpstream(was_recorded) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(asking_for(CHAT_PATH, stream=True))
        assert answer.status == 502
        await rig.settled()


@on_loop
async def test_who_leaves_while_a_cache_is_fetched_takes_the_request_along():
    async def hanging(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(recorded.ROLE)
        await peer.left()

    async with (
        ScriptedUpstream(hanging) as decode,
        ScriptedUpstream(was_recorded) as prefill,
        paired(decode, prompts=(prefill.port,)) as rig,
    ):
        async with await RawClient.open(rig.port) as client:
            await client.post(asking_for(CHAT_PATH, stream=True))
            await rig.until(lambda: len(decode.requests) == 1)
        await rig.until(lambda: all(peer.has_left.is_set() for peer in decode.peers))
        await rig.settled()
        assert [record.outcome for record in rig.records] == ["client_gone"]
