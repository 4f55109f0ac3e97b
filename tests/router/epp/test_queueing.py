"""Requests that cannot go at once: they wait, are shed, or leave; and many at the same time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest

from octavo_router.config.settings import FlowConfig, KeyConfig, RouterConfig
from octavo_router.epp.head import DESTINATION
from octavo_router.flow.keys import make_table
from tests.fakes.endpoints import make_spec
from tests.fakes.envoy import (
    BUFFERED,
    DUPLEX,
    NONE,
    POST,
    body_message,
    headers_message,
    picking,
)
from tests.fakes.router_rig import on_loop

BODY = json.dumps(
    {"model": "model", "messages": [{"role": "user", "content": "hi" * 100}]}
).encode()
REASON = "x-llm-d-request-dropped-reason"


def flow(**fields):
    return RouterConfig(flow=replace(FlowConfig(), **fields))


def fill(rig):
    """No room is left anywhere."""
    for endpoint in rig.endpoints:
        endpoint.load = replace(endpoint.load, is_saturated=True)


def free(rig):
    for endpoint in rig.endpoints:
        endpoint.load = replace(endpoint.load, is_saturated=False)
        rig.gate.wake(endpoint.pool)


def late(rig):
    """The next tick finds that somebody's time is over."""
    rig.gate.tick()
    return not waiting(rig) and rig.records


def waiting(rig):
    return rig.gate.demand("pool").queued + rig.gate.demand("pool").held


def code_of(answer):
    return json.loads(answer.body)["error"]["code"]


async def send_request(gateway, modes=(DUPLEX, DUPLEX)):
    await gateway.send(headers_message(2, POST, modes=modes))
    await gateway.send(body_message(4, BODY, is_end=True))


@on_loop
async def test_a_request_waits_for_room_and_then_goes():
    async with picking(1) as rig, rig.open() as gateway:
        fill(rig)
        await send_request(gateway)
        await rig.until(lambda: waiting(rig) == 1)
        assert rig.endpoints[0].in_flight == 0
        free(rig)
        assert (await gateway.answer()).destinations == ["10.0.0.1:8000"]


@on_loop
async def test_a_pool_at_zero_holds_its_requests_until_its_first_engine_is_there():
    async with picking(1) as rig, rig.open() as gateway:
        rig.registry.report(rig.endpoints[0], "connecting")
        await send_request(gateway)
        await rig.until(lambda: waiting(rig) == 1)
        rig.add(make_spec(7, kind="octavo"))
        assert (await gateway.answer()).destinations == ["10.0.0.8:8000"]


@on_loop
async def test_a_gateway_with_deadlines_is_asked_for_more_time():
    async with picking(1) as rig, rig.open() as gateway:
        fill(rig)
        await gateway.ask(headers_message(2, POST, modes=(BUFFERED, NONE)))
        answer = await gateway.ask(body_message(4, BODY, is_end=True))
        assert (answer.kind, answer.more_time_s) == (0, 31)
        free(rig)
        assert (await gateway.answer()).destinations == ["10.0.0.1:8000"]


@on_loop
async def test_what_does_not_fit_the_queue_is_shed_with_429():
    async with picking(1, config=flow(max_queue=0)) as rig, rig.open() as gateway:
        fill(rig)
        await send_request(gateway)
        answer = await gateway.answer()
        assert (answer.status, code_of(answer)) == (429, "queue_full")
        assert answer.set_headers[REASON] == "rejected-saturated"
        assert int(answer.set_headers["retry-after"]) >= 1
        await rig.until(lambda: rig.records)  # written once the stream is over
        assert (rig.records[0].status, rig.records[0].outcome) == (429, "refused")


@on_loop
async def test_who_waits_too_long_is_told():
    async with picking(1, config=flow(queue_timeout_s=0.01)) as rig, rig.open() as gateway:
        fill(rig)
        await send_request(gateway)
        await rig.until(lambda: late(rig))
        answer = await gateway.answer()
        assert (answer.status, code_of(answer)) == (429, "queue_timeout")
        assert answer.set_headers[REASON] == "rejected-ttl-expired"


@on_loop
async def test_nobody_there_is_503_when_the_time_to_hold_is_over():
    async with picking(1, config=flow(hold_timeout_s=0.01)) as rig, rig.open() as gateway:
        rig.registry.report(rig.endpoints[0], "connecting")
        await send_request(gateway)
        await rig.until(lambda: late(rig))
        answer = await gateway.answer()
        assert (answer.status, code_of(answer)) == (503, "no_endpoints")
        assert answer.set_headers[REASON] == "rejected-no-endpoints"


@pytest.mark.parametrize("how", ["half-close", "cancel"])
@on_loop
async def test_who_leaves_while_waiting_leaves_the_queue(how):
    async with picking(1) as rig:
        fill(rig)
        gateway = rig.open()
        await send_request(gateway)
        await rig.until(lambda: waiting(rig) == 1)
        if how == "cancel":
            gateway.call.cancel()
        else:
            await gateway.leave()
        await rig.until(lambda: waiting(rig) == 0 and rig.records)
        free(rig)
        assert rig.leases.results == []
        assert rig.records[0].outcome == "client_gone"
        await rig.settled()


@on_loop
async def test_keys_are_asked_for_where_there_are_some():
    table = make_table([KeyConfig(tenant="t", key="k", requests_per_s=1.0)], {})
    async with picking(1, table=table) as rig:
        async with rig.open() as gateway:
            answer = await gateway.ask(headers_message(2, POST, modes=(DUPLEX, DUPLEX)))
            assert (answer.status, code_of(answer)) == (401, "missing_api_key")
        key = {"authorization": "Bearer k"}
        async with rig.open() as gateway:
            assert (await gateway.post(BODY, headers=key)).destinations
        async with rig.open() as gateway:
            answer = await gateway.post(BODY, headers=key)
            assert (answer.status, code_of(answer)) == (429, "request_rate_exceeded")
            assert answer.set_headers[REASON] == "rejected-over-limit"
        assert [record.tenant for record in rig.records] == ["", "t", "t"]


@pytest.mark.parametrize("waits_for", ["body", "room"])
@on_loop
async def test_a_key_that_is_revoked_while_its_request_waits_gets_no_destination(waits_for):
    table = make_table([KeyConfig(tenant="t", key="k"), KeyConfig(tenant="o", key="other")], {})
    async with picking(1, table=table) as rig, rig.open() as gateway, rig.open() as other:
        if waits_for == "room":
            fill(rig)
        rest = body_message(4, BODY[50:], is_end=True)
        for one, key in ((gateway, "k"), (other, "other")):
            pairs = {**POST, "authorization": f"Bearer {key}"}
            await one.send(headers_message(2, pairs, modes=(DUPLEX, DUPLEX)))
            await one.send(body_message(4, BODY[:50], is_end=False))
            if waits_for == "room":
                await one.send(rest)
        if waits_for == "room":
            await rig.until(lambda: waiting(rig) == 2)
        else:
            await asyncio.sleep(0.1)  # it has read the headers
        rig.gate.replace_keys(make_table([KeyConfig(tenant="o", key="other")], {}))
        if waits_for == "room":
            free(rig)
        else:
            await gateway.send(rest)
            await other.send(rest)
        answer = await gateway.answer()
        assert (answer.status, code_of(answer)) == (401, "invalid_api_key")
        assert DESTINATION not in answer.set_headers
        assert (await other.answer()).destinations == ["10.0.0.1:8000"]
        assert rig.endpoints[0].in_flight == 1  # the other's


@on_loop
async def test_what_is_no_message_ends_its_stream_and_no_other():
    async with picking(1) as rig, rig.open() as other:
        await other.post(BODY)
        broken = rig.open()
        await broken.send(b"\x0a\xff\xff")
        assert await broken.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await other.body() == BODY


@on_loop
async def test_messages_out_of_order_are_survived():
    """Whatever comes, in whatever order: an answer or an end, and nothing stays reserved."""
    rng = random.Random(6)
    messages = [
        headers_message(2, POST, modes=(DUPLEX, DUPLEX)),
        headers_message(2, POST, modes=(BUFFERED, NONE)),
        headers_message(2, {":method": "GET", ":path": "/"}, is_end=True),
        body_message(4, BODY, is_end=True),
        body_message(4, BODY[:50], is_end=False),
        body_message(4, b"", is_end=True),
        headers_message(6, {}),
        headers_message(3, {":status": "200"}),
        headers_message(3, {}, is_end=True),
        body_message(5, b"x", is_end=False),
        body_message(5, b"", is_end=True),
        headers_message(7, {}),
        b"",
        b"\x62\x03new",
    ]
    async with picking(2) as rig:
        for _ in range(150):
            gateway = rig.open()
            for message in rng.choices(messages, k=rng.randrange(1, 7)):
                try:
                    await gateway.send(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    break
            # A write that meets the picker's end fails, but only on this side.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await gateway.leave()
        await rig.settled()


@on_loop
async def test_streams_cancelled_at_any_moment_leave_nothing_and_make_no_noise(caplog):
    body = json.dumps({"model": "model", "prompt": "x" * 200_000}).encode()
    rng = random.Random(7)

    async def one(rig):
        gateway = rig.open()
        turns = rng.randrange(120)

        async def talk():
            await gateway.post(body, headers={":path": "/v1/completions"}, pieces=[9, 70_000])
            await gateway.body()
            await gateway.response([b"data: x\n\n"] * 8)

        talking = asyncio.create_task(talk())
        for _ in range(turns):
            await asyncio.sleep(0)
        gateway.call.cancel()
        talking.cancel()  # a write that waits would not hear of it
        await asyncio.gather(talking, return_exceptions=True)

    caplog.set_level("INFO")
    async with picking(2) as rig:
        for _ in range(10):
            await asyncio.gather(*(one(rig) for _ in range(12)))
        await rig.settled()
    # gRPC tells asyncio of late news for the loops of tests before.
    assert [record.message for record in caplog.records if record.name != "asyncio"] == [
        "Picks endpoints"
    ]


@pytest.mark.slow
@on_loop
async def test_many_at_once_and_their_rate(capsys):
    num_workers, num_each = 16, 25
    async with picking(4) as rig:

        async def work() -> None:
            for _ in range(num_each):
                async with rig.open() as gateway:
                    await gateway.post(BODY)
                    assert await gateway.body() == BODY
                    await gateway.response([b'{"usage":{"prompt_tokens":9}}'])

        began_at = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(num_workers)))
        took_s = time.perf_counter() - began_at
        await rig.settled()
        count = num_workers * num_each
        assert rig.leases.results.count(("pod-0", "ok")) < count / 2
        assert len(rig.leases.results) == len(rig.records) == count
    with capsys.disabled():
        rate = f"{count / took_s:.0f} picks/s with their answers"
        print(f"\n{rate}, both sides in one process")  # noqa: T201  # a figure to look at
