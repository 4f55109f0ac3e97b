"""What operators and balancers ask of every answer: usage, larger pieces, load in a header."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.outputs import EngineStats
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running
from tests.fakes.simulated import CONFIG, Simulated, simulating

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 21, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 21, "ignore_eos": True,
    },
}  # fmt: skip


def events(server: Any, path: str, **more: Any) -> list[dict[str, Any]]:
    import httpx

    answer = httpx.post(server.url + path, json={**ASKED[path], "stream": True, **more}, timeout=20)
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line[6:]) for line in lines[:-2]]


def text_of(event: dict[str, Any]) -> str:
    (choice,) = event["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize("is_forced", [False, True])
def test_usage_ends_every_stream_where_the_operator_wants_it(path, is_forced):
    with running(FakeEngine(), ServerSettings(force_include_usage=is_forced)) as server:
        last = events(server, path)[-1]
        requested = events(server, path, stream_options={"include_usage": True})[-1]
    assert ("usage" in last) == is_forced
    assert requested["usage"]["completion_tokens"] == 21


@pytest.fixture(scope="module")
def in_fives():
    with simulating(CONFIG.replace(stream_interval=5)) as server:
        yield server


@pytest.mark.parametrize("path", list(ASKED))
def test_tokens_wait_for_others_but_the_first_does_not(in_fives: Simulated, path):
    with simulating() as one_by_one:
        expected = "".join(text_of(event) for event in events(one_by_one, path, temperature=0))
    sizes = [
        len(event["choices"][0]["token_ids"])
        for event in events(in_fives, path, temperature=0, return_token_ids=True)
        if event["choices"][0].get("token_ids")
    ]
    texts = [text_of(event) for event in events(in_fives, path, temperature=0)]

    assert "".join(texts) == expected
    assert sum(sizes) == 21
    assert len(sizes) <= 6 and all(size >= 5 for size in sizes[1:-1])  # steps may come together


def test_an_interval_is_a_number_of_tokens():
    with pytest.raises(ConfigError, match="--stream-interval"):
        EngineConfig(stream_interval=0)


@pytest.mark.parametrize("path", list(ASKED))
def test_load_comes_with_an_answer_in_the_format_that_is_asked_for(path):
    engine = FakeEngine()
    engine.stats = EngineStats(kv_blocks_total=200, kv_blocks_used=50, num_running=3, num_waiting=7)
    with running(engine) as server, server.client() as client:
        answers = {
            requested: client.post(
                path, json=ASKED[path], headers={"endpoint-load-metrics-format": requested}
            ).headers.get("endpoint-load-metrics")
            for requested in ("text", "JSON", "xml", "")
        }
    assert answers["text"] == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=3, "
        "named_metrics.num_requests_waiting=7"
    )
    assert answers["JSON"] is not None
    assert json.loads(answers["JSON"].removeprefix("JSON ")) == {
        "named_metrics": {
            "kv_cache_usage_perc": 0.25, "num_requests_running": 3, "num_requests_waiting": 7,
        }
    }  # fmt: skip
    assert answers["xml"] is answers[""] is None
