"""Which answers count against an engine: its own faults do, a client's deadline does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from octavo_router.flow.retry import Failure
from octavo_router.proxy.failures import failure_on, verdict_on
from octavo_router.routing.outcome import AttemptResult
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import ScriptedUpstream

if TYPE_CHECKING:
    from tests.fakes.upstream import Peer, Received

OPENAI = json.dumps({"error": {
    "message": "late", "type": "timeout_error", "param": None, "code": "deadline_exceeded",
}}).encode()  # fmt: skip
ANTHROPIC = json.dumps({
    "type": "error", "error": {"type": "timeout_error", "message": "late"}, "request_id": "r",
}).encode()  # fmt: skip
ANOTHER = json.dumps({"error": {"type": "timeout_error", "code": "gateway"}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "result"),
    [
        (504, OPENAI, AttemptResult.REJECTED),
        (504, ANTHROPIC, AttemptResult.REJECTED),
        (504, ANOTHER, AttemptResult.ERROR_5XX),
        (504, b"", AttemptResult.ERROR_5XX),
        (504, b'{"error": []}', AttemptResult.ERROR_5XX),
        (500, OPENAI, AttemptResult.ERROR_5XX),
        (200, b"", AttemptResult.OK),
        (503, b"", AttemptResult.REFUSED),
        (400, OPENAI, AttemptResult.REJECTED),
    ],
)
def test_an_engine_is_not_to_blame_for_a_deadline(status, body, result):
    assert verdict_on(status, body)[0] is result


def test_a_request_past_its_deadline_is_not_sent_again():
    assert failure_on(504, "deadline_exceeded") is None
    assert failure_on(504) is Failure.ERROR_5XX


@on_loop
@pytest.mark.parametrize("body", [OPENAI, ANTHROPIC])
async def test_an_engine_that_answers_of_deadlines_is_asked_once_and_stays_in_use(body):
    async def late(peer: Peer, request: Received) -> None:
        await peer.send(
            b"HTTP/1.1 504 Gateway Timeout\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )

    async with (
        ScriptedUpstream(late) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for count in range(1, 21):
            answer = await client.ask(chat())
            assert (answer.status, answer.body) == (504, body)
            assert len(upstream.requests) == count
