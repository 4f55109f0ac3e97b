"""Texts longer than the model reads: cut, computed, and put together by length."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine.config import EngineConfig
from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.pooling.long_texts import joined, pieces_of
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running

CLS, SEP = 101, 102
PATH = "/v1/embeddings"


def test_each_piece_stands_between_the_special_tokens():
    text = list(range(1, 12))
    pieces = pieces_of([CLS, *text, SEP], 6, [CLS, SEP])
    assert [piece.item.token_ids for piece in pieces] == [
        [CLS, 1, 2, 3, 4, SEP], [CLS, 5, 6, 7, 8, SEP], [CLS, 9, 10, 11, SEP],
    ]  # fmt: skip
    assert [piece.weight for piece in pieces] == [4, 4, 3]


@pytest.mark.parametrize(
    ("ids", "special"),
    [([1, 2, 3, 4, 5], []), ([1, 2, 3, 4, 5], [CLS, SEP]), ([CLS, 2, 3, 4, 5], [CLS, SEP])],
)
def test_ids_without_them_are_cut_as_they_are(ids, special):
    assert [piece.item.token_ids for piece in pieces_of(ids, 3, special)] == [ids[:3], ids[3:]]


def test_what_fits_is_left_whole_to_the_last_token():
    ids = [CLS, 1, 2, 3, SEP]
    ((item, weight),) = pieces_of(ids, 5, [CLS, SEP])
    assert (item.token_ids, weight) == (ids, 5)


def test_the_mean_counts_tokens_and_keeps_unit_length():
    east, north = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    together = joined([east, north], [3, 1])
    assert together == pytest.approx(np.array([3, 1]) / np.sqrt(10))
    assert joined([2 * east, north], [3, 1]).tolist() == [1.5, 0.25]  # these were not normalised
    assert joined([east, -east], [1, 1]).tolist() == [0, 0]
    assert joined([north], [7]) is north


def test_the_endpoint_cuts_up_to_its_limit_and_counts_all_tokens():
    engine = FakeEngine(tasks=("embed",), max_model_len=8)
    with (
        running(engine, ServerSettings(limits=RequestLimits(max_embed_len=20))) as server,
        server.client() as client,
    ):

        def ask(*texts: str, **body):
            return client.post(PATH, json={"input": list(texts), **body})

        whole = ask("a" * 12 + "b" * 6, "ab").json()
        assert whole["usage"]["prompt_tokens"] == 20
        a, b = (np.array(entry["embedding"]) for entry in whole["data"])
        of = [np.array(ask(text).json()["data"][0]["embedding"]) for text in ("a", "aaaabbbb", "b")]
        mean = (8 * of[0] + 8 * of[1] + 2 * of[2]) / 18
        assert a == pytest.approx(mean / np.linalg.norm(mean), rel=1e-5)
        assert b == pytest.approx(np.array(ask("ab").json()["data"][0]["embedding"]))
        refused = ask("a" * 21)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert "20" in error["message"] and "--max-embed-len" in error["message"]


def test_without_the_limit_a_long_text_is_refused_as_ever():
    with (
        running(FakeEngine(tasks=("embed",), max_model_len=8)) as server,
        server.client() as client,
    ):
        refused = client.post(PATH, json={"input": "a" * 9})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_a_real_model_finds_a_long_text_near_to_what_it_is_about():
    import asyncio
    import json

    from octavo_engine.core.async_engine import AsyncEngine
    from octavo_engine.core.connect import in_process
    from octavo_engine.server.app import build_app
    from octavo_engine.server.http.loopback import post

    cats, lorries = "The cat sleeps on the sofa. " * 120, "The lorry is on the motorway. " * 120

    async def story():
        engine = await AsyncEngine.start(
            EngineConfig(model="demo://minilm", num_threads=1), connect=in_process
        )
        try:
            await engine.ready()
            app = build_app(engine, ServerSettings(limits=RequestLimits(max_embed_len=4096)))
            body = {"input": [cats, lorries, "a kitten at home"]}
            return await post(app, PATH, json.dumps(body).encode())
        finally:
            await engine.stop()

    answer = asyncio.run(story())
    assert answer.status == 200, answer.body
    near, far, text = (np.array(entry["embedding"]) for entry in answer.json()["data"])
    assert answer.json()["usage"]["prompt_tokens"] > 1000
    assert np.linalg.norm(near) == pytest.approx(1, abs=1e-5)
    assert near @ text > far @ text + 0.1
