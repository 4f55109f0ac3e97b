"""Log lines of a real server: whose request each is about, its numbers, and none of its words."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from typing import Any

import pytest

from octavo_common.logs import REQUEST_ID, JsonFormatter
from tests.fakes.process import serving

pytestmark = pytest.mark.slow

CHAT = {
    "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 3, "temperature": 0.5,
    "stop": ["hidden"], "logit_bias": {"101": 4},
}  # fmt: skip


def lines(*flags: str) -> list[dict[str, Any]]:
    """What a server logs while it answers one good request and one bad one."""
    with serving("m", *flags) as server:
        with server.client() as client:
            headers = {"x-request-id": "r1"}
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).is_success
            client.post("/v1/completions", json={"prompt": "more secret words", "n": "x"})
            assert client.get("/health").is_success
        server.signal(signal.SIGTERM)
        server.wait()
    return server.lines


def test_without_being_asked_requests_that_went_well_leave_no_line():
    said = lines()
    assert not any(line["message"] in ("Received", "Answered", "Prompt") for line in said)
    assert "secret" not in json.dumps(said)


def test_a_request_is_logged_by_its_numbers():
    said = lines("--enable-log-requests", "--access-log", "all")
    (received,) = [line for line in said if line["message"] == "Received"]
    assert (received["request_id"], received["answer_id"]) == ("r1", "chatcmpl-r1")
    assert received["prompt_tokens"] > 12
    assert received["params"] == {
        "max_tokens": 3, "temperature": 0.5, "stop": "(given)", "logit_bias": "(given)",
    }  # fmt: skip
    answered = [
        line for line in said if line["message"] == "Answered" and line["path"].startswith("/v1")
    ]
    assert [(line["status"], line["path"]) for line in answered] == [
        (200, "/v1/chat/completions"), (400, "/v1/completions"),
    ]  # fmt: skip
    assert answered[0]["request_id"] == "r1" != answered[1]["request_id"]
    # The id with its quote: times and ports have such digits too.
    assert not any(word in json.dumps(said) for word in ("secret", "hidden", '"101'))


@pytest.mark.parametrize(
    ("which", "paths"),
    [
        ("requests", ["/v1/chat/completions", "/v1/completions"]),
        ("all", ["/v1/chat/completions", "/v1/completions", "/health"]),
        ("errors", []),
        ("none", []),
    ],
)
def test_which_requests_are_logged_is_a_setting(which: str, paths: list[str]):
    answered = [line for line in lines("--access-log", which) if line["message"] == "Answered"]
    own = [line["path"] for line in answered if line["path"] not in ("/ready", "/readyz")]
    assert [path for path in own if path != "/health"] == paths[:2]
    assert ("/health" in own) == ("/health" in paths)


def test_at_level_debug_the_prompt_is_shown_as_far_as_allowed():
    said = lines("--enable-log-requests", "--log-level", "debug", "--max-log-len", "9")
    (prompt,) = [line for line in said if line["message"] == "Prompt"]
    assert len(prompt["prompt_token_ids"]) == 9 and 0 < len(prompt["prompt"]) <= 9
    assert "secret words" not in json.dumps(said)


def test_an_answer_is_logged_by_its_numbers_and_at_level_debug_with_its_text():
    said = lines("--enable-log-outputs")
    (generated,) = [line for line in said if line["message"] == "Generated"]
    assert (generated["request_id"], generated["answer_id"]) == ("r1", "chatcmpl-r1")
    assert (generated["tokens"], generated["finish_reason"]) == (3, "length")
    assert not any(line["message"] == "Text" for line in said)

    said = lines("--enable-log-outputs", "--log-level", "debug", "--max-log-len", "2")
    (text,) = [line for line in said if line["message"] == "Text"]
    assert len(text["text"]) == 2
    assert not any(line["message"] in ("Prompt", "Received") for line in said)


def test_a_line_that_knows_nothing_of_requests_still_names_the_one_at_hand():
    record = logging.LogRecord("octavo.x", logging.INFO, "f.py", 1, "Deep below", (), None)

    async def work(request_id: str) -> dict[str, Any]:
        REQUEST_ID.set(request_id)
        await asyncio.sleep(0)
        line: dict[str, Any] = json.loads(JsonFormatter().format(record))
        return line

    async def both() -> list[dict[str, Any]]:
        return list(await asyncio.gather(work("a"), work("b")))

    assert [line["request_id"] for line in asyncio.run(both())] == ["a", "b"]
    assert "request_id" not in json.loads(JsonFormatter().format(record))
