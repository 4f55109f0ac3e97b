"""What a router expects of adapters that change or are two of one, before a real engine's server.

Prefixes go by an adapter's content, as in the engine's cache: what it predicts is what it finds.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from octavo_engine.server.settings import ServerSettings
from octavo_router.config.settings import AdapterConfig, PoolConfig
from octavo_router.endpoints.registry import Registry
from octavo_router.routing.models import Models
from tests.fakes.adapters import write_adapter
from tests.fakes.endpoints import make_spec
from tests.fakes.facts import until
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.simulated import CONFIG, simulating
from tests.router.test_server import configuration, running, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from octavo_router.app import App

LORA = CONFIG.replace(enable_lora=True, max_loras=2, max_cpu_loras=3)
OPEN = ServerSettings(allow_runtime_lora_updating=True)
PROMPT = "what a lawyer would ask " * 12
CHUNK_TOKENS = 64  # of the simulator, whose tokens are bytes


class Bench:
    """An engine of its own, and a router before it."""

    def __init__(self, app: App, client: RawClient, engine: str, folder: Path) -> None:
        self._app = app
        self._client = client
        self._engine = engine
        self._folder = folder
        self._digests: dict[str, str] = {}

    async def load(self, name: str, content: int) -> None:
        """At the engine itself, as its own administrator would; the router hears of it."""
        folder = self._folder / str(content)
        if not folder.exists():
            write_adapter(folder, {"model.layers.0.self_attn.q_proj": (16, 16)}, seed=content)
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        async with httpx.AsyncClient() as client:
            answer = await client.post(self._engine + "/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        [endpoint] = self._app.registry.endpoints.values()
        await until(lambda: endpoint.adapter_digests != self._digests)
        self._digests = endpoint.adapter_digests

    async def ask(self, model: str) -> tuple[int, int]:
        """The cached tokens of PROMPT that the router expected, and those that the engine found."""
        answer = await self._client.ask(
            chat(PROMPT, model=model, max_tokens=1), more="x-octavo-explain: 1\r\n"
        )
        assert answer.status == 200, answer.body
        expected = json.loads(answer.header("x-octavo-explain") or "")["matched_tokens"]
        found = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        await asyncio.sleep(0.05)  # until the router has heard what is stored now
        return expected, found


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    with simulating(LORA, OPEN) as engine:
        port = int(engine.url.rpartition(":")[2])
        async with (
            running(configuration(port)) as (app, server),
            await RawClient.open(server.port) as client,
        ):
            await until_ready(app)
            yield Bench(app, client, engine.url, folder)


def is_hit(answer: tuple[int, int]) -> bool:
    expected, found = answer
    assert abs(found - expected) <= CHUNK_TOKENS, "the router expected something else"
    return found > len(PROMPT) - CHUNK_TOKENS


@pytest.mark.slow
@on_loop
async def test_what_is_replaced_in_place_is_expected_nowhere(tmp_path: Path):
    """And found again once the first weights are back, which the engine's cache still has."""
    async with bench(tmp_path) as rig:
        await rig.load("law", 1)
        assert not is_hit(await rig.ask("law"))
        assert is_hit(await rig.ask("law"))
        await rig.load("law", 2)
        assert not is_hit(await rig.ask("law"))
        assert is_hit(await rig.ask("law"))
        await rig.load("law", 1)
        assert is_hit(await rig.ask("law"))


@pytest.mark.slow
@on_loop
async def test_two_names_of_one_content_share_prefixes(tmp_path: Path):
    async with bench(tmp_path) as rig:
        await rig.load("law", 1)
        await rig.load("tax", 1)
        await rig.load("other", 2)
        assert not is_hit(await rig.ask("law"))
        assert is_hit(await rig.ask("tax"))
        assert not is_hit(await rig.ask("other"))


def models_of(*digests: dict[str, str]) -> tuple[Registry, Models]:
    """Of engines that have the adapter `law`, with a content where they report one."""
    registry = Registry()
    registry.replace("test", [make_spec(n) for n in range(len(digests))])
    for endpoint, contents in zip(registry.endpoints.values(), digests, strict=True):
        endpoint.names = ("base", "law")
        endpoint.adapters = frozenset({"law"})
        endpoint.adapter_digests = contents
        registry.changed(endpoint)
    return registry, Models(registry)


def test_the_content_that_most_engines_have_is_looked_for():
    """While one after the other loads other weights under the name."""
    old, new = {"law": "old"}, {"law": "new"}
    for engines, content in (([old, old, new], "old"), ([new, old, new], "new")):
        _, models = models_of(*engines)
        assert models.adapter_contents == {"law": content}
    # Of equally many the same one, whichever was heard of first.
    assert models_of(old, new)[1].adapter_contents == models_of(new, old)[1].adapter_contents


def test_engines_that_report_no_contents_are_known_by_names():
    assert models_of({}, {})[1].adapter_contents == {"law": "law"}
    assert models_of({}, {"law": "content"})[1].adapter_contents == {"law": "content"}


def test_what_is_loaded_again_is_not_taken_for_what_was_there():
    """Until the engine has reported which content it is."""
    registry, models = models_of({"law": "old"}, {"law": "other"}, {"law": "other"})
    first, *others = registry.endpoints.values()
    for endpoint in others:
        endpoint.lose_adapters({"law"})
        endpoint.adapters |= {"law"}
        registry.changed(endpoint)
    assert models.adapter_contents == {"law": "old"}
    assert first.adapter_digests == {"law": "old"}


def test_a_content_is_kept_while_the_adapter_is_loaded_nowhere():
    """Its blocks are still cached: a request that waits for the load will find them."""
    registry, models = models_of({"law": "content"})
    configured = (AdapterConfig(name="law", uri="/adapters/law"),)
    models.replace([], pools=[PoolConfig(name="pool", adapters=configured)])
    [endpoint] = registry.endpoints.values()
    assert models.adapter_contents == {"law": "content"}
    endpoint.lose_adapters({"law"})
    registry.changed(endpoint)
    assert models.adapter_contents == {"law": "content"}
    models.replace([])
    assert models.adapter_contents == {}
