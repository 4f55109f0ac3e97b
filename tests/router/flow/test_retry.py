"""May it be tried again? One row a rule."""

import pytest

from octavo_router.config.settings import RetryConfig
from octavo_router.flow.retry import Action, Attempt, Failure, RetryVerdict, decide

CONFIG = RetryConfig()  # 3 attempts, 1 other after a refusal, 2 resumes
RETRY, RESUME, GIVE_UP = Action.RETRY, Action.RESUME, Action.GIVE_UP

TABLE = [
    # what happened, what is known -> verdict, word
    ("refused", Attempt(Failure.CONNECT), RETRY, "connect"),
    ("refused twice", Attempt(Failure.CONNECT, attempts=2), RETRY, "connect"),
    ("refused three times", Attempt(Failure.CONNECT, attempts=3), GIVE_UP, "attempts_exhausted"),
    ("reset as we began", Attempt(Failure.RESET_BEFORE_SENT), RETRY, "reset_before_sent"),
    ("503", Attempt(Failure.NOT_ACCEPTED, refusals=1), RETRY, "not_accepted"),
    ("503 twice", Attempt(Failure.NOT_ACCEPTED, refusals=2), GIVE_UP, "refused_elsewhere"),
    ("given back", Attempt(Failure.GIVEN_BACK), RETRY, "given_back"),
    ("given back twice", Attempt(Failure.GIVEN_BACK, attempts=2), RETRY, "given_back"),
    ("given back three times", Attempt(Failure.GIVEN_BACK, attempts=3),
     GIVE_UP, "attempts_exhausted"),
    ("no headers", Attempt(Failure.NO_HEADERS), GIVE_UP, "may_have_run"),
    ("no headers, resumable", Attempt(Failure.NO_HEADERS, is_resumable=True), RESUME, "no_headers"),
    ("lost before the answer", Attempt(Failure.LOST), GIVE_UP, "may_have_run"),
    ("lost before, resumable", Attempt(Failure.LOST, is_resumable=True), RESUME, "lost"),
    ("lost within", Attempt(Failure.LOST, was_answered=True), GIVE_UP, "may_have_run"),
    ("lost within, resumable", Attempt(Failure.LOST, is_resumable=True, was_answered=True),
     RESUME, "lost"),
    ("stalled", Attempt(Failure.STALLED, was_answered=True, is_resumable=True), RESUME, "stalled"),
    ("500", Attempt(Failure.ERROR_5XX), GIVE_UP, "may_have_run"),
    ("500, resumable", Attempt(Failure.ERROR_5XX, is_resumable=True), RESUME, "error_5xx"),
    ("500 elsewhere too", Attempt(Failure.ERROR_5XX, is_resumable=True, resumes=1),
     GIVE_UP, "failed_elsewhere"),
    ("garbage", Attempt(Failure.BAD_ANSWER), GIVE_UP, "may_have_run"),
    ("400", Attempt(Failure.REJECTED), GIVE_UP, "rejected"),
    ("400 to a resume", Attempt(Failure.REJECTED, is_resumable=True), GIVE_UP, "rejected"),
    ("its deadline", Attempt(Failure.DEADLINE, is_resumable=True), GIVE_UP, "deadline"),
    ("no time left", Attempt(Failure.CONNECT, time_left_s=0.0), GIVE_UP, "deadline"),
    ("client gone", Attempt(Failure.CLIENT_GONE, is_resumable=True), GIVE_UP, "client_gone"),
    ("third resume", Attempt(Failure.LOST, is_resumable=True, resumes=2),
     GIVE_UP, "resumes_exhausted"),
    ("a killer", Attempt(Failure.LOST, is_resumable=True, is_suspect=True), GIVE_UP, "quarantined"),
    (
        "a resume finds no engine",
        Attempt(Failure.CONNECT, was_answered=True, is_resumable=True, resumes=2),
        RESUME,
        "connect",
    ),
    (
        "a resume finds no engine, again and again",
        Attempt(Failure.CONNECT, attempts=3, was_answered=True, is_resumable=True),
        GIVE_UP,
        "attempts_exhausted",
    ),
    (
        "an answer began that cannot be continued",
        Attempt(Failure.CONNECT, was_answered=True),
        GIVE_UP,
        "may_have_run",
    ),
    (
        "a resume is refused",
        Attempt(Failure.NOT_ACCEPTED, refusals=1, was_answered=True, is_resumable=True),
        RESUME,
        "not_accepted",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("attempt", "action", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_table(attempt, action, reason):
    verdict = decide(attempt, CONFIG)
    assert (verdict.action, verdict.reason) == (action, reason)


@pytest.mark.parametrize(
    ("retry_after_s", "time_left_s", "delay_s"),
    [(2.0, 30.0, 2.0), (40.0, 30.0, None), (None, 30.0, None), (-1.0, 30.0, 0.0)],
)
def test_the_same_endpoint_is_asked_again_only_after_the_time_it_named(
    retry_after_s, time_left_s, delay_s
):
    attempt = Attempt(
        Failure.NOT_ACCEPTED, refusals=1, retry_after_s=retry_after_s, time_left_s=time_left_s
    )
    assert decide(attempt, CONFIG) == RetryVerdict(Action.RETRY, "not_accepted", delay_s)


@pytest.mark.parametrize("failure", list(Failure))
def test_nothing_that_may_have_run_is_ever_sent_again_as_new(failure):
    not_run = (
        Failure.CONNECT, Failure.NO_SOCKET, Failure.RESET_BEFORE_SENT, Failure.NOT_ACCEPTED,
        Failure.GIVEN_BACK,  # by the engine itself, which has said that nothing came of it
    )  # fmt: skip
    for is_resumable in (False, True):
        for was_answered in (False, True):
            attempt = Attempt(failure, is_resumable=is_resumable, was_answered=was_answered)
            verdict = decide(attempt, CONFIG)
            if verdict.action is Action.RETRY:
                assert failure in not_run
                assert not was_answered
            if verdict.action is Action.RESUME:
                assert is_resumable


def test_no_retries_means_none():
    config = RetryConfig(max_attempts=1, max_refusals=0, max_resumes=0)
    for failure in Failure:
        assert decide(Attempt(failure, refusals=1, is_resumable=True), config).action is GIVE_UP
