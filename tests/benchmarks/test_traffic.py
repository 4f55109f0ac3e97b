"""The traffic of the router's benchmarks differs as real traffic does, and is valid HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.router import stand
from benchmarks.router.replay import drive
from benchmarks.router.traffic import MIXES, Answers, requests
from benchmarks.servers import free_port
from octavo_router.config.load import load_config
from octavo_router.config.settings import LimitsConfig
from octavo_router.http.chunked import ChunkDecoder
from octavo_router.http.request_head import HeadParser
from octavo_router.http.response_head import ResponseHeadParser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def bodies(name: str, count: int = 200) -> list[dict[str, Any]]:
    """Parsed by the router's own parser of heads."""
    parser = HeadParser(LimitsConfig())
    found = []
    for number, template in enumerate(requests(MIXES[name], count, client=1)):
        head, body = template.numbered(number).split(b"\r\n\r\n", 1)
        assert parser.parse(head).content_length == len(body)
        found.append(json.loads(body))
    return found


def test_the_weights_of_all_mixes_come_to_one():
    assert sum(mix.weight for mix in MIXES.values()) == pytest.approx(1.0)


def test_no_two_requests_are_alike():
    low, high = MIXES["plain"].body_bytes
    templates = [
        template for client in range(3) for template in requests(MIXES["plain"], 200, client=client)
    ]
    whole = [template.numbered(number) for number, template in enumerate(templates)]
    assert len({one.replace(b"%08d" % i, b"") for i, one in enumerate(whole)}) == len(whole)
    sizes = [len(one.split(b"\r\n\r\n", 1)[1]) for one in whole]
    assert 0.5 * low <= min(sizes) < 2 * low and 0.5 * high < max(sizes) < 1.5 * high
    assert len(set(sizes)) > 0.8 * len(sizes)
    orders = {tuple(body) for body in bodies("plain")}
    assert len(orders) > 100
    streamed = sum(body.get("stream", False) for body in bodies("plain"))
    assert 45 <= streamed <= 90  # of 200, a third


def test_uniform_requests_have_one_length_and_one_head():
    whole = [one.numbered(n) for n, one in enumerate(requests(MIXES["uniform"], 50))]
    assert len({len(one) for one in whole}) == 1
    assert len({one.split(b"\r\n\r\n", 1)[0] for one in whole}) == 1
    assert len(set(whole)) == 50


def test_requests_of_a_seed_are_always_the_same():
    assert requests(MIXES["keys"], 5, client=3) == requests(MIXES["keys"], 5, client=3)
    assert requests(MIXES["keys"], 5, client=3) != requests(MIXES["keys"], 5, client=3, seed=1)


@pytest.mark.parametrize("name", list(MIXES))
def test_answers_are_what_their_heads_say(name: str):
    answers, parser, ids, sizes = Answers(MIXES[name]), ResponseHeadParser(), [], set()
    for _ in range(100):
        head, body = answers.whole().split(b"\r\n\r\n", 1)
        assert parser.parse(head).content_length == len(body)
        ids.append(json.loads(body)["id"])
        sizes.add(len(body))
    is_unique = MIXES[name].has_unique_answers
    assert len(set(ids)) == (100 if is_unique else 1)
    assert (len(sizes) > 50) == is_unique
    assert (b"date: " in head.lower()) and parser.parse(head).keep_alive


def test_streams_are_chunks_of_events_with_the_answers_id():
    answers, seen = Answers(MIXES["plain"]), set()
    for _ in range(50):
        first, *pieces = list(answers.stream())
        head, begin = first.split(b"\r\n\r\n", 1)
        assert ResponseHeadParser().parse(head).is_chunked
        decoder = ChunkDecoder(is_strict=True)
        events = b"".join(b"".join(decoder.feed(piece)) for piece in (begin, *pieces))
        assert decoder.is_done and not decoder.rest
        assert events.endswith(b"data: [DONE]\n\n")
        [number] = set(re.findall(rb'"id":"(.*?)"', events))
        seen.add(number)
        assert 5 <= events.count(b"data: ") <= 66
    assert len(seen) == 50


@pytest.mark.parametrize("name", ["plain", "tls", "keys"])
def test_a_routers_configuration_for_a_mix_is_valid(name: str, tmp_path: Path):
    file = stand.router_config(MIXES[name], tmp_path, collector="http://127.0.0.1:9")
    config = load_config(text=file.read_text(), flags={}, environment={})
    assert len(config.flow.keys) == MIXES[name].num_tenants
    assert bool(config.server.tls_cert) == MIXES[name].uses_tls
    assert config.tracing.sample_ratio == (MIXES[name].trace_ratio or 1.0)


@contextmanager
def engines(name: str, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.router.replay", "engines", name, str(port), "1"]
    with stand.running(command, None) as process:
        stand.until_answers(port, process, within_s=30)
        yield


def test_the_load_counts_whole_answers_of_engines():
    port = free_port()
    with engines("plain", port):
        found = asyncio.run(drive(MIXES["plain"], port, 4, 0.5))
    assert found["bad"] == 0
    assert isinstance(found["requests"], int) and found["requests"] > 50
