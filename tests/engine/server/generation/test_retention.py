"""What requests say of their KV blocks after their end, over HTTP and in every protocol.

Red when: a name that clients send has no effect, or a bad value goes unnoticed; tenants count for
each other's limits; a prefetch computes.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.errors import InvalidRequest
from octavo_engine.server.anthropic.bodies import MessagesRequest
from octavo_engine.server.anthropic.request import read_turn
from octavo_engine.server.generation.retention import read_retention
from octavo_engine.server.openai.schemas import CompletionRequest
from octavo_engine.state.retention import KVRetention
from tests.fakes.simulated import CONFIG, simulating

PROMPT = "one two three four five six seven eight nine ten " * 8
CHAT = [{"role": "user", "content": PROMPT}]
EPHEMERAL = {"type": "ephemeral"}


def retention_of(**fields: Any) -> KVRetention | None:
    return read_retention(CompletionRequest(prompt="a", **fields), owner="o")


@pytest.mark.parametrize(
    "fields, wanted",
    [
        ({}, None),
        ({"session_id": "s"}, None),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({"prompt_cache_retention": "24h"}, KVRetention(86400.0, owner="o")),
        ({"cache_control": EPHEMERAL}, KVRetention(300.0, owner="o")),
        ({"cache_control": EPHEMERAL | {"ttl": "1h"}}, KVRetention(3600.0, owner="o")),
        ({"cache_control": EPHEMERAL | {"ttl": "90s"}}, KVRetention(90.0, owner="o")),
        (
            {"cache_control": EPHEMERAL | {"priority": 100}, "session_id": "s"},
            KVRetention(300.0, 100, "s", "o"),
        ),
        (
            {"cache_control": EPHEMERAL, "prompt_cache_retention": "24h"},
            KVRetention(86400.0, owner="o"),
        ),
        (
            {"cache_control": EPHEMERAL | {"ttl": "0s"}, "session_id": "s"},
            KVRetention(0.0, session="s", owner="o"),
        ),
    ],
)
def test_the_names_of_three_apis(fields, wanted):
    assert retention_of(**fields) == wanted


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"cache_control": {"type": "persistent"}}, "cache_control"),
        ({"cache_control": EPHEMERAL | {"ttl": 300}}, "cache_control.ttl"),
        ({"cache_control": EPHEMERAL | {"ttl": "5 m"}}, "cache_control.ttl"),
        ({"cache_control": EPHEMERAL | {"ttl": "-5m"}}, "cache_control.ttl"),
        ({"cache_control": EPHEMERAL | {"ttl": "\u0665m"}}, "cache_control.ttl"),
        ({"cache_control": EPHEMERAL | {"priority": 101}}, "cache_control.priority"),
        ({"cache_control": EPHEMERAL | {"priority": True}}, "cache_control.priority"),
        ({"cache_control": EPHEMERAL | {"ttl": "0s"}}, "session_id"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": ["24h"]}, "prompt_cache_retention"),
        ({"session_id": "s" * 257}, "session_id"),
    ],
)
def test_bad_values_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as met:
        retention_of(**fields)
    assert met.value.param == param
    assert param in str(met.value) or param == "session_id"


def message(**fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
    return read_turn(msgspec.convert(body, MessagesRequest)).chat.cache_control


def test_of_the_parts_of_a_message_the_longest_time_counts():
    block = {"type": "text", "text": "x"}
    hour, minutes = EPHEMERAL | {"ttl": "1h"}, EPHEMERAL
    assert message() is None
    assert message(system=[block | {"cache_control": minutes}]) == minutes
    marked = [{"role": "user", "content": [block | {"cache_control": minutes}]}]
    tools = [{"name": "f", "input_schema": {}, "cache_control": hour}]
    assert message(messages=marked, tools=tools) == hour
    assert message(messages=marked, tools=tools, cache_control=minutes) == minutes
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].cache_control.ttl"):
        bad = [{"role": "user", "content": [block | {"cache_control": EPHEMERAL | {"ttl": "x"}}]}]
        message(messages=bad)


def retained(url: str) -> int:
    text = httpx.get(f"{url}/metrics").text
    met = re.search(r"^octavo_kv_retained_blocks\{.*\} (\d+)", text, re.MULTILINE)
    assert met is not None, text
    return int(met[1])


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": PROMPT, "prompt_cache_key": "k"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
    ],
)
def test_every_protocol_retains_and_gives_up(path, body):
    control = {"cache_control": EPHEMERAL | {"ttl": "1h"}, "session_id": "s"}
    with simulating() as server:
        assert httpx.post(server.url + path, json=body).status_code == 200
        assert retained(server.url) == 0
        answer = httpx.post(server.url + path, json=body | control)
        assert answer.status_code == 200, answer.text
        assert "x-octavo-unknown-fields" not in answer.headers
        assert retained(server.url) > 3
        end = control | {"cache_control": EPHEMERAL | {"ttl": "0s"}}
        assert httpx.post(server.url + path, json=body | end).status_code == 200
        assert retained(server.url) == 0
        bad = httpx.post(server.url + path, json=body | {"cache_control": {"type": "x"}})
        assert bad.status_code == 400
        assert "cache_control" in bad.json()["error"]["message"]
        server.check_idle()


def test_each_tenant_of_a_router_has_a_limit_of_its_own():
    limits = SchedulerConfig(max_retained_kv=0.5, max_retained_kv_per_tenant=0.01)
    config = CONFIG.replace(scheduler=limits)
    most = int(config.sim.kv_blocks * 0.01)
    with simulating(config) as server:
        for number, owner in enumerate(("a", "b", "a"), 1):
            body = {"prompt": f"{number} {PROMPT}", "cache_control": EPHEMERAL}
            httpx.post(
                f"{server.url}/v1/completions", json=body, headers={"x-octavo-owner": owner}
            ).raise_for_status()
            assert retained(server.url) == most * min(number, 2)
        server.check_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
    ],
)
def test_a_prefetch_ends_without_a_token(path, body, stream):
    with simulating() as server:
        answer = httpx.post(server.url + path, json=body | {"prefetch": True, "stream": stream})
        assert answer.status_code == 200, answer.text
        if not stream:
            usage = answer.json()["usage"]
            made = usage.get("completion_tokens", usage.get("output_tokens"))
            assert made == 0
        steps = re.search(
            r"^octavo_steps_total\{.*\} (\S+)",
            httpx.get(f"{server.url}/metrics").text,
            re.MULTILINE,
        )
        assert steps is None or float(steps[1]) == 0.0
        server.check_idle()
