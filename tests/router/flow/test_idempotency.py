"""What becomes of an idempotency key: it runs once, is given again, and is forgotten in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_router.config.settings import FlowConfig
from octavo_router.errors import Rejected
from octavo_router.flow import idempotency
from octavo_router.flow.idempotency import IdempotencyKeys, StoredResponse
from tests.fakes.clock import ManualClock

ANSWER = StoredResponse(200, "application/json", b"{}", "m")


def refused(keys: IdempotencyKeys, key: str = "k", body: bytes = b"body") -> tuple[int, str]:
    with pytest.raises(Rejected) as caught:
        keys.find("t", "/p", key, body)
    return caught.value.status, caught.value.code


def make(**flow: float) -> tuple[IdempotencyKeys, ManualClock]:
    clock = ManualClock()
    config = FlowConfig(**flow)  # type: ignore[arg-type]
    return IdempotencyKeys(config, clock), clock


def test_it_runs_once_and_is_given_again_until_it_is_too_old():
    keys, clock = make(idempotency_s=600.0)
    assert keys.find("t", "/p", "k", b"body") is None
    run = keys.begin("t", "/p", "k", b"body")
    assert refused(keys) == (409, "idempotency_in_progress")
    assert refused(keys, body=b"other") == (422, "idempotency_key_reused")
    keys.keep(run, ANSWER)
    assert keys.find("t", "/p", "k", b"body") == ANSWER
    assert refused(keys, body=b"other") == (422, "idempotency_key_reused")
    clock.advance(599.0)
    assert keys.find("t", "/p", "k", b"body") == ANSWER
    clock.advance(1.0)
    assert keys.find("t", "/p", "k", b"body") is None
    assert (len(keys), keys.num_bytes) == (0, 0)


def test_what_came_to_nothing_may_be_tried_again():
    keys, _ = make()
    run = keys.begin("t", "/p", "k", b"body")
    keys.forget(run)
    assert keys.find("t", "/p", "k", b"other") is None
    keys.keep(run, ANSWER)  # too late: it was given up
    assert len(keys) == 0


@pytest.mark.parametrize("other", [("u", "/p", "k"), ("t", "/q", "k"), ("t", "/p", "l")])
def test_a_key_is_its_tenants_and_its_paths_own(other: tuple[str, str, str]):
    keys, _ = make()
    keys.keep(keys.begin("t", "/p", "k", b"body"), ANSWER)
    assert keys.find(*other, b"body") is None


def test_an_answer_that_is_too_large_is_not_kept_but_neither_run_again():
    keys, _ = make()
    large = ANSWER._replace(body=bytes(idempotency.MAX_ANSWER_BYTES + 1))
    keys.keep(keys.begin("t", "/p", "k", b"body"), large)
    assert refused(keys) == (409, "idempotency_answer_gone")
    assert keys.num_bytes == 0


def test_answers_make_room_for_newer_ones():
    keys, _ = make(idempotency_bytes=250)
    for name in "abc":
        keys.keep(keys.begin("t", "/p", name, b"body"), ANSWER._replace(body=bytes(100)))
    assert refused(keys, "a") == (409, "idempotency_answer_gone")
    assert keys.find("t", "/p", "c", b"body") is not None
    assert keys.num_bytes == 200


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "keep", "forget", "wait"]), st.integers(0, 9), st.integers(0, 9)
        ),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_nothing_runs_twice_and_nothing_is_kept_beyond_its_bounds(steps):
    """Against the obvious one: every run since its end is younger than the limit, or it is none."""
    keys, clock = make(idempotency_s=50.0, idempotency_bytes=300)
    running: dict[str, idempotency.Run] = {}
    ended: dict[str, float] = {}
    for step, number, size in steps:
        key = str(number % 4)
        now = clock()
        is_known = key in ended and now - ended[key] < 50.0
        if step == "wait":
            clock.advance(10.0 * number)
        elif step == "ask":
            try:
                kept = keys.find("t", "/p", key, b"body")
            except Rejected as error:
                assert key in running or is_known, error.code
            else:
                assert key not in running
                assert (kept is not None) == is_known or kept is None
                if kept is None:
                    assert not is_known
                    running[key] = keys.begin("t", "/p", key, b"body")
        elif key in running:
            run = running.pop(key)
            if step == "forget":
                keys.forget(run)
            else:
                keys.keep(run, ANSWER._replace(body=bytes(40 * size)))
                ended[key] = now
        assert keys.num_bytes <= 300
        assert len(keys) <= len(running) + len(ended)
