"""use_beam_search over HTTP: the same texts as in Python, cut short, left and ended in time.

Red when: the answers are not those of LLM.beam_search; a search goes on after its client has left
or after it was ended; a deadline counts for each token alone.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from octavo_engine.config import SimConfig
from octavo_engine.core.beam_search import BeamSearchParams
from octavo_engine.core.offline.llm import LLM
from octavo_engine.server.generation.beam_search import read_beams
from octavo_engine.server.openai.schemas import CompletionRequest
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.server import post
from tests.fakes.simulated import CONFIG, simulating

SLOW = CONFIG.replace(sim=SimConfig(kv_blocks=256, step_base_ms=20.0))
PROMPT = "The opposite of cold is"
ASKED: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 6,
    "n": 3,
    "use_beam_search": True,
    "length_penalty": 0.7,
}


def ask(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def test_the_answers_are_those_of_python_the_best_first():
    with simulating() as server:
        answer = ask(server.url, **ASKED, return_token_ids=True)
        server.check_idle()
    assert answer.status_code == 200, answer.text
    with LLM(CONFIG.model, device="sim", max_model_len=512) as llm:
        wanted = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.7)
        (found,) = llm.beam_search([PROMPT], wanted)
    choices = answer.json()["choices"]
    assert [c["token_ids"] for c in choices] == [beam.tokens for beam in found.sequences]
    assert [c["text"] for c in choices] == [beam.text for beam in found.sequences]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert answer.json()["usage"]["completion_tokens"] == sum(
        len(beam.tokens) for beam in found.sequences
    )


def test_chats_and_several_prompts_are_searched_too():
    with simulating() as server:
        chat = ask(
            server.url, "/v1/chat/completions", n=2, max_tokens=3, use_beam_search=True,
            messages=[{"role": "user", "content": "cold?"}],
        ).json()  # fmt: skip
        two = ask(server.url, **{**ASKED, "prompt": ["a", "b"], "n": 2}).json()
        server.check_idle()
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    assert all(choice["message"]["content"] for choice in chat["choices"])
    assert [choice["index"] for choice in two["choices"]] == [0, 1, 2, 3]


def test_too_many_beams_are_refused():
    with simulating(settings=ServerSettings()) as server:
        answer = ask(server.url, **{**ASKED, "n": 11})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


def test_what_is_searched_for_is_what_was_asked():
    requested = CompletionRequest(**{**ASKED, "max_tokens": 90})
    params = SamplingParams(n=3, max_tokens=90, ignore_eos=True)
    found = read_beams(requested, params, room=40)
    assert found == BeamSearchParams(
        beam_width=3, max_tokens=40, ignore_eos=True, length_penalty=0.7
    )


LONG: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 400,
    "n": 3,
    "use_beam_search": True,
    "ignore_eos": True,
}


def test_a_client_that_leaves_ends_its_search():
    with simulating(SLOW) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(post("/v1/completions", json.dumps(LONG).encode()))
            server.until(lambda: server.engine.num_in_flight > 0, "running")
        server.check_idle()


def test_a_deadline_counts_for_the_whole_search():
    with simulating(SLOW, ServerSettings(request_timeout_s=0.3)) as server:
        answer = ask(server.url, **LONG)
        server.check_idle()
    assert answer.status_code == 504, answer.text


def test_a_search_that_is_ended_answers_with_what_it_has():
    with simulating(SLOW) as server, ThreadPoolExecutor(1) as other:
        waiting = other.submit(ask, server.url, **LONG, request_id="mine")
        server.until(lambda: server.engine.num_in_flight > 0, "running")
        reported = httpx.post(server.url + "/abort_requests", json={"request_ids": ["mine"]})
        answer = waiting.result(60)
        server.check_idle()
    assert reported.json()["not_found"] == []
    assert answer.status_code == 200, answer.text
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"abort"}
    assert answer.json()["usage"]["completion_tokens"] < 3 * LONG["max_tokens"]
