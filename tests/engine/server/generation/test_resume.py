"""A stream that breaks anywhere and is resumed reads like one that never broke.

The unbroken stream is taken with its token lines from a real server; it is cut at every event, and
between bytes; what the client has of it and what a resume brings are joined and compared.
"""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.errors import RequestError
from octavo_engine.protocol.endpoints import POD_UID_HEADER, RESUME_HEADER, STREAM_HEADER
from octavo_engine.protocol.resume import Resume, pack
from octavo_engine.server.http.resume_frame import read_frame
from tests.engine.server.openai.chat.test_pictures import RED, picture
from tests.engine.server.openai.chat.test_sounds import LOUD, sound
from tests.fakes.process import serving
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.seeing import write_seeing_model
from tests.fakes.server import running
from tests.fakes.stream_reader import StreamReader, events_of, lines_of, read_all

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PICTURE, SOUND = picture(RED), sound(LOUD)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello there"}]}
USAGE = {"stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {**HELLO, "temperature": 0.0}),
    "seeded": (CHAT, {**HELLO, "seed": 7}),
    "negative seed": (COMPLETIONS, {"prompt": "Once", "seed": -7}),
    "unseeded": (CHAT, HELLO),
    "usage": (CHAT, {**HELLO, **USAGE}),
    "every usage": (CHAT, {**HELLO, **EVERY_USAGE}),
    "every usage, n = 2": (CHAT, {**HELLO, "n": 2, **EVERY_USAGE}),
    "n = 2": (CHAT, {**HELLO, "n": 2, **USAGE}),
    "n = 3, seeded": (COMPLETIONS, {"prompt": "Once", "n": 3, "seed": 1, **USAGE}),
    "prompts": (COMPLETIONS, {"prompt": ["a", "a", [5, 6, 7]], **USAGE}),
    "prompts times n": (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 3}),
    "logprobs": (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}),
    "logprobs of texts": (COMPLETIONS, {"prompt": "Once", "logprobs": 2, "n": 2}),
    "echo": (COMPLETIONS, {"prompt": ["Once", "Upon"], "echo": True}),
    "echo with logprobs": (COMPLETIONS, {"prompt": "Once", "echo": True, "logprobs": 1, "n": 2}),
    "token ids": (CHAT, {**HELLO, "return_token_ids": True}),
    "token ids of texts": (COMPLETIONS, {"prompt": "Once", "return_token_ids": True}),
    "stop string": (COMPLETIONS, {"prompt": "Once", "seed": 5, "stop": ["er w", "ver", "e t"]}),
    "long stop strings": (CHAT, {**HELLO, "seed": 2, "n": 2, "stop": ["zzzzzz", "spark stone"]}),
    "stop id": (COMPLETIONS, {"prompt": "a", "seed": 3, "stop_token_ids": [101], "min_tokens": 6}),
    "penalties": (
        COMPLETIONS,
        {"prompt": "a", "presence_penalty": 0.5, "frequency_penalty": 1.0, "logit_bias": {"5": 1}},
    ),
}  # fmt: skip


# ── reading streams ──


def reported(clean: bytes) -> dict[str, Any]:
    """What a client makes of a stream: joined by choice, whatever the pieces."""
    choices: dict[int, dict[str, Any]] = {}
    result: dict[str, Any] = {"choices": choices, "heads": set(), "usage": [], "steps": []}
    events = events_of(clean)
    assert events[-1] == b"data: [DONE]\n\n"
    for event in events[:-1]:
        assert event.startswith(b"data: "), event
        chunk = json.loads(event[6:])
        result["heads"].add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
        if usage := chunk.get("usage"):
            usage.pop("prompt_tokens_details")  # what another engine has cached is its own affair
            result["steps" if chunk["choices"] else "usage"].append(usage)
        for choice in chunk["choices"]:
            known = choices.setdefault(
                choice["index"],
                {"text": "", "roles": 0, "logprobs": [], "ids": [], "prompt_ids": [], "ends": []},
            )
            delta = choice.get("delta", {})
            known["text"] += choice.get("text") or delta.get("content") or ""
            known["roles"] += "role" in delta
            known["ids"] += choice.get("token_ids") or []
            if ids := choice.get("prompt_token_ids") or chunk.get("prompt_token_ids"):
                known["prompt_ids"].append(ids)
            if logprobs := choice["logprobs"]:
                columns = [logprobs["content"]] if "content" in logprobs else logprobs.values()
                known["logprobs"] += zip(*columns, strict=True)
            if choice["finish_reason"]:
                known["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    return result


def ask(client: httpx.Client, path: str, body: dict[str, Any], **headers: str) -> bytes:
    answer = client.post(path, json=body, headers={STREAM_HEADER: "tokens", **headers})
    assert answer.status_code == 200, answer.text
    return answer.content


def resume(client: httpx.Client, path: str, body: dict[str, Any], known: Resume) -> bytes:
    answer = client.post(
        path,
        content=pack(known, json.dumps(body).encode()),
        headers={
            STREAM_HEADER: "tokens", RESUME_HEADER: "1", "content-type": "application/json",
        },
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.content


def check(
    client: httpx.Client, path: str, body: dict[str, Any], *, every: int = 1,
    onto: httpx.Client | None = None,
) -> None:  # fmt: skip
    """Cut after each event, and the streams that go on at random, as long as they are long. They
    go on at the server `onto`, or at the same."""
    body = {"max_tokens": 16, **body, "stream": True}
    raw = ask(client, path, body)
    unbroken, whole = events_of(raw), read_all(raw)
    expected = reported(whole.clean)
    last_sum = [usage["completion_tokens"] for usage in expected.pop("steps")][-1:]
    assert len(unbroken) > 3 and len(expected["heads"]) == 1
    rng = random.Random(1)
    # Who has seen the usage chunk writes [DONE] itself.
    for first_cut in range(1, len(unbroken) - (1 if expected["usage"] else 0), every):
        reader, stream, cut = StreamReader(), unbroken, first_cut
        while cut < len(stream) - 1:
            for event in stream[:cut]:
                reader.read(event)
            stream = events_of(resume(onto or client, path, body, reader.resume))
            cut = rng.randint(3, 20)
        for event in stream:
            reader.read(event)
        got = reported(reader.clean)
        # How many tokens make an event depends on the clock, and so do the sums on the way.
        sums = [usage["completion_tokens"] for usage in got.pop("steps")]
        assert sums == sorted(sums) and sums[-1:] == last_sum
        assert got == expected
        assert reader.tokens == whole.tokens


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        serving("m", "--sim-step-base-ms", "3") as server,
        server.client() as client,
    ):
        yield client


@pytest.mark.parametrize("name", REQUESTS)
def test_a_resumed_stream_goes_on_exactly_where_it_broke(client, name):
    check(client, *REQUESTS[name])


@pytest.fixture(scope="module")
def model() -> Iterator[httpx.Client]:
    flags = ("--device", "cpu", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "256")
    with (
        serving("demo://smollm2", *flags) as server,
        httpx.Client(base_url=server.url, timeout=250) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"n": 2, "repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
        {"seed": 4, "logprobs": True, "top_logprobs": 2, "stop": ["the sea", "\n\n"]},
        {"seed": 2, "temperature": 1.8, "min_tokens": 10, "skip_special_tokens": False},
    ],
)
def test_a_real_model_goes_on_too(model, more):
    messages = [{"role": "user", "content": "Write a poem with emoji 🦊 about a fox."}]
    check(model, CHAT, {"messages": messages, "max_tokens": 16, **more}, every=3)


@pytest.mark.parametrize(("name", "part"), [("llava", PICTURE), ("qwen2audio", SOUND)])
def test_a_picture_and_a_sound_go_with_a_stream_to_another_engine(tmp_path, name, part):
    """What is resumed is the request as it came, with its media."""
    folder = str(write_seeing_model(tmp_path / name, name))
    flags = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1")
    text = {"type": "text", "text": "tell me more"}
    body = {
        "messages": [{"role": "user", "content": [part, text]}],
        "temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "logprobs": True,
    }  # fmt: skip
    with (
        serving(folder, *flags) as first, serving(folder, *flags) as second,
        first.client() as client, second.client() as other,
    ):  # fmt: skip
        check(client, CHAT, body, every=16, onto=other)


def test_a_character_of_several_tokens_is_never_cut(client):
    """The simulator speaks ASCII, so the bytes are told to it: a fox, half of which came."""
    fox = list("🦊".encode())
    known = Resume("cmpl-1", 1, 5, [[*b"ab", *fox[:2]]])
    body = {"prompt": "a", "stream": True, "max_tokens": 5}
    reader = read_all(resume(client, COMPLETIONS, body, known))
    assert reported(reader.clean)["choices"][0]["text"][0] == "\ufffd"  # an ASCII letter broke it
    known = Resume("cmpl-1", 1, 5, [[*b"ab", *fox]])
    rest = reported(read_all(resume(client, COMPLETIONS, {**body, "max_tokens": 7}, known)).clean)
    assert rest["choices"][0]["text"].isascii() and len(rest["choices"][0]["text"]) == 1


def test_equal_prompts_without_a_seed_get_different_answers(client):
    body = {"prompt": ["a", "a"], "stream": True, "max_tokens": 12}
    tokens = read_all(ask(client, COMPLETIONS, body)).tokens
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_sums_on_the_way_never_run_ahead_of_the_tokens_told(path):
    """Or who resumes between two events that came at once would begin with a smaller sum."""
    body: dict[str, Any] = {"n": 2, "stream": True, "max_tokens": 12, **EVERY_USAGE}
    body |= {"messages": HELLO["messages"]} if path == CHAT else {"prompt": "Once"}
    engine = ScriptedEngine(scripts=["It was a dark night.", "They lived ever after."], piece=3)
    with running(engine) as server, server.client() as client:
        events = events_of(ask(client, path, body))
    reader, told_sums = StreamReader(), 0
    for event in events[:-2]:
        reader.read(event)
        if usage := json.loads(lines_of(event)[1][6:]).get("usage"):
            told_sums += 1
            assert usage["completion_tokens"] == sum(map(len, reader.tokens.values()))
    assert told_sums == (10 if path == CHAT else 8)  # each choice of a chat is opened first


# ── what is already over ──


@pytest.mark.parametrize(
    ("more", "tokens", "text", "end"),
    [
        ({"max_tokens": 2}, b"ab", "", ("length", None)),
        ({"stop": ["b"]}, b"ab", "", ("stop", "b")),
        ({"stop": ["bc"], "max_tokens": 2}, b"ab", "b", ("length", None)),  # b was held back
        ({"stop_token_ids": [98]}, b"ab", "", ("stop", 98)),
    ],
)
def test_an_answer_that_was_complete_only_gets_its_end(client, more, tokens, text, end):
    body = {"prompt": "a", "stream": True, "max_tokens": 9, **USAGE, **more}
    stream = resume(client, COMPLETIONS, body, Resume("cmpl-1", 1, 5, [list(tokens)]))
    rest = reported(read_all(stream).clean)
    choice = rest["choices"][0]
    assert (choice["text"], choice["ends"]) == (text, [end])
    assert [usage["completion_tokens"] for usage in rest["usage"]] == [2]


def test_when_all_ends_were_seen_only_the_sum_is_left(client):
    body = {"prompt": "a", "n": 2, "stream": True, "max_tokens": 2, **USAGE}
    known = Resume("cmpl-1", 1, 5, [[97, 98], [99]], finished=[1, 0])
    reader = read_all(resume(client, COMPLETIONS, body, known))
    rest = reported(reader.clean)
    assert (rest["choices"], reader.begin["id"]) == ({}, "cmpl-1")
    assert rest["usage"][0]["completion_tokens"] == 3


# ── lines ──


def test_tokens_whose_text_is_held_back_are_told_with_the_next_event(client):
    body = {"prompt": "a", "seed": 1, "stream": True, "max_tokens": 12}
    plain = read_all(ask(client, COMPLETIONS, body))
    text = reported(plain.clean)["choices"][0]["text"]
    stop = text[3:7] + "~"  # never complete
    events = events_of(ask(client, COMPLETIONS, {**body, "stop": [stop]}))
    told_with: dict[str, list[int]] = {}
    for event in events[:-1]:
        reader = read_all(event)
        told_with[json.loads(reader.clean[6:])["choices"][0]["text"]] = reader.tokens[0]
    assert told_with[text[3:8]] == list(text[3:8].encode())


def test_nobody_gets_lines_who_did_not_ask(client):
    requested = {"prompt": "a", "max_tokens": 3}
    streamed = client.post(COMPLETIONS, json={**requested, "stream": True})
    other = client.post(
        COMPLETIONS, json={**requested, "stream": True}, headers={STREAM_HEADER: "1"}
    )
    whole = client.post(COMPLETIONS, json=requested, headers={STREAM_HEADER: "tokens"})
    assert b"octavo" not in streamed.content + other.content
    assert whole.json()["usage"]["completion_tokens"] == 3


# ── frames that are wrong ──


def refusal(client, content: bytes, status: int = 400) -> str:
    answer = client.post(
        COMPLETIONS,
        content=content,
        headers={RESUME_HEADER: "1", "content-type": "application/json"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, RESUME_HEADER), answer.text
    return str(error["message"]).removeprefix(f"{RESUME_HEADER}: ")


def frame(body: dict[str, Any] | None = None, **changes: Any) -> bytes:
    known = {"id": "cmpl-1", "created": 1, "seed": 5, "tokens": [[97]]} | changes
    reported = json.dumps({name: value for name, value in known.items() if value != "left out"})
    whole = {"prompt": "a", "max_tokens": 3, "stream": True} | (body or {})
    return struct.pack("<I", len(reported)) + reported.encode() + json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the frame's length is missing; the body has 0 bytes"),
        (b"abc", "the frame's length is missing; the body has 3 bytes"),
        (b"\xff\xff\xff\xff{}", "a frame of 4294967295 bytes is above the limit of 8388608"),
        (b"\x05\0\0\0{}", "the frame has 5 bytes, but only 2 came"),
        (b"\x01\0\0\0{}", "the body is not valid JSON: "),
        (frame(tokens="left out"), "tokens is required"),
        (frame(tokens=[97]), "tokens[0]: expected array, got int"),
        (frame(tokens=[[-1]]), "tokens are not all token ids"),
        (frame(tokens=[[2**40]]), "tokens are not all token ids"),
        (frame(tokens=[[True]]), "tokens[0][0]: expected int, got bool"),
        (frame(tokens=[[2**31 - 1]]), "token id 2147483647 is not in the vocabulary of "),
        (frame(tokens=[[97], [97]]), "tokens holds 2 answers, but 1 prompts times n = 1 have 1"),
        (frame(tokens=[]), "tokens holds 0 answers, but "),
        (frame(tokens=[[97] * 4]), "answer 0 has 4 tokens already, but max_tokens is 3"),
        (frame(finished=[1]), "finished names answer 1, but there are 1"),
        (frame(finished=[0, 0]), "finished names an answer twice"),
        (frame(opened=[-1]), "opened names answer -1, but there are 1"),
        (frame(id=""), "id is not one that an engine gives"),
        (frame(id='"\n'), "id is not one that an engine gives"),
        (frame(created=-1), "created is not a time in seconds"),
        (frame(seed=2**63), "seed does not fit 64 bits"),
        (frame({"seed": 6}), "the seed was 5, but the request has 6"),
        (frame({"stream": False}), "only a streamed answer can be resumed; "),
    ],
)
def test_a_frame_that_is_wrong_is_refused_with_the_reason(client, content, message):
    assert refusal(client, content).startswith(message)


def test_an_original_body_that_is_wrong_is_refused_as_ever(client):
    answer = client.post(
        COMPLETIONS,
        content=frame({"temperature": -1.0}),
        headers={RESUME_HEADER: "1", "content-type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.data())
def test_whatever_comes_as_a_frame_is_read_or_refused(data):
    good = frame(finished=[0], opened=[0])
    mutated = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(mutated)))
    try:
        known, rest = read_frame(bytes(mutated[:cut]))
    except RequestError as error:
        assert error.status == 400 and error.param == RESUME_HEADER
        return
    assert all(0 <= token < 2**31 for ids in known.tokens for token in ids)
    assert bytes(mutated[:cut]).endswith(rest)


def test_a_frame_does_not_count_towards_the_limit_of_bodies():
    with serving("m", "--max-body-bytes", "300") as server, server.client() as client:
        body = {"prompt": "a", "stream": True, "max_tokens": 200}
        known = Resume("cmpl-1", 1, 5, [list(b"x" * 190)])
        reader = read_all(resume(client, COMPLETIONS, body, known))
        assert len(reader.tokens[0]) == 10
        too_large = client.post(
            COMPLETIONS,
            content=pack(known, json.dumps({**body, "prompt": "a" * 300}).encode()),
            headers={RESUME_HEADER: "1", "content-type": "application/json"},
        )
    assert too_large.status_code == 413


# ── who may, and who is meant ──


def test_a_resume_needs_the_key_and_the_pod_it_was_meant_for():
    environment = {"OCTAVO_POD_UID": "pod-1", "OCTAVO_API_KEY": "secret"}
    with serving("m", env=environment) as server, server.client() as client:

        def status(**headers: str) -> tuple[int, str]:
            answer = client.post(
                COMPLETIONS,
                content=frame(),
                headers={RESUME_HEADER: "1", "content-type": "application/json", **headers},
            )
            is_error = answer.status_code != 200
            return answer.status_code, answer.json()["error"]["code"] if is_error else ""

        key = {"authorization": "Bearer secret"}
        assert status() == (401, "invalid_api_key")
        assert status(**key) == (200, "")
        assert status(**key, **{POD_UID_HEADER: "pod-1"}) == (200, "")
        assert status(**key, **{POD_UID_HEADER: "pod-2"}) == (421, "wrong_pod")
        assert client.get("/ready", headers={POD_UID_HEADER: "pod-2"}).status_code == 421


def test_an_engine_that_knows_no_uid_takes_what_comes(client):
    requested = {"prompt": "a", "max_tokens": 1}
    answer = client.post(COMPLETIONS, json=requested, headers={POD_UID_HEADER: "any"})
    assert answer.status_code == 200
