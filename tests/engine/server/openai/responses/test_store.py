"""The store keeps what it may and no more: count, bytes, age. Time is a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.openai.responses.shapes import ResponseObject
from octavo_engine.server.openai.responses.store import ResponseStore, StoredTurn
from octavo_engine.server.openai.schemas import ChatMessageBody

ME, YOU = b"me", b"you"
WHOLE: dict[str, Any] = {
    "object": "response", "created_at": 0, "completed_at": None, "status": "completed",
    "background": False, "error": None, "incomplete_details": None, "instructions": None,
    "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "model": "m", "output": [],
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
    "service_tier": "default", "store": True, "temperature": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "text": {"format": {}, "verbosity": "medium"}, "tool_choice": "auto", "tools": [],
    "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "usage": None, "user": None,
}  # fmt: skip


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Kept:
    """A store with its clock."""

    limits: RequestLimits
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.store = ResponseStore(self.limits, self.clock)

    def put(self, id_: str, *, status: str = "completed", text: str = "") -> bool:
        response = msgspec.convert(WHOLE | {"id": id_, "status": status}, ResponseObject)
        return self.store.put(
            StoredTurn(response, ME, [], [ChatMessageBody(role="user", content=text)])
        )

    @property
    def ids(self) -> list[str]:
        return [id_ for id_ in "abcdefgh" if self.store.get(id_, ME) is not None]


def test_the_oldest_go_first():
    kept = Kept(RequestLimits(max_stored_responses=3))
    for id_ in "abc":
        assert kept.put(id_)
    kept.put("a")  # it has changed: it is the youngest now
    kept.put("d")
    assert kept.ids == ["a", "c", "d"]


def test_bytes_are_counted_and_given_back():
    kept = Kept(RequestLimits(max_stored_response_bytes=10_000))
    kept.put("a")
    one = kept.store.num_bytes
    kept.put("b", text="x" * 1000)
    assert kept.store.num_bytes == 2 * one + 1000
    kept.put("b")
    assert kept.store.num_bytes == 2 * one
    kept.put("c", text="x" * (10_001 - 2 * one))  # and itself: more than there is room for
    assert kept.ids == ["c"]
    assert not kept.put("c", text="x" * 10_000)
    assert (kept.ids, kept.store.num_bytes) == ([], 0)


def test_they_expire():
    kept = Kept(RequestLimits(response_ttl_s=10))
    kept.put("a")
    kept.clock.now = 5
    kept.put("b")
    kept.clock.now = 10
    assert kept.ids == ["b"]
    assert len(kept.store) == 1


def test_what_runs_stays():
    kept = Kept(RequestLimits(max_stored_responses=1, response_ttl_s=10))
    kept.put("a", status="in_progress")
    kept.put("b", status="queued")
    kept.put("c")
    kept.clock.now = 20
    assert kept.ids == ["a", "b"]
    kept.put("a")
    assert kept.ids == ["b"]  # of two that are one too many, the one that does not run went


def test_others_see_nothing():
    kept = Kept(RequestLimits())
    kept.put("a")
    assert kept.store.get("a", YOU) is None
    assert kept.store.get("a", ME) is not None
    kept.store.drop("a")
    kept.store.drop("a")
    assert (len(kept.store), kept.store.num_bytes) == (0, 0)
