"""Endpoints from lists, files and names."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from octavo_router.config.load import parse_part
from octavo_router.config.settings import UpstreamConfig
from octavo_router.discovery.discovery import Discovery
from octavo_router.discovery.file import UpstreamsFile
from octavo_router.discovery.source import Found, PoolRoute
from octavo_router.discovery.upstreams import ConfiguredUpstreams
from octavo_router.endpoints.endpoint import Address
from octavo_router.endpoints.registry import Registry
from octavo_router.errors import ConfigInvalid, Unreachable
from octavo_router.metrics import DiscoveryCounts, RouterMetrics
from tests.fakes.facts import run, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from octavo_router.discovery.source import EndpointSource, Publish


class FakeResolver:
    """Names and their addresses; an absent name fails."""

    def __init__(self, **names: list[str]) -> None:
        self.names: dict[str, list[str]] = dict(names)
        self.srv: dict[str, list[tuple[str, int]]] = {}
        self.num_requests = 0

    async def addresses(self, host: str) -> list[str]:
        self.num_requests += 1
        if host not in self.names:
            raise Unreachable("the name does not exist")
        return self.names[host]

    async def services(self, name: str) -> list[tuple[str, int]]:
        self.num_requests += 1
        if name not in self.srv:
            raise Unreachable("no records")
        return self.srv[name]


@asynccontextmanager
async def running(source: EndpointSource) -> AsyncIterator[list[Found]]:
    history: list[Found] = []
    task = asyncio.create_task(source.run(history.append))
    try:
        yield history
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def upstreams(*urls: str, resolver: FakeResolver | None = None, **more: Any) -> ConfiguredUpstreams:
    configs = [UpstreamConfig(url=url, **more) for url in urls]
    counts = DiscoveryCounts()
    return ConfiguredUpstreams(
        "static", configs, resolver or FakeResolver(), counts=counts, interval_s=0.001
    )


def addresses(history: list[Found]) -> list[str]:
    return [spec.address.authority for spec in history[-1].specs] if history else []


def test_addresses_need_no_look_up():
    async def story() -> None:
        resolver = FakeResolver()
        source = upstreams(
            "http://10.0.0.1:8000", "10.0.0.2:8000/", "http://[::1]/v1", "https://gpu.example",
            resolver=resolver, pool="p", revision="r", kind="openai",
        )  # fmt: skip
        async with running(source) as history:
            await until(lambda: bool(history))
            specs = history[0].specs
            assert [spec.id for spec in specs] == [
                "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[::1]:80",
                "https://gpu.example:443",
            ]  # fmt: skip
            assert specs[3].address == Address("gpu.example", 443, tls=True)
            assert {(spec.pool, spec.revision, spec.kind) for spec in specs} == {
                ("p", "r", "openai")
            }
            assert resolver.num_requests == 0

    run(story())


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://a", "must begin with http"),
        ("http://", "names no host"),
        ("http://a:99999", "is no URL"),
        ("http://a/engine/../x", "must end after host and port"),
        ("http://a/%2e%2e/v1", "must end after host and port"),
        ("http://user:secret@a", "cannot carry a password"),
    ],
)
def test_a_bad_url_says_what_is_wrong_with_it(url, problem):
    with pytest.raises(ConfigInvalid, match=problem):
        upstreams(url)


def test_one_engine_cannot_be_given_twice():
    with pytest.raises(ConfigInvalid, match="http://a:80 is given twice"):
        upstreams("http://a", "http://a:80/v1")


def test_certificates_and_many_addresses_do_not_go_together():
    with pytest.raises(ConfigInvalid, match="by its own name"):
        upstreams("https://engines", is_dns=True)


def test_a_name_is_one_endpoint_wherever_it_points():
    async def story() -> None:
        resolver = FakeResolver(engine=["10.0.0.1", "10.0.0.9"])
        async with running(upstreams("http://engine:8000", resolver=resolver)) as history:
            await until(lambda: addresses(history) == ["10.0.0.1:8000"])
            resolver.names["engine"] = ["10.0.0.2"]
            await until(lambda: addresses(history) == ["10.0.0.2:8000"])
            assert history[-1].specs[0].id == "http://engine:8000"

    run(story())


def test_every_address_of_a_dns_name_is_an_endpoint():
    async def story() -> None:
        resolver = FakeResolver(engines=["10.0.0.2", "10.0.0.1"])
        source = upstreams("http://engines:8000", resolver=resolver, is_dns=True)
        async with running(source) as history:
            await until(lambda: addresses(history) == ["10.0.0.1:8000", "10.0.0.2:8000"])
            resolver.names["engines"] = ["10.0.0.2"]
            await until(lambda: addresses(history) == ["10.0.0.2:8000"])

    run(story())


def test_service_records_tell_the_ports():
    async def story() -> None:
        resolver = FakeResolver()
        resolver.srv["_http._tcp.engines"] = [("10.0.0.1", 8001), ("10.0.0.2", 8002)]
        async with running(upstreams("http://_http._tcp.engines", resolver=resolver)) as history:
            await until(lambda: addresses(history) == ["10.0.0.1:8001", "10.0.0.2:8002"])

    run(story())


def test_when_dns_fails_the_last_answer_stands():
    async def story() -> None:
        resolver = FakeResolver(engine=["10.0.0.1"])
        source = upstreams("http://engine:8000", "http://other:8000", resolver=resolver)
        async with running(source) as history:
            await until(lambda: addresses(history) == ["10.0.0.1:8000"])
            del resolver.names["engine"]
            requested = resolver.num_requests
            await until(lambda: resolver.num_requests > requested + 6)
            assert addresses(history) == ["10.0.0.1:8000"]

    run(story())


def parse(text: str) -> tuple[UpstreamConfig, ...]:
    return parse_part(text, "upstreams", UpstreamConfig)


def test_a_file_is_followed_and_a_bad_one_changes_nothing(tmp_path):
    async def story() -> None:
        path = tmp_path / "upstreams.yaml"
        counts = DiscoveryCounts()
        source = UpstreamsFile(str(path), parse, FakeResolver(), counts=counts, look_s=0.001)

        def replace(text: str) -> None:
            fresh = tmp_path / "fresh"
            fresh.write_text(text)
            os.replace(fresh, path)

        async with running(source) as history:
            await until(lambda: "No such file" in source.problem)
            assert history == []
            replace("upstreams: [http://10.0.0.1:1]")
            await until(lambda: addresses(history) == ["10.0.0.1:1"])
            for bad, why in (
                ("upstreams: [", "not valid YAML"),
                ("upstreams: 7", "must be a list"),
                ("upstreams: [ftp://a]", "must begin with http"),
                ("upstreems: []", "is not known here"),
            ):
                replace(bad)
                await until(partial(says, source, why))
                assert addresses(history) == ["10.0.0.1:1"]
            replace('{"upstreams": ["http://10.0.0.2:2"]}')
            await until(lambda: addresses(history) == ["10.0.0.2:2"])
            assert source.problem == ""

    run(story())


def test_a_file_that_stays_wrong_is_an_error_at_each_look_and_unheard_meanwhile(tmp_path):
    """What is counted once is forgotten by an alert while the fault lasts."""

    async def story() -> None:
        path, counts = tmp_path / "upstreams.yaml", DiscoveryCounts()
        path.write_text("upstreams: [http://10.0.0.1:1]")
        source = UpstreamsFile(str(path), parse, FakeResolver(), counts=counts, look_s=0.001)
        async with running(source):
            await until(lambda: counts.heard_at is not None)
            heard_at = counts.heard_at
            await until(lambda: counts.heard_at != heard_at)  # though nothing has changed
            assert counts.errors == 0
            path.write_text("upstreams: 7")
            await until(lambda: counts.errors > 3)
            heard_at = counts.heard_at
            errors = counts.errors
            await until(lambda: counts.errors > errors + 3)
            assert counts.heard_at == heard_at
            path.write_text("upstreams: [http://10.0.0.2:2]")
            await until(lambda: counts.heard_at != heard_at)
            errors = counts.errors
            heard_at = counts.heard_at
            await until(lambda: counts.heard_at != heard_at)
            assert counts.errors == errors

    run(story())


def test_a_file_of_names_is_heard_when_dns_is(tmp_path):
    async def story() -> None:
        path, counts = tmp_path / "upstreams.yaml", DiscoveryCounts()
        path.write_text("upstreams: [http://engines.example:1]")
        resolver = FakeResolver()
        source = UpstreamsFile(
            str(path), parse, resolver, counts=counts, interval_s=0.001, look_s=0.001
        )
        async with running(source):
            await until(lambda: counts.errors > 3)
            assert counts.heard_at is None
            resolver.names["engines.example"] = ["10.0.0.1"]
            await until(lambda: counts.heard_at is not None)

    run(story())


def says(source: UpstreamsFile, problem: str) -> bool:
    return problem in source.problem


class Scripted:
    """A source that publishes what it is told, and breaks once."""

    def __init__(self, name: str, *script: Found | Exception) -> None:
        self.name = name
        self._script = list(script)

    async def run(self, publish: Publish) -> None:
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            publish(step)
        await asyncio.Event().wait()


def test_sources_add_up_in_the_registry_and_their_pools_are_told():
    async def story() -> None:
        from octavo_router.endpoints.endpoint import EndpointSpec

        one = EndpointSpec("one", Address("10.0.0.1", 1), "p")
        two = EndpointSpec("two", Address("10.0.0.2", 1), "p")
        reported: list[dict[str, PoolRoute]] = []
        registry, metrics = Registry(), RouterMetrics()
        sources = [
            Scripted("a", Found((one,), (PoolRoute("p", policy="random"),))),
            Scripted("b", Found((two,), (PoolRoute("p"), PoolRoute("q")))),
            Scripted("c", Found(), RuntimeError("a mistake")),
        ]
        async with Discovery(sources, registry, metrics, on_pools=reported.append) as discovery:
            await asyncio.wait_for(discovery.synced(), 10)
            assert discovery.is_synced
            assert sorted(registry.endpoints) == ["one", "two"]
            assert reported[-1] == {"p": PoolRoute("p", policy="random"), "q": PoolRoute("q")}
            await until(lambda: metrics.discovery("c").errors == 1)

    run(story())
