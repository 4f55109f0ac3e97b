"""A request through the picker: which endpoint, which body, or which error."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import grpc
import pytest

from octavo_engine.protocol import route_keys
from octavo_engine.protocol.stream import Load
from octavo_router.config.settings import (
    BackendConfig,
    KeyConfig,
    LimitsConfig,
    RouterConfig,
    ServedModelConfig,
)
from octavo_router.flow.keys import make_table
from tests.fakes.endpoints import make_spec
from tests.fakes.envoy import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    NONE,
    PARTIAL,
    POST,
    STREAMED,
    body_message,
    headers_message,
    picking,
)
from tests.fakes.router_rig import on_loop


def chat(text="hello", **fields):
    body = {"model": "model", "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps(body).encode()


def subset(*endpoints):
    return {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": list(endpoints)}}


def error_of(answer):
    assert answer.kind == 7
    assert answer.set_headers["content-type"] == "application/json"
    return answer.status, json.loads(answer.body)["error"]["code"]


async def destinations(rig, body=None, **options):
    async with rig.open() as gateway:
        return (await gateway.post(body or chat(), **options)).destinations


# -- whose turn it is


@on_loop
async def test_the_destination_is_told_in_header_and_metadata_with_a_fallback():
    async with picking(3) as rig, rig.open() as gateway:
        body = chat()
        answer = await gateway.post(body)
        assert answer.kind == 1
        assert answer.destinations == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert answer.clears_route_cache
        assert answer.set_headers["content-length"] == str(len(body))
        assert await gateway.body() == body


@pytest.mark.parametrize("count", [0, 2, 8])
@on_loop
async def test_as_many_fallbacks_as_configured_each_once(count):
    async with picking(4, fallbacks=count) as rig:
        found = await destinations(rig)
        assert len(found) == len(set(found)) == min(count + 1, 4)


@on_loop
async def test_the_shorter_queue_wins():
    async with picking(2) as rig:
        rig.endpoints[0].load = Load(running=64, waiting=30, queued_tokens=30_000, kv_usage=0.9)
        for endpoint in rig.endpoints:
            endpoint.load_at = time.monotonic()
        rig.registry.changed(rig.endpoints[0])
        assert (await destinations(rig))[0] == "10.0.0.2:8000"


@on_loop
async def test_the_endpoint_that_holds_the_prefix_wins():
    async with picking(4) as rig:
        body = chat("a system prompt that everybody shares " * 100)
        keys = route_keys.pack_keys(route_keys.keys_of(json.loads(body), "chat", ""))
        rig.index.hold(rig.endpoints[2].slot, keys)
        assert (await destinations(rig, body))[0] == "10.0.0.3:8000"


@on_loop
async def test_an_adapter_goes_where_it_is_loaded_though_others_are_idler():
    async with picking(3) as rig:
        loaded = rig.endpoints[1]
        loaded.adapters, loaded.names = frozenset({"lora"}), ("model", "lora")
        loaded.load = Load(running=3, kv_usage=0.5)
        rig.registry.changed(loaded)
        assert (await destinations(rig, chat(model="lora")))[0] == "10.0.0.2:8000"


@on_loop
async def test_requests_at_once_are_spread_for_each_is_counted_as_it_is_placed():
    async with picking(4, fallbacks=0) as rig:
        gateways = [rig.open() for _ in range(64)]
        for gateway in gateways:
            await gateway.post(chat("the same prompt for all " * 20))
        counts = [endpoint.in_flight for endpoint in rig.endpoints]
        assert sum(counts) == 64
        assert max(counts) <= 1.25 * 16
        for gateway in gateways:
            await gateway.leave()
        await rig.settled()


@on_loop
async def test_several_ports_of_one_host_are_endpoints_of_their_own():
    async with picking(0, fallbacks=0) as rig:
        for port in range(8000, 8004):
            spec = make_spec(port)
            rig.add(replace(spec, address=spec.address._replace(host="10.1.1.1", port=port)))
        gateways = [rig.open() for _ in range(4)]
        found = {(await gateway.post(chat())).destinations[0] for gateway in gateways}
        assert found == {f"10.1.1.1:{port}" for port in range(8000, 8004)}
        for gateway in gateways:
            await gateway.leave()


# -- the body


@pytest.mark.parametrize("size", [1, 7, 64])
@on_loop
async def test_a_body_may_come_in_pieces_of_any_size(size):
    body = chat("some text", stream=True)
    async with picking(1) as rig, rig.open() as gateway:
        await gateway.post(body, pieces=range(size, len(body), size))
        assert await gateway.body() == body


@on_loop
async def test_a_long_body_goes_back_in_pieces_that_a_gateway_takes():
    body = chat("long " * 60_000)
    async with picking(1) as rig, rig.open() as gateway:
        await gateway.post(body, pieces=range(60_000, len(body), 60_000))
        sizes = []
        while True:
            piece = await gateway.answer()
            sizes.append(len(piece.streamed or b""))
            if piece.is_end:
                break
        assert sum(sizes) == len(body)
        assert max(sizes) <= 64 * 1024
        assert len(sizes) == -(-len(body) // 62_000)


@on_loop
async def test_trailers_end_a_body_as_well():
    body = chat()
    async with picking(1) as rig, rig.open() as gateway:
        await gateway.send(headers_message(2, POST, modes=(DUPLEX, DUPLEX)))
        await gateway.send(body_message(4, body, is_end=False))
        await gateway.send(headers_message(6, {"checksum": "1"}))
        assert (await gateway.answer()).destinations == ["10.0.0.1:8000"]
        piece = await gateway.answer()
        assert (piece.streamed, piece.is_end) == (body, False)
        assert (await gateway.answer()).kind == 5


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b"[1]", 400, "invalid_json"),
        (b"\xff\xfe{}", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"messages": []}', 400, "missing_model"),
        (b'{"model": 5, "messages": []}', 400, "missing_model"),
        (b'{"model": "other", "messages": []}', 404, "model_not_found"),
    ],
)
@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
@on_loop
async def test_bodies_that_cannot_be_routed_are_answered_at_once(body, status, code, mode):
    async with picking(1) as rig:
        async with rig.open() as gateway:
            await gateway.send(headers_message(2, POST, modes=(mode, NONE)))
            if mode == BUFFERED:
                assert (await gateway.answer()).kind == 1
            answer = await gateway.ask(body_message(4, body, is_end=True))
            assert error_of(answer) == (status, code)
            assert answer.details == f"octavo_{code}"
        assert [(record.status, record.code) for record in rig.records] == [(status, code)]
        assert rig.endpoints[0].in_flight == 0


@on_loop
async def test_bodies_over_the_limit_are_refused_by_their_length_or_as_they_come():
    limits = replace(RouterConfig().limits, max_body_bytes=1024)
    async with picking(1, config=RouterConfig(limits=limits)) as rig:
        async with rig.open() as gateway:
            head = headers_message(2, POST | {"content-length": "1025"}, modes=(DUPLEX, DUPLEX))
            assert error_of(await gateway.ask(head)) == (413, "body_too_large")
        async with rig.open() as gateway:
            assert error_of(await gateway.post(b"x" * 1025, pieces=[600])) == (
                413,
                "body_too_large",
            )


@on_loop
async def test_an_alias_is_rewritten_with_the_length_that_results():
    models = (ServedModelConfig(name="nick", alias_of="model"),)
    body = b'{ "messages": [{"role": "user", "content": "model nick"}], "model" :"nick", "n":1}'
    rewritten = body.replace(b':"nick"', b':"model"')
    config = RouterConfig(models=models)
    async with picking(1, config=config) as rig:
        async with rig.open() as gateway:
            answer = await gateway.post(body)
            assert answer.set_headers["content-length"] == str(len(rewritten))
            assert await gateway.body() == rewritten
        async with rig.open() as gateway:
            await gateway.ask(headers_message(2, POST, modes=(BUFFERED, NONE)))
            answer = await gateway.ask(body_message(4, body, is_end=True))
            assert answer.body == rewritten
            assert answer.set_headers["content-length"] == str(len(rewritten))


@on_loop
async def test_weights_split_between_pools_and_each_request_stays_inside_its_own():
    backends = (BackendConfig(pool="a", weight=3.0), BackendConfig(pool="b", weight=1.0))
    config = RouterConfig(models=(ServedModelConfig(name="both", backends=backends),))
    async with picking(0, config=config) as rig:
        rig.add(*(make_spec(n, pool="ab"[n // 2], kind="octavo") for n in range(4)))
        pools = {f"10.0.0.{n + 1}:8000": "ab"[n // 2] for n in range(4)}
        chosen = []
        for number in range(120):
            headers = {"x-request-id": f"r{number}"}
            found = await destinations(rig, chat(model="both"), headers=headers)
            assert len({pools[one] for one in found}) == 1
            chosen.append(pools[found[0]])
        assert 75 <= chosen.count("a") <= 105
        await rig.settled()


# -- where the gateway narrows the choice


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (["10.0.0.2:8000"], {"10.0.0.2:8000"}),
        (["10.0.0.2"], {"10.0.0.2:8000"}),
        (["10.0.0.2:8000,10.0.0.3:8000"], {"10.0.0.2:8000", "10.0.0.3:8000"}),
        (["10.0.0.2:8000", "10.9.9.9:8000"], {"10.0.0.2:8000"}),
    ],
)
@on_loop
async def test_only_endpoints_of_the_subset_are_named(hint, expected):
    async with picking(3, fallbacks=8) as rig:
        assert set(await destinations(rig, metadata=subset(*hint))) == expected


@pytest.mark.parametrize("hint", [[], ["10.9.9.9:8000"], ["10.0.0.1:9999"]])
@on_loop
async def test_a_subset_without_an_endpoint_of_ours_is_503(hint):
    async with picking(3) as rig, rig.open() as gateway:
        answer = await gateway.post(chat(), metadata=subset(*hint))
        assert error_of(answer) == (503, "no_endpoints")
        assert answer.set_headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert int(answer.set_headers["retry-after"]) > 0


@on_loop
async def test_other_metadata_narrows_nothing():
    async with picking(3, fallbacks=8) as rig:
        metadata = {"envoy.lb.subset_hint": {"else": "x"}, "more": {"a": "b"}}
        assert len(await destinations(rig, metadata=metadata)) == 3


@on_loop
async def test_the_subset_decides_between_pools_that_serve_the_same_model():
    async with picking(0) as rig:
        rig.add(*(make_spec(n, pool="ab"[n // 3], kind="octavo") for n in range(4)))
        hint = subset("10.0.0.4:8000")
        assert await destinations(rig, metadata=hint) == ["10.0.0.4:8000"]


@on_loop
async def test_what_a_client_says_of_destinations_is_not_believed():
    sent = {
        DESTINATION: "10.6.6.6:1",
        f"{DESTINATION}-subset": "10.6.6.6:1",
        "x-octavo-resume": "1",
        "x-octavo-pod-uid": "u",
        "x-forwarded-for": "1.2.3.4",
        "x-other": "stays",
    }
    async with picking(1) as rig:
        async with rig.open() as gateway:
            answer = await gateway.post(chat(), headers=sent)
            assert answer.destinations == ["10.0.0.1:8000"]  # overwritten
            assert sorted(answer.removed) == sorted(
                [f"{DESTINATION}-subset", "x-octavo-resume", "x-octavo-pod-uid"]
            )
        async with rig.open() as gateway:
            head = await gateway.ask(headers_message(2, POST | sent, modes=(BUFFERED, NONE)))
            assert DESTINATION in head.removed
            assert (await gateway.ask(body_message(4, chat(), is_end=True))).destinations


# -- requests without a body that can be read


@on_loop
async def test_a_get_passes_through_to_somebody():
    async with picking(2, fallbacks=0) as rig, rig.open() as gateway:
        headers = {":method": "GET", ":path": "/v1/models"}
        answer = await gateway.ask(headers_message(2, headers, is_end=True, modes=(DUPLEX, DUPLEX)))
        assert answer.kind == 1
        assert answer.destinations[0] in {"10.0.0.1:8000", "10.0.0.2:8000"}


@on_loop
async def test_a_get_keeps_to_the_subset_and_finds_nobody_where_nobody_is():
    get = {":method": "GET", ":path": "/v1/models"}
    async with picking(3) as rig:
        async with rig.open() as gateway:
            message = headers_message(2, get, is_end=True, metadata=subset("10.0.0.3"))
            assert (await gateway.ask(message)).destinations == ["10.0.0.3:8000"]
        rig.registry.replace("test", [])
        async with rig.open() as gateway:
            answer = await gateway.ask(headers_message(2, get, is_end=True))
            assert error_of(answer) == (503, "no_endpoints")


@pytest.mark.parametrize(
    "path", ["/octavo/v1/drain", "//octavo/v1/stream", "/%6fctavo/v1/x", "/v1/../octavo/v1/drain"]
)
@on_loop
async def test_paths_between_router_and_engine_are_nobodys(path):
    async with picking(1) as rig, rig.open() as gateway:
        message = headers_message(2, {":method": "POST", ":path": path}, is_end=True)
        assert error_of(await gateway.ask(message)) == (404, "route_not_found")


@on_loop
async def test_an_upload_is_routed_by_a_header_and_not_read():
    headers = {
        ":path": "/v1/audio/transcriptions",
        "content-type": "multipart/form-data; boundary=b",
        "x-gateway-model-name": "model",
    }
    async with picking(1) as rig:
        assert await destinations(rig, b"--b\r\n\x00\xff", headers=headers) == ["10.0.0.1:8000"]
        async with rig.open() as gateway:
            answer = await gateway.post(b"--b", headers=headers | {"x-gateway-model-name": "no"})
            assert error_of(answer) == (404, "model_not_found")


@on_loop
async def test_a_path_that_is_not_known_is_routed_by_the_model_in_its_body():
    async with picking(1) as rig:
        found = await destinations(rig, b'{"model": "model"}', headers={":path": "/any/thing?a=b"})
        assert found == ["10.0.0.1:8000"]


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@on_loop
async def test_refusals_are_in_the_words_of_a_paths_clients(header):
    """The same bodies and headers as where the router answers itself, key and all."""
    table = make_table([KeyConfig(tenant="a", key="right")], {})
    config = RouterConfig(limits=LimitsConfig(max_body_bytes=1024))
    async with picking(1, table=table, config=config) as rig:
        for path, key, body, status, code, kind in (
            ("/v1/messages", "wrong", chat(), 401, "invalid_api_key", "authentication_error"),
            ("/v1/messages", "right", b"{", 400, "invalid_json", "invalid_request_error"),
            (
                "/v1/messages?beta=true",
                "right",
                chat(model="no"),
                404,
                "model_not_found",
                "not_found_error",
            ),
            ("/v1/messages", "right", b" " * 2000, 413, "body_too_large", "request_too_large"),
        ):
            headers = {":path": path, header: key, "x-request-id": "theirs"}
            async with rig.open() as gateway:
                answer = await gateway.post(body, headers=headers)
                assert answer.status == status
                assert answer.set_headers["x-error-code"] == code
                assert answer.set_headers["request-id"] == "theirs"
                assert ("www-authenticate" in answer.set_headers) == (status == 401)
                reported = json.loads(answer.body or b"")
                assert reported.keys() == {"type", "error", "request_id"}
                assert (reported["type"], reported["error"]["type"]) == ("error", kind)
                assert reported["request_id"] == "theirs"
            async with rig.open() as gateway:  # the same elsewhere is OpenAI's
                answer = await gateway.post(body, headers=headers | {":path": POST[":path"]})
                assert error_of(answer) == (status, code)
                assert "request-id" not in answer.set_headers


# -- gateways that send bodies in other ways


@on_loop
async def test_a_gateway_that_buffers_gets_one_answer_for_each_message():
    async with picking(2) as rig, rig.open() as gateway:
        head = await gateway.ask(headers_message(2, POST, modes=(BUFFERED, NONE)))
        assert head.kind == 1
        assert DESTINATION not in head.set_headers
        answer = await gateway.ask(body_message(4, chat(), is_end=True))
        assert answer.kind == 3
        assert answer.destinations == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert answer.body is None  # it is passed on unchanged
        assert (await gateway.ask(headers_message(3, {":status": "200"}))).kind == 2


@on_loop
async def test_a_body_that_was_cut_is_too_large():
    async with picking(1) as rig, rig.open() as gateway:
        await gateway.ask(headers_message(2, POST, modes=(PARTIAL, NONE)))
        answer = await gateway.ask(body_message(4, chat()[:20], is_end=False))
        assert error_of(answer) == (413, "body_too_large")


@pytest.mark.parametrize("mode", [NONE, STREAMED])
@on_loop
async def test_where_bodies_come_too_late_headers_decide(mode, caplog):
    async with picking(2) as rig, rig.open() as gateway:
        head = await gateway.ask(headers_message(2, POST, modes=(mode, NONE)))
        assert head.destinations[0] == "10.0.0.1:8000"
        if mode == STREAMED:
            answer = await gateway.ask(body_message(4, b"{", is_end=False))
            assert (answer.kind, answer.body, answer.streamed) == (3, None, None)
        assert "FULL_DUPLEX_STREAMED" in caplog.text


@on_loop
async def test_an_observer_is_told_nothing():
    async with picking(1) as rig, rig.open() as gateway:
        message = headers_message(2, POST) + b"\x50\x01"  # observability_mode
        await gateway.send(message)
        assert await gateway.call.read() is grpc.aio.EOF
        assert await gateway.call.code() is grpc.StatusCode.OK


@on_loop
async def test_who_asks_with_a_trusted_key_is_told_why():
    table = make_table(
        [KeyConfig(tenant="a", key="a"), KeyConfig(tenant="ours", key="k", trusted=True)], {}
    )
    async with picking(2, table=table) as rig, rig.open() as gateway:
        requested = {"x-octavo-explain": "1", "authorization": "Bearer a"}
        await gateway.post(chat(), headers=requested | {"authorization": "Bearer k"})
        await gateway.body()
        head, _ = await gateway.response([b"{}"])
        facts = json.loads(head.set_headers["x-octavo-explain"])
        assert facts["policy"] == "prefix-load"
        assert head.set_headers["x-served-by"] == "10.0.0.1:8000"
        async with rig.open() as other:
            await other.post(chat(), headers=requested)
            await other.body()
            head, _ = await other.response([b"{}"])
            assert "x-octavo-explain" not in head.set_headers


@on_loop
async def test_a_request_without_an_id_gets_one():
    async with picking(1) as rig:
        async with rig.open() as gateway:
            answer = await gateway.post(chat())
            assert answer.set_headers["x-request-id"].startswith("req-")
        async with rig.open() as gateway:
            answer = await gateway.post(chat(), headers={"x-request-id": "theirs"})
            assert "x-request-id" not in answer.set_headers
        assert rig.records[1].request_id == "theirs"
