"""An answer's bits do not depend on other requests in the batch, on a real model.

The same seeded requests are asked alone; then all at once, amid strangers, of a server that cuts
prompts into small chunks and has so little memory that it must preempt. Text is made of the tokens,
so the tokens themselves are compared.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.engine.server.test_metrics_endpoint import read
from tests.fakes.process import serving

if TYPE_CHECKING:
    from tests.fakes.process import ServeProcess

pytestmark = pytest.mark.slow

MODEL = ("demo://smollm2", "--device", "cpu", "--served-model-name", "m")
STORY = "Once upon a time there was a fox who lived in a wood with a hare and an owl. " * 2
ASKED: list[dict[str, Any]] = [
    {"prompt": STORY + "One day", "seed": 1, "temperature": 0.9, "max_tokens": 16},
    {"prompt": STORY + "One day", "seed": 2, "top_p": 0.8, "max_tokens": 14},  # a shared prefix
    {"prompt": "The capital of France is", "temperature": 0.0, "max_tokens": 16},
    {"prompt": [5, 6, 7] * 11, "seed": -3, "top_k": 40, "n": 2, "max_tokens": 14},
    {"prompt": "def f(x):", "seed": 4, "repetition_penalty": 1.2, "max_tokens": 16},
]
STRANGERS: list[dict[str, Any]] = [
    {"prompt": f"{number} bottles of beer on the wall, " * (1 + number % 3), "max_tokens": 48}
    for number in range(4)
]
MAX_ROUNDS = 8


def patient(server: ServeProcess) -> httpx.Client:
    """Other work on the machine may make it slow; that is no failure."""
    return httpx.Client(base_url=server.url, timeout=250)


def answers(client: httpx.Client, requested: dict[str, Any]) -> list[list[int]]:
    """The tokens of each choice."""
    body = {"ignore_eos": True, "return_token_ids": True, **requested}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def at_once(client: httpx.Client, many: list[dict[str, Any]]) -> list[list[list[int]]]:
    with ThreadPoolExecutor(len(many)) as pool:
        return list(pool.map(lambda requested: answers(client, requested), many))


# Of one token's KV, by --kv-cache-dtype: 64 numbers each, in 8 bits with a scale of two bytes.
TOKEN_BYTES = {"auto": 30 * 2 * 3 * 64 * 2, "int8": 30 * 2 * 3 * (64 + 2)}


@functools.cache
def answers_alone(kv_cache_dtype: str) -> list[list[list[int]]]:
    flags = ("--kv-cache-memory-bytes", "64MiB", "--kv-cache-dtype", kv_cache_dtype)
    with serving(*MODEL, *flags) as server, patient(server) as client:
        return [answers(client, requested) for requested in ASKED]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "different"),
    [
        ("auto", ["--enable-prefix-caching"]),
        ("auto", ["--no-enable-prefix-caching", "--speculative-config", '{"method": "ngram"}']),
        ("int8", ["--enable-prefix-caching"]),
    ],
)
def test_answers_are_the_same_in_company_in_chunks_and_after_preemption(kv_cache_dtype, different):
    alone = answers_alone(kv_cache_dtype)
    # Room for 8 blocks, or 128 tokens, where 400 want to live.
    room = str(128 * TOKEN_BYTES[kv_cache_dtype])
    little = ("--kv-cache-memory-bytes", room, "--max-model-len", "128")
    flags = ("--max-num-batched-tokens", "33", "--kv-cache-dtype", kv_cache_dtype)
    with (
        serving(*MODEL, *little, *flags, *different) as server,
        patient(server) as client,
    ):
        # Who meets whom depends on the machine's speed: crowd it until somebody had to give way.
        for _ in range(MAX_ROUNDS):
            crowded = at_once(client, [*ASKED, *STRANGERS])[: len(ASKED)]
            assert crowded == alone
            samples = read(client.get("/metrics").text)
            assert samples["octavo_kv_cache_usage_perc"] == 0.0
            if samples["octavo_num_preemptions_total"] > 0:
                break
    assert samples["octavo_num_preemptions_total"] > 0
