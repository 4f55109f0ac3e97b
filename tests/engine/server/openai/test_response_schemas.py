"""What answers look like, whole and streamed: the exact shapes that clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.errors import DeadlineExceeded, EngineDead, GenerationFailed, QueueFull
from octavo_engine.server.settings import ServerSettings
from octavo_engine.tokenization.chat_template import ChatTemplate
from tests.fakes.engine import FakeEngine
from tests.fakes.server import RunningServer, running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def ask(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    return server.answer(path, body)


def stream(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events before [DONE]."""
    with server.client() as client:
        answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


USAGE_DETAILS = {
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    },
}  # fmt: skip


def test_a_whole_completion(server):
    answer = ask(server, COMPLETIONS, prompt="hello", max_tokens=4, temperature=0)

    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0, "text": "bzov", "logprobs": None, "finish_reason": "length",
                "stop_reason": None, "token_ids": None, "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "kv_transfer_params": None,
        "usage": {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4, **USAGE_DETAILS},
    }  # fmt: skip


def test_a_whole_chat(server):
    answer = ask(server, CHAT, **HI, max_completion_tokens=3, temperature=0, model="alias")

    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "alias")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant", "content": "pnu", "refusal": None, "annotations": None,
                "audio": None, "function_call": None, "reasoning": None,
            },
            "logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None,
        }
    ]  # fmt: skip


def test_the_first_chunks_of_a_chat_bring_the_role_and_the_last_the_usage(server):
    options = {"include_usage": True}
    events = stream(server, CHAT, **HI, max_tokens=2, temperature=0, stream_options=options)

    choices = [event["choices"] for event in events]
    assert choices == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
          "finish_reason": None}],
        [{"index": 0, "delta": {"content": "p"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "n"}, "logprobs": None, "finish_reason": "length",
          "stop_reason": None}],
        [],
    ]  # fmt: skip
    assert [("usage" in event) for event in events] == [False, False, False, True]
    assert events[-1]["usage"]["total_tokens"] == events[-1]["usage"]["prompt_tokens"] + 2
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


def test_usage_in_every_chunk_counts_up(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(server, COMPLETIONS, prompt="a", max_tokens=3, stream_options=options)

    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


def test_stop_strings_say_what_stopped(server):
    whole = ask(server, COMPLETIONS, prompt="hello", max_tokens=4, temperature=0, stop=["zo"])

    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["stop_reason"] == "zo"


def test_prompts_times_n_are_numbered_in_order(server):
    body = {"prompt": ["one", [116, 119, 111]], "n": 2, "max_tokens": 3, "seed": 5}
    whole = ask(server, COMPLETIONS, **body)
    alone = [ask(server, COMPLETIONS, **{**body, "prompt": p})["choices"] for p in ("one", "two")]

    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole["choices"]] == [
        choice["text"] for answer in alone for choice in answer
    ]
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["completion_tokens"] == 12


def test_echo_with_no_tokens_scores_the_prompt(server):
    whole = ask(server, COMPLETIONS, prompt="abc", echo=True, max_tokens=0, logprobs=1)

    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"A": -1.0, "b": -0.5}, {"A": -1.0, "c": -0.5}],
    }
    assert whole["usage"]["completion_tokens"] == 0


def test_streamed_logprobs_continue_their_offsets(server):
    events = stream(server, COMPLETIONS, prompt="hello", max_tokens=3, temperature=0, logprobs=0)

    logprobs = [event["choices"][0]["logprobs"] for event in events]
    assert [entry["text_offset"] for entry in logprobs] == [[0], [1], [2]]
    assert [entry["tokens"] for entry in logprobs] == [["b"], ["z"], ["o"]]


def test_chat_logprobs_carry_bytes_and_alternatives(server):
    body = {**HI, "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    whole = ask(server, CHAT, **body)
    as_ids = ask(server, CHAT, **body, return_tokens_as_token_ids=True)

    assert whole["choices"][0]["logprobs"]["content"] == [
        {"token": "p", "logprob": -0.5, "bytes": [112],
         "top_logprobs": [{"token": "A", "logprob": -1.0, "bytes": [65]}]}
    ]  # fmt: skip
    assert as_ids["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:112"


def test_prompt_logprobs_are_keyed_by_id(server):
    whole = ask(server, COMPLETIONS, prompt="ab", max_tokens=1, prompt_logprobs=0)

    assert whole["choices"][0]["prompt_logprobs"] == [
        None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    ]  # fmt: skip


def test_token_ids_come_when_asked_for(server):
    whole = ask(
        server, COMPLETIONS, prompt="hello", max_tokens=2, temperature=0, return_token_ids=True
    )
    events = stream(server, CHAT, **HI, max_tokens=2, temperature=0, return_token_ids=True)

    assert whole["choices"][0]["token_ids"] == [ord("b"), ord("z")]
    assert whole["choices"][0]["prompt_token_ids"] == list(b"hello")
    assert events[0]["prompt_token_ids"] == list(b"<user>hi\n<assistant>")
    assert [e["choices"][0]["token_ids"] for e in events[1:]] == [[ord("p")], [ord("n")]]


def test_truncation_keeps_the_end_of_the_prompt(server):
    body = {"max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True}
    whole = ask(server, COMPLETIONS, prompt="abcdef", **body)

    assert whole["choices"][0]["prompt_token_ids"] == list(b"def")


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    prompt=st.text("abc ", min_size=1, max_size=20),
    n=st.integers(1, 4),
    seed=st.integers(-5, 5),
    max_tokens=st.integers(1, 30),
    stop=st.lists(st.text("aeio", min_size=1, max_size=2), max_size=2),
    chat=st.booleans(),
)
def test_streamed_deltas_concatenate_to_the_whole_answer(
    server, prompt, n, seed, max_tokens, stop, chat
):
    body: dict[str, Any] = {"n": n, "seed": seed, "max_tokens": max_tokens, "stop": stop}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    path = CHAT if chat else COMPLETIONS
    whole = ask(server, path, **body)
    events = stream(server, path, **body, stream_options={"include_usage": True})

    texts = [""] * n
    ends: list[Any] = [None] * n
    for event in events:
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if chat else choice["text"]
            texts[choice["index"]] += piece
            if choice["finish_reason"]:
                ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    choices = whole["choices"]
    assert texts == [c["message"]["content"] if chat else c["text"] for c in choices]
    assert ends == [(c["finish_reason"], c["stop_reason"]) for c in choices]
    assert events[-1]["usage"] == whole["usage"]


# ── ids, keys, defaults ──


def test_request_ids_come_back_and_make_the_answer_s_id(server):
    with server.client() as client:
        given = client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "abc-1"})
        forged = client.get("/version", headers={"x-request-id": "a b"})
        refused = client.post(COMPLETIONS, json={}, headers={"x-request-id": "abc-2"})

    assert given.headers["x-request-id"] == "abc-1"
    assert given.json()["id"] == "cmpl-abc-1"
    assert len(forged.headers["x-request-id"]) == 24
    assert refused.headers["x-request-id"] == "abc-2"


def test_equal_request_ids_are_told_apart_in_the_engine(server):
    before = len(server.engine.requests)
    with server.client(headers={"x-request-id": "same"}) as client:
        for _ in range(2):
            client.post(COMPLETIONS, json={"prompt": "a"})

    ids = [facts["request_id"] for _, _, facts in server.engine.requests[before:]]
    assert len(set(ids)) == 2
    assert all(name.startswith("cmpl-same-0-") for name in ids)


def test_the_model_s_generation_config_gives_the_defaults():
    engine = FakeEngine()
    engine.default_params = {"temperature": 0.25, "top_k": 7.0, "top_p": 0.5}
    with running(engine) as server:
        ask(server, COMPLETIONS, prompt="a", top_p=0.75)
    params = engine.requests[-1][1]
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 7, 0.75)

    with running(engine, ServerSettings(generation_config="vllm")) as server:
        ask(server, COMPLETIONS, prompt="a")
    assert engine.requests[-1][1].temperature == 1.0


def test_tokenize_and_detokenize_are_inverse(server):
    tokens = ask(server, "/tokenize", prompt="héllo", return_token_strs=True)
    chat = ask(server, "/tokenize", **HI)

    assert tokens["count"] == 6
    assert tokens["max_model_len"] == 256
    assert ask(server, "/detokenize", tokens=tokens["tokens"]) == {"prompt": "héllo"}
    assert ask(server, "/detokenize", tokens=chat["tokens"])["prompt"] == "<user>hi\n<assistant>"


def test_models_lists_every_name(server):
    with server.client() as client:
        listed = client.get("/v1/models").json()
        one = client.get("/v1/models/alias").json()

    assert [card["id"] for card in listed["data"]] == ["fake", "alias"]
    assert (listed["object"], one["object"], one["max_model_len"]) == ("list", "model", 256)


def test_a_request_s_own_template_is_taken_where_the_operator_trusts_it():
    engine = FakeEngine()
    engine.tokenizer.chat_template = ChatTemplate("unused", special_tokens={"bos_token": "<s>"})
    trusting = ServerSettings(trust_request_chat_template=True)
    own = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    with running(engine, trusting) as server, server.client() as client:
        good = client.post("/tokenize", json={**HI, "chat_template": own})
        bad = client.post(CHAT, json={**HI, "chat_template": "{% for %}"})

    assert bytes(good.json()["tokens"]) == b"<s>[hi]"
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "chat_template")


# ── failures of the engine ──

FAILURES = [
    (GenerationFailed("NaN in layer 3"), 500, "model_error", None),
    (EngineDead("the engine core died", retry_after_s=2), 503, "engine_dead", "2"),
    (QueueFull("1024 requests wait", retry_after_s=7), 503, "queue_full", "7"),
    (DeadlineExceeded("too late"), 504, "deadline_exceeded", None),
    (ZeroDivisionError("secret 0xdeadbeef"), 500, "internal_error", None),
]


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_failure_before_the_first_token_has_its_status(
    error, status, code, retry_after, streaming
):
    with running(FakeEngine(error=error)) as server, server.client() as client:
        answer = client.post(CHAT, json={**HI, "stream": streaming})

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.headers.get("retry-after") == retry_after
    assert "secret" not in answer.text


@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_failure_within_a_stream_is_an_event_then_done(error, status, code, retry_after, path):
    body = {"prompt": "a"} if path == COMPLETIONS else HI
    with running(FakeEngine(error=error, news_before_error=2)) as server:
        events = stream(server, path, **body, max_tokens=10, ignore_eos=True)

    assert events[-1]["error"]["code"] == code
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in json.dumps(events)
    assert len([event for event in events if "choices" in event]) == 2 + (path == CHAT)


def test_one_failing_prompt_of_a_batch_ends_the_others():
    engine = FakeEngine(error=GenerationFailed("NaN"), news_before_error=3)
    with running(engine) as server, server.client() as client:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 50, "ignore_eos": True}
        answer = client.post(COMPLETIONS, json=body)

    assert answer.status_code == 500
    assert len(engine.aborted) == 3
