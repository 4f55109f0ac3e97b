"""The picker names a second engine, which computes the prompt for the one that answers: what
llm-d's sidecars go by."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import RouterConfig, RoutingConfig
from tests.fakes.endpoints import make_spec
from tests.fakes.envoy import (
    BUFFERED,
    DESTINATION,
    POST,
    PickerRig,
    body_message,
    headers_message,
    picking,
)
from tests.fakes.router_rig import on_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PREFILLER = "x-prefiller-host-port"
PAIRED = RouterConfig(routing=RoutingConfig(policy="prefill-decode", prefill_min_tokens=64))
ANSWER = [b'{"choices":[{}],"usage":{"prompt_tokens":300,"completion_tokens":2}}']


def chat(text: str = "one two three " * 60, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "model", "messages": messages, **fields}).encode()


@asynccontextmanager
async def paired() -> AsyncIterator[PickerRig]:
    """One engine that answers, and two that compute prompts."""
    async with picking(0, config=PAIRED) as rig:
        rig.add(
            make_spec(0, kind="openai"),
            make_spec(1, kind="openai", role="prefill"),
            make_spec(2, kind="openai", role="prefill"),
        )
        yield rig
        await rig.settled()


@on_loop
async def test_a_long_prompt_is_told_where_to_be_fetched_from():
    async with paired() as rig:
        async with rig.open() as gateway:
            body = chat()
            answer = await gateway.post(body, headers={PREFILLER: "evil:1"})
            assert answer.destinations == ["10.0.0.1:8000"]  # no fallback computes prompts only
            assert answer.set_headers[PREFILLER] == "10.0.0.2:8000"
            assert PREFILLER not in answer.removed  # ours stands over the client's
            assert await gateway.body() == body  # the sidecar asks, not we
            assert rig.endpoints[1].in_flight == 1
            head, _ = await gateway.response(ANSWER)
            assert head.kind == 2
        await rig.settled()
        assert sorted(rig.leases.results) == [("pod-0", "ok"), ("pod-1", "ok")]


@on_loop
async def test_the_same_where_bodies_are_buffered():
    async with paired() as rig, rig.open() as gateway:
        headers = POST | {PREFILLER: "evil:1"}
        first = await gateway.ask(headers_message(2, headers, modes=(BUFFERED, BUFFERED)))
        assert PREFILLER in first.removed
        answer = await gateway.ask(body_message(4, chat(), is_end=True))
        assert answer.set_headers[PREFILLER] == "10.0.0.2:8000"


@pytest.mark.parametrize("body", [chat("hi"), chat(n=2), chat(max_tokens=1)])
@on_loop
async def test_what_one_engine_does_alone_names_no_other(body: bytes):
    async with paired() as rig, rig.open() as gateway:
        answer = await gateway.post(body, headers={PREFILLER: "evil:1"})
        assert PREFILLER not in answer.set_headers
        assert PREFILLER in answer.removed


@pytest.mark.parametrize(
    ("hosts", "wanted"), [(["10.0.0.1", "10.0.0.3"], "10.0.0.3:8000"), (["10.0.0.1"], None)]
)
@on_loop
async def test_only_engines_that_the_gateway_offers_are_named(hosts: list[str], wanted: str | None):
    async with paired() as rig, rig.open() as gateway:
        hint = {"envoy.lb.subset_hint": {f"{DESTINATION}-subset": hosts}}
        answer = await gateway.post(chat(), metadata=hint)
        assert answer.set_headers.get(PREFILLER) == wanted


@on_loop
async def test_a_client_that_leaves_gives_both_places_back():
    async with paired() as rig:
        async with rig.open() as gateway:
            await gateway.post(chat())
            assert [endpoint.in_flight for endpoint in rig.endpoints] == [1, 1, 0]
        await rig.settled()
        assert sorted(rig.leases.results) == [("pod-0", "client_gone"), ("pod-1", "client_gone")]
