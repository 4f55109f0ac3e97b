"""An engine's answer on its way back: it passes unchanged, and settles what was reserved."""

from __future__ import annotations

import json

import pytest

from octavo_router.config.settings import KeyConfig
from octavo_router.flow.keys import make_table
from tests.fakes.envoy import (
    BUFFERED,
    DUPLEX,
    GRPC,
    NONE,
    POST,
    STREAMED,
    body_message,
    headers_message,
    picking,
)
from tests.fakes.router_rig import on_loop

BODY = json.dumps({"model": "model", "prompt": "x" * 500, "stream": True}).encode()
COMPLETIONS = {":path": "/v1/completions"}
USAGE = (
    b'"usage":{"prompt_tokens":120,"completion_tokens":34,'
    b'"prompt_tokens_details":{"cached_tokens":96}}'
)
EVENTS = [
    b'data: {"choices":[{"text":"a"}],"usage":null}\n\ndata: {"choi',
    b'ces":[{"text":"b"}],"usage":null}\n\ndata: {"choices":[],"us',
    b"age" + USAGE[6:] + b"}\n\ndata: [DO",
    b"NE]\n\n",
]


async def placed(gateway, modes=(DUPLEX, DUPLEX)):
    answer = await gateway.post(BODY, headers=COMPLETIONS, modes=modes)
    await gateway.body()
    return answer.destinations


def served(authority):
    return {"envoy.lb": {"x-gateway-destination-endpoint-served": authority}}


@pytest.mark.parametrize(
    "pieces", [EVENTS, [b'{"choices":[],', USAGE[:9], USAGE[9:] + b"}"], [b"{" + USAGE + b"}"]]
)
@on_loop
async def test_an_answer_passes_unchanged_and_its_usage_is_learnt(pieces):
    async with picking(2) as rig:
        async with rig.open() as gateway:
            await placed(gateway)
            assert [e.in_flight for e in rig.endpoints] == [1, 0]
            _, body = await gateway.response(pieces, metadata=served("10.0.0.1:8000"))
            assert body == b"".join(pieces)
            # It is settled by its last piece, though the stream goes on.
            assert [e.in_flight for e in rig.endpoints] == [0, 0]
        (outcome,) = rig.leases.outcomes
        assert outcome.result.value == "ok"
        assert (outcome.prompt_tokens, outcome.output_tokens) == (120, 34)
        assert outcome.cached_tokens == 96
        assert outcome.ttft_s > 0.0
        (record,) = rig.records
        assert (record.status, record.outcome, record.endpoint) == (200, "ok", "10.0.0.1:8000")
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (120, 96, 34)
        assert record.response_bytes == len(body)
        await rig.settled()


@on_loop
async def test_the_first_piece_releases_the_prompt_and_keeps_the_seat():
    async with picking(1) as rig, rig.open() as gateway:
        await placed(gateway)
        endpoint = rig.endpoints[0]
        assert endpoint.pending_tokens > 0
        await gateway.ask(headers_message(3, {":status": "200"}))
        assert endpoint.pending_tokens > 0
        await gateway.ask(body_message(5, b"data: x\n\n", is_end=False))
        assert (endpoint.in_flight, endpoint.pending_tokens) == (1, 0)


@on_loop
async def test_the_endpoint_that_really_served_gets_the_lease():
    async with picking(3) as rig:
        async with rig.open() as gateway:
            first, fallback = await placed(gateway)
            assert first == "10.0.0.1:8000"
            await gateway.ask(headers_message(3, {":status": "200"}, metadata=served(fallback)))
            assert [e.in_flight for e in rig.endpoints] == [0, 1, 0]
            await gateway.ask(body_message(5, b"{" + USAGE + b"}", is_end=True))
        assert rig.leases.results == [("pod-0", "connect_failed"), ("pod-1", "ok")]
        (record,) = rig.records
        assert (record.endpoint, record.endpoint_id) == (fallback, "pod-1")
        assert record.attempts == 2
        await rig.settled()


@on_loop
async def test_a_header_may_say_who_served():
    async with picking(2) as rig, rig.open() as gateway:
        await placed(gateway)
        name = "x-gateway-destination-endpoint-served"
        await gateway.response([b"{}"], headers={name: "10.0.0.2:8000"})
        assert [one for one, _ in rig.leases.results] == ["pod-0", "pod-1"]


@on_loop
async def test_somebody_unknown_who_served_costs_nobody_a_seat():
    async with picking(2) as rig:
        async with rig.open() as gateway:
            await placed(gateway)
            await gateway.response([b"{}"], metadata=served("10.9.9.9:1"))
        assert rig.records[0].endpoint == "10.9.9.9:1"
        await rig.settled()


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (200, "ok"), (400, "rejected"), (429, "refused"), (503, "refused"), (500, "error_5xx"),
    ],
)  # fmt: skip
@on_loop
async def test_the_status_decides_what_the_answer_says_of_the_endpoint(status, result):
    async with picking(1) as rig:
        async with rig.open() as gateway:
            await placed(gateway)
            await gateway.response([b"{}"], status=status)
        assert rig.leases.results == [("pod-0", result)]
        assert rig.records[0].status == status


@pytest.mark.parametrize(
    ("details", "result"),
    [
        ("via_upstream", "refused"),
        ("upstream_reset_before_response_started{connection_termination}", "broken"),
        ("upstream_reset_before_response_started{remote_connection_failure}", "connect_failed"),
        ("upstream_response_timeout", "timeout"),
        ("request_rate_limited", "client_gone"),
    ],
)
@on_loop
async def test_an_answer_of_the_gateways_own_says_what_happened(details, result):
    async with picking(1) as rig, rig.open() as gateway:
        await placed(gateway)
        await gateway.ask(headers_message(3, {":status": "503"}, details=details))
        await gateway.ask(body_message(5, b"upstream connect error", is_end=True))
        assert rig.leases.results == [("pod-0", result)]


@on_loop
async def test_200_without_an_answer_is_no_success():
    async with picking(1) as rig:
        async with rig.open() as gateway:
            await placed(gateway)
            await gateway.response([b""])
        assert rig.leases.results == [("pod-0", "bad_answer")]


@on_loop
async def test_trailers_end_an_answer():
    async with picking(1) as rig, rig.open() as gateway:
        await placed(gateway)
        await gateway.ask(headers_message(3, {":status": "200"}))
        await gateway.ask(body_message(5, b"{" + USAGE + b"}", is_end=False))
        assert (await gateway.ask(headers_message(7, {"grpc-status": "0"}))).kind == 6
        assert rig.leases.results == [("pod-0", "ok")]


@pytest.mark.parametrize("phase", ["placed", "headers", "body"])
@on_loop
async def test_a_client_that_leaves_in_any_phase_gives_everything_back(phase):
    async with picking(1) as rig:
        async with rig.open() as gateway:
            await placed(gateway)
            if phase != "placed":
                await gateway.ask(headers_message(3, {":status": "200"}))
            if phase == "body":
                await gateway.ask(body_message(5, b"data: x\n\n", is_end=False))
        await rig.settled()
        assert rig.leases.results == [("pod-0", "client_gone")]
        assert rig.records[0].outcome == "client_gone"


@pytest.mark.parametrize("phase", ["headers", "body", "placed", "answering"])
@on_loop
async def test_a_cancelled_stream_gives_everything_back(phase):
    async with picking(1) as rig:
        gateway = rig.open()
        await gateway.send(headers_message(2, POST | COMPLETIONS, modes=(DUPLEX, DUPLEX)))
        if phase == "body":
            await gateway.send(body_message(4, BODY[:9], is_end=False))
        elif phase != "headers":
            await gateway.send(body_message(4, BODY, is_end=True))
            await gateway.answer()
            await gateway.body()
        if phase == "answering":
            await gateway.ask(headers_message(3, {":status": "200"}))
            await gateway.ask(body_message(5, b"data: x\n\n", is_end=False))
        await rig.until(lambda: rig.gate.tenants._anonymous)  # it has been read
        gateway.call.cancel()
        await rig.until(lambda: rig.records)
        await rig.settled()
        assert rig.records[0].outcome == "client_gone"


# -- how much of an answer the gateway sends


@on_loop
async def test_without_bodies_the_answer_lasts_until_the_stream_ends():
    async with picking(1) as rig:
        async with rig.open() as gateway:
            await placed(gateway, modes=(DUPLEX, NONE))
            head = await gateway.ask(headers_message(3, {":status": "200"}))
            assert head.mode_override is None
            assert (rig.endpoints[0].in_flight, rig.endpoints[0].pending_tokens) == (1, 0)
        await rig.settled()
        assert rig.leases.results == [("pod-0", "ok")]


@pytest.mark.parametrize(("response_mode", "used"), [(NONE, 256 + 125), (DUPLEX, 154)])
@on_loop
async def test_a_tenant_pays_what_was_counted_or_else_what_was_expected(response_mode, used):
    table = make_table([KeyConfig(tenant="t", key="k", tokens_per_min=600.0)], {})
    async with picking(1, table=table) as rig:
        async with rig.open() as gateway:
            headers = COMPLETIONS | {"authorization": "Bearer k"}
            await gateway.post(BODY, headers=headers, modes=(DUPLEX, response_mode))
            await gateway.body()
            if response_mode == NONE:
                await gateway.ask(headers_message(3, {":status": "200"}))
            else:
                await gateway.response([b"{" + USAGE + b"}"])
        await rig.until(lambda: rig.records)
        (tenant,) = rig.gate.tenants._by_digest.values()
        assert tenant.tokens is not None
        level = tenant.tokens.level(0.0)  # as it was left
        assert 600.0 - level == pytest.approx(used, abs=30.0)  # it refills 10 a second


@pytest.mark.parametrize("mode", [STREAMED, BUFFERED])
@on_loop
async def test_other_modes_get_an_answer_that_changes_nothing(mode):
    async with picking(1) as rig, rig.open() as gateway:
        await placed(gateway, modes=(DUPLEX, mode))
        head = await gateway.ask(headers_message(3, {":status": "200"}))
        assert head.mode_override is None
        answer = await gateway.ask(body_message(5, b"{" + USAGE + b"}", is_end=True))
        assert (answer.kind, answer.body, answer.streamed) == (4, None, None)
        assert rig.leases.outcomes[0].output_tokens == 34


@on_loop
async def test_errors_need_not_be_seen():
    async with picking(1) as rig, rig.open() as gateway:
        await placed(gateway, modes=(DUPLEX, STREAMED))
        head = await gateway.ask(headers_message(3, {":status": "400"}))
        assert head.mode_override == {2: 1, 6: 1}  # headers and trailers SEND, bodies NONE


@on_loop
async def test_bodies_that_nobody_wants_are_declined_and_passed_on_if_they_come_anyway():
    async with picking(1, response_bodies=False) as rig:
        async with rig.open() as gateway:
            await placed(gateway, modes=(DUPLEX, STREAMED))
            head = await gateway.ask(headers_message(3, {":status": "200"}))
            assert head.mode_override == {2: 1, 6: 1}
            assert (await gateway.ask(body_message(5, b"x", is_end=True))).kind == 4
        async with rig.open() as gateway:  # full duplex knows no override
            await placed(gateway)
            head, body = await gateway.response([b"a", b"b"])
            assert (head.mode_override, body) == (None, b"ab")
        await rig.settled()
        assert [result for _, result in rig.leases.results] == ["ok", "ok"]


@on_loop
async def test_grpc_bodies_go_back_as_they_came():
    async with picking(1) as rig, rig.open() as gateway:
        await gateway.ask(headers_message(2, POST, is_end=False, modes=(NONE, GRPC)))
        await gateway.ask(headers_message(3, {":status": "200"}))
        answer = await gateway.ask(body_message(5, b"message", is_end=True))
        assert (answer.streamed, answer.is_end) == (b"message", True)


@on_loop
async def test_answers_to_requests_that_were_never_seen_pass():
    async with picking(1) as rig, rig.open() as gateway:
        head = await gateway.ask(headers_message(3, {":status": "200"}, modes=(NONE, DUPLEX)))
        assert (head.kind, head.set_headers) == (2, {})
        assert (await gateway.ask(body_message(5, b"x", is_end=True))).streamed == b"x"
        assert rig.leases.results == []
