"""Every route of an engine that is for clients passes through; none that changes it does."""

from __future__ import annotations

import json

import pytest

from octavo_engine.server.routes import ROUTES, Row
from octavo_router.proxy.paths import PROXIED, kept_path
from octavo_router.proxy.response_affinity import place_of
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream

# What an engine answers with a key, and the router answers itself or keeps to the operator.
OWN = {"/v1/models", "/v1/models/{model:path}", "/octavo/v1/stream"}
NOT_FOR_CLIENTS = {
    "/invocations", "/is_sleeping", "/is_paused", "/get_world_size", "/tokenizer_info",
    "/v1/realtime",
}  # fmt: skip
ONE_ENGINES = (
    "/v1/files",
    "/v1/batches",
    "/v1/messages/batches",
)  # kept in its folder, and known to no other


def name_of(row: Row) -> str:
    return f"{row.method} {row.path}"


def is_proxied(method: str, path: str) -> bool:
    named = path.replace("{response_id}", "resp_1")
    row = PROXIED.get(named) or kept_path(named)[0]
    return row is not None and method in row.methods


@pytest.mark.parametrize(
    "row",
    [row for row in ROUTES if row.access == "key"],
    ids=name_of,
)
def test_what_a_key_opens_at_an_engine_the_router_lets_through(row):
    is_another_s = row.path in OWN | NOT_FOR_CLIENTS or row.path.startswith(ONE_ENGINES)
    expected = not is_another_s
    assert is_proxied(row.method, row.path) == expected


@pytest.mark.parametrize(
    "row",
    [row for row in ROUTES if row.access != "key"],
    ids=name_of,
)
def test_what_an_admin_does_or_anybody_sees_it_does_not(row):
    assert not is_proxied(row.method, row.path)


@on_loop
async def test_each_path_is_sent_on_with_its_own_body_and_counted_under_its_name():
    async def echo(peer: Peer, request: Received) -> None:
        await peer.answer(json.dumps({"got": request.json}).encode())

    paths = [path for path, row in PROXIED.items() if row.is_json]
    async with (
        ScriptedUpstream(echo) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for path in paths:
            body = {"model": "m", "input": path}
            assert (await client.ask(body, path)).json == {"got": body}, path
        assert [one.line.split()[1].decode() for one in upstream.requests] == paths
        assert {labels[1] for labels in rig.metrics.requests} == set(paths)


def kept_id(number: int, random: str = "ab" * 24) -> str:
    return f"resp_{place_of(f'e{number}')}{random}"


async def served(peer: Peer, request: Received) -> None:
    await peer.answer(json.dumps({"at": peer.reader is not None, "id": "x"}).encode())


@on_loop
async def test_a_response_is_asked_for_where_it_is_kept():
    async with (
        ScriptedUpstream(served) as first,
        ScriptedUpstream(served) as second,
        routing_to(first.port, second.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        path = f"/v1/responses/{kept_id(1)}"
        assert (await client.get(path + "?include=a")).status == 200
        assert (await client.get(path + "/input_items?limit=2")).status == 200
        assert (await client.get(path, method="DELETE")).status == 200
        assert (await client.get(path + "/cancel", method="POST")).status == 200
        assert (await client.get(f"/v1/responses/{kept_id(0)}")).status == 200

        assert [one.line.decode().rpartition(" ")[0] for one in second.requests] == [
            f"GET {path}?include=a", f"GET {path}/input_items?limit=2",
            f"DELETE {path}", f"POST {path}/cancel",
        ]  # fmt: skip
        assert len(first.requests) == 1
        routes = sorted(labels[1] for labels in rig.metrics.requests)
        assert routes == [
            "/v1/responses/{id}", "/v1/responses/{id}/cancel", "/v1/responses/{id}/input_items",
        ]  # fmt: skip


@on_loop
async def test_a_response_goes_on_where_the_one_before_is_kept_and_engines_learn_their_place():
    async with (
        ScriptedUpstream(served) as first,
        ScriptedUpstream(served) as second,
        routing_to(first.port, second.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        path = "/v1/responses"
        again = {"model": "m", "input": "x", "previous_response_id": kept_id(1)}
        for _ in range(3):
            await client.ask(again, path)
        quoted = {"model": "m", "input": json.dumps({"previous_response_id": kept_id(1)})}
        await client.ask(quoted, path)  # text that only looks like it
        await client.ask(chat())

        assert len(second.requests) == 3
        assert [one.header("x-octavo-place") for one in second.requests] == [place_of("e1")] * 3
        assert [one.header("x-octavo-place") for one in first.requests] == [place_of("e0"), None]


@on_loop
async def test_an_id_that_nobody_here_made_is_not_found_unless_there_is_only_one_to_ask():
    for number, status in ((2, 404), (1, 200)):
        async with (
            ScriptedUpstream(served) as first,
            ScriptedUpstream(served) as second,
            routing_to(*(first.port, second.port)[:number]) as rig,
            await RawClient.open(rig.port) as client,
        ):
            for id_ in ("resp_another", kept_id(7)):
                answer = await client.get(f"/v1/responses/{id_}")
                assert answer.status == status
                assert status == 200 or answer.code == "response_not_found"


@on_loop
async def test_the_keeper_s_refusal_is_passed_on_and_nobody_else_is_asked():
    async def full(peer: Peer, request: Received) -> None:
        await peer.answer(b'{"error":{"code":"queue_full"}}', status="503 Busy")

    async with (
        ScriptedUpstream(served) as other,
        ScriptedUpstream(full) as keeper,
        routing_to(other.port, keeper.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.get(f"/v1/responses/{kept_id(1)}")
        assert (answer.status, answer.code) == (503, "queue_full")
        assert not other.requests


@on_loop
async def test_other_methods_and_deeper_paths_are_refused():
    async with (
        ScriptedUpstream(served) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        id_ = kept_id(0)
        for path, method, status in (
            (f"/v1/responses/{id_}", "PATCH", 405), (f"/v1/responses/{id_}/cancel", "GET", 405),
            (f"/v1/responses/{id_}/input_items/1", "GET", 404), ("/v1/responses/", "GET", 404),
            ("/v1/chat/completions", "DELETE", 405), ("/v1/load_lora_adapter", "POST", 404),
        ):  # fmt: skip
            assert (await client.get(path, method=method)).status == status, path
        assert not upstream.requests


@on_loop
async def test_of_files_and_batches_it_says_whom_to_ask_and_asks_nobody():
    async with (
        ScriptedUpstream(served) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for path, method in (
            ("/v1/files", "GET"), ("/v1/files/file-1/content", "GET"), ("/v1/batches", "POST"),
            ("/v1/batches/batch_1/cancel", "POST"), ("/v1/files/file-1", "DELETE"),
        ):  # fmt: skip
            answer = await client.get(path, method=method)
            assert (answer.status, answer.code) == (501, "not_implemented"), path
            error = answer.json["error"]
            assert error["type"] == "not_implemented_error"
            assert "--files-dir" in error["message"] and "run-batch" in error["message"]
        for path, method in (
            ("/v1/messages/batches", "POST"), ("/v1/messages/batches", "GET"),
            ("/v1/messages/batches/msgbatch_1", "DELETE"),
            ("/v1/messages/batches/msgbatch_1/results", "GET"),
        ):  # fmt: skip
            answer = await client.get(path, method=method)
            assert answer.status == 501, path
            assert answer.json["type"] == "error"  # in Anthropic's shape
            assert "--files-dir" in answer.json["error"]["message"]
        assert (await client.get("/v1/filesystem")).status == 404
        assert not upstream.requests
