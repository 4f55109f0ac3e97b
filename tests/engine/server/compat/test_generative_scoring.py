"""POST /generative_scoring: probabilities of labels, checked against a real model's own."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.connect import in_process
from octavo_engine.server.app import build_app
from octavo_engine.server.http.loopback import post
from octavo_engine.server.settings import ServerSettings
from tests.fakes.server import running

PATH = "/generative_scoring"
MODEL = EngineConfig(
    model="demo://smollm2", max_model_len=256, kv_cache_memory_bytes=64 << 20, num_threads=1
)


@pytest.mark.slow
def test_probabilities_are_the_models_own():
    async def ask(app: Any, path: str, **body: Any) -> Any:
        answer = await post(app, path, json.dumps(body).encode())
        assert answer.status == 200, answer.body
        return answer.json()

    async def story() -> tuple[Any, Any, Any]:
        engine = await AsyncEngine.start(MODEL, connect=in_process)
        try:
            await engine.ready()
            app = build_app(engine, ServerSettings())
            prompt = "The capital of France is"
            top = await ask(
                app, "/v1/completions", prompt=prompt, max_tokens=1, temperature=0, logprobs=2,
                return_tokens_as_token_ids=True,
            )  # fmt: skip
            known = top["choices"][0]["logprobs"]["top_logprobs"][0]
            ids = [int(name.partition(":")[2]) for name in known]
            body = {"query": "The capital of ", "items": ["France is", "Italy is"]}
            labels = {"label_token_ids": ids}
            raw = await ask(app, PATH, **body, **labels, apply_softmax=False)
            soft = await ask(app, PATH, **body, **labels)
            return list(known.values()), raw, soft
        finally:
            await engine.stop()

    logprobs, raw, soft = asyncio.run(story())
    expected = [math.exp(value) for value in logprobs]
    first = raw["data"][0]
    assert first["probs"] == pytest.approx(expected, rel=2e-2)
    assert first["score"] == first["probs"][0]
    total = sum(first["probs"])
    assert soft["data"][0]["probs"] == pytest.approx([p / total for p in first["probs"]], rel=2e-2)
    assert sum(soft["data"][1]["probs"]) == pytest.approx(1)
    assert raw["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("item_first", "prompts"), [(False, ["qa", "qb"]), (True, ["aq", "bq"])])
def test_query_and_item_in_either_order(item_first, prompts):
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [1, 2, 3]}
    with running() as server, server.client() as client:
        answer = client.post(PATH, json={**body, "item_first": item_first})
        assert answer.status_code == 200, answer.text
        seen = [bytes(ids).decode() for ids, _, _ in server.engine.requests]
    assert seen == prompts  # one run tells of all labels
    data = answer.json()["data"]
    weights = [math.exp(-label) for label in (1, 2, 3)]
    for entry in data:
        assert entry["probs"] == pytest.approx([w / sum(weights) for w in weights])
    assert answer.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": [1]}, "items"),
        ({"items": ["a"] * 2049}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1, 1]}, "label_token_ids"),
        ({"label_token_ids": [300]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
    ],
)
def test_what_is_refused_names_the_field(body, param):
    whole = {"query": "q", "items": ["a"], "label_token_ids": [1], **body}
    with running() as server, server.client() as client:
        answer = client.post(PATH, json=whole)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
