"""Replicas follow the demand: exact decisions, then traces of a day in seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo_operator.decide.autoscale import (
    DemandMark,
    LoadSignals,
    ScaleDecision,
    ScaleHistory,
    decide,
)
from octavo_operator.spec.autoscaling import AutoscalingSpec, Behavior, Targets

RULES = AutoscalingSpec(
    max_replicas=10,
    min_replicas=1,
    targets=Targets(queued_tokens=1000),
    up=Behavior(0.0, "100%"),
    down=Behavior(60.0, "50%"),
)
TO_ZERO = replace(RULES, scale_to_zero_after_s=300.0)


def known(**signals) -> LoadSignals:
    return LoadSignals(**{"is_known": True, "is_complete": True, "serving": 2, **signals})


def partly_known(**signals) -> LoadSignals:
    """Some routers answer, others do not: the sums are less than the load."""
    return known(is_complete=False, **signals)


def once(rules: AutoscalingSpec, signals: LoadSignals, current: int) -> ScaleDecision:
    """With windows that have been watched for long."""
    return decide(rules, signals, current, ScaleHistory(since=0.0), 10_000.0)


class TestOneDecision:
    @pytest.mark.parametrize(
        ("signals", "expected"),
        [
            (known(queued_tokens=2000), 2),
            (known(queued_tokens=2150), 2),  # within the tolerance
            (known(queued_tokens=2900), 3),
            (known(queued_tokens=90_000), 4),  # double in a minute at most
            (known(queued_tokens=0), 1),
            (known(), 2),  # no signal, no change
            (LoadSignals(serving=2, queued_tokens=90_000), 2),  # no router, no change
        ],
    )
    def test_by_queued_tokens(self, signals, expected):
        assert once(RULES, signals, 2).replicas == expected

    def test_the_target_that_needs_most_wins_and_is_named(self):
        rules = replace(RULES, targets=Targets(queued_tokens=1000, kv_usage=0.5, ttft_s=1.0))
        decision = once(rules, known(queued_tokens=100, kv_usage=0.75, ttft_p95_s=0.2), 2)
        assert decision.replicas == 3
        assert decision.reason == "ScaledUp"
        assert decision.message == "KV use is 75%; the target is 50%"

    def test_refused_requests_ask_for_more_though_the_queue_is_short(self):
        decision = once(RULES, known(queued_tokens=100, refused_share=0.5), 2)
        assert (decision.replicas, decision.reason) == (3, "ScaledUp")
        assert decision.message == "for 100 requests served, 50 were refused"
        assert once(RULES, known(queued_tokens=2000, refused_share=0.05), 2).replicas == 2
        assert once(RULES, partly_known(refused_share=0.5), 2).replicas == 3

    def test_slow_first_tokens_ask_for_more(self):
        rules = replace(RULES, targets=Targets(ttft_s=1.0))
        assert once(rules, known(ttft_p95_s=1.9), 2).replicas == 4

    def test_partial_knowledge_never_asks_for_fewer(self):
        decision = once(RULES, partly_known(queued_tokens=0), 2)
        assert (decision.replicas, decision.reason) == (2, "WithinTarget")
        assert decision.message == "Not every router answers; the number of replicas is not lowered"
        assert once(RULES, partly_known(queued_tokens=2900), 2).replicas == 3

    def test_bounds_hold_at_once_even_without_signals(self):
        assert once(replace(RULES, min_replicas=3), LoadSignals(), 2).replicas == 3
        assert once(replace(RULES, max_replicas=1), LoadSignals(), 2).replicas == 1


class TestWindows:
    def run(self, rules, trace, current=2, every_s=5.0):
        """Replicas over time; `trace` says the queued tokens at a time."""
        memory, history = ScaleHistory(), []
        for tick in range(len(trace)):
            signals = known(queued_tokens=trace[tick], serving=current)
            decision = decide(rules, signals, current, memory, tick * every_s)
            memory, current = decision.history, decision.replicas
            history.append(current)
        return history

    def test_a_dip_shorter_than_the_window_changes_nothing(self):
        history = self.run(RULES, [2000] * 20 + [0] * 6 + [2000] * 20)
        assert set(history) == {2}

    def test_a_fall_that_lasts_goes_down_by_the_steps_allowed(self):
        history = self.run(RULES, [8000] * 40 + [0] * 60, current=8)
        assert history[39] == 8
        first = history.index(4)
        assert 40 + 11 <= first <= 40 + 13  # after the window of 60 s
        assert history[first + 11] == 4  # half of 8 in one minute, no more
        assert history[-1] == 1

    def test_a_spike_shorter_than_the_up_window_changes_nothing(self):
        rules = replace(RULES, up=Behavior(30.0, "100%"))
        history = self.run(rules, [2000] * 20 + [9000] * 3 + [2000] * 20)
        assert set(history) == {2}

    def test_a_rise_that_lasts_doubles_each_minute(self):
        history = self.run(RULES, [90_000] * 40)
        assert history[0] == 4
        assert history[11] == 4
        assert history[12] == 8
        assert history[23] == 8
        assert history[24] == 10

    def test_noise_around_the_target_moves_nothing(self):
        trace = [2000 + (-1) ** i * 150 for i in range(200)]
        assert set(self.run(RULES, trace)) == {2}

    def test_after_a_restart_nothing_goes_down_before_a_whole_window(self):
        memory = ScaleHistory()
        decision = decide(RULES, known(queued_tokens=0), 5, memory, 1000.0)
        assert decision.replicas == 5

    def test_the_down_window_begins_anew_after_partial_knowledge(self):
        memory = ScaleHistory(since=0.0)
        quiet = {"queued_tokens": 0}
        for now, signals, replicas in (
            (100.0, partly_known(**quiet), 4),
            (130.0, partly_known(**quiet), 4),
            (165.0, known(**quiet), 4),  # a quiet minute, half of it seen by some routers only
            (191.0, known(**quiet), 2),
        ):
            decision = decide(RULES, signals, 4, memory, now)
            assert decision.replicas == replicas, now
            memory = decision.history

    def test_memory_is_bounded(self):
        memory, now = ScaleHistory(), 0.0
        for _ in range(5000):
            memory = decide(RULES, known(queued_tokens=2000), 2, memory, now).history
            now += 1.0
        assert len(memory.proposals) <= 62
        assert memory.moves == ()


class TestZero:
    def test_after_the_idle_time(self):
        busy = known(queued_tokens=0, in_flight=0, held=0, last_request_age_s=299.0)
        assert once(TO_ZERO, busy, 1).replicas == 1
        idle = replace(busy, last_request_age_s=300.0)
        decision = once(TO_ZERO, idle, 1)
        assert (decision.replicas, decision.reason) == (0, "ScaledToZero")
        assert decision.message == "the last request was 300 s ago"

    @pytest.mark.parametrize(
        "signals",
        [
            known(last_request_age_s=900.0, in_flight=1),
            known(last_request_age_s=900.0, held=1),
            known(last_request_age_s=900.0, queued_tokens=5),
            known(last_request_age_s=900.0, running=1),  # an engine has work that no router sent
            partly_known(last_request_age_s=900.0),  # another router may have sent some
            known(last_request_age_s=None),  # never a request: perhaps routers just started
            known(last_request_age_s=900.0, serving=0),  # still waking
            LoadSignals(serving=1, last_request_age_s=900.0),  # nobody asked
        ],
    )
    def test_not_while_somebody_may_be_served(self, signals):
        assert once(TO_ZERO, signals, 1).replicas >= 1

    def test_after_the_idle_time_where_no_request_ever_came(self):
        memory, quiet = ScaleHistory(), known(queued_tokens=0, in_flight=0, held=0)
        for now, signals, replicas in (
            (0.0, replace(quiet, serving=0), 1),  # its weights are read
            (500.0, quiet, 1),  # from here on it serves
            (799.0, quiet, 1),
            (800.0, quiet, 0),
        ):
            decision = decide(TO_ZERO, signals, 1, memory, now)
            assert decision.replicas == replicas, now
            memory = decision.history
        assert decision.reason == "ScaledToZero"
        assert decision.message == "no request has arrived in 300 s of serving"

    @pytest.mark.parametrize(
        "between",
        [
            known(last_request_age_s=1.0),
            LoadSignals(serving=2),
            known(serving=0),
            known(running=1),
            partly_known(),
        ],
    )
    def test_routers_that_start_anew_must_see_no_request_for_the_whole_time(self, between):
        memory = ScaleHistory()
        for now, signals in ((0.0, known()), (290.0, between), (310.0, known())):
            decision = decide(TO_ZERO, signals, 1, memory, now)
            memory = decision.history
            assert decision.replicas >= 1, now

    def test_a_held_request_wakes_it(self):
        decision = once(replace(TO_ZERO, min_replicas=2), known(held=200, serving=0), 0)
        assert (decision.replicas, decision.reason) == (2, "Woken")

    @pytest.mark.parametrize(
        ("targets", "signals", "replicas"),
        [
            (Targets(queued_tokens=1000), {"queued_tokens": 900}, 1),
            (Targets(queued_tokens=1000), {"queued_tokens": 1050}, 1),  # within the tolerance
            (Targets(queued_tokens=1000), {"queued_tokens": 3200}, 4),
            (Targets(queued_tokens=1000), {"queued_tokens": 90_000}, 10),  # maxReplicas
            (Targets(in_flight=32), {"queued_tokens": 90_000, "in_flight": 0}, 7),  # 200 held
            (Targets(queued_tokens=1000, in_flight=32), {"queued_tokens": 0, "in_flight": 0}, 7),
            (Targets(kv_usage=0.8, ttft_s=1.0), {"queued_tokens": 90_000}, 1),  # nothing tells
        ],
    )
    def test_it_wakes_as_large_as_those_who_wait_need_it(self, targets, signals, replicas):
        rules = replace(TO_ZERO, targets=targets)
        decision = once(rules, known(held=200, serving=0, **signals), 0)
        assert (decision.replicas, decision.reason) == (replicas, "Woken")

    def test_the_message_says_what_made_it_so_large(self):
        decision = once(TO_ZERO, known(held=9, serving=0, queued_tokens=3200), 0)
        assert decision.message == (
            "waiting requests: 9, 3200 queued tokens; the target is 1000 per replica"
        )
        decision = once(TO_ZERO, known(held=9, serving=0, queued_tokens=32), 0)
        assert decision.message == "waiting requests: 9"

    @pytest.mark.parametrize(("step", "replicas"), [("100%", 10), ("10%", 10), (3, 3), (1, 2)])
    def test_a_step_in_pods_binds_it_and_a_share_of_none_does_not(self, step, replicas):
        rules = replace(TO_ZERO, min_replicas=2, up=Behavior(0.0, step))
        decision = once(rules, known(held=9, serving=0, queued_tokens=90_000), 0)
        assert decision.replicas == replicas

    def test_who_comes_just_after_it_woke_needs_not_wait_out_the_minute(self):
        woken = once(TO_ZERO, known(held=1, serving=0, queued_tokens=100), 0)
        assert woken.replicas == 1
        later = decide(
            TO_ZERO, known(held=200, serving=0, queued_tokens=90_000), 1, woken.history, 10_005.0
        )
        assert (later.replicas, later.reason) == (2, "ScaledUp")

    def test_a_request_that_gave_up_wakes_it_too(self):
        assert once(TO_ZERO, known(held=0, last_request_age_s=3.0), 0).replicas == 1
        assert once(TO_ZERO, known(held=0, last_request_age_s=61.0), 0).replicas == 0

    def test_zero_is_left_when_it_is_no_longer_allowed(self):
        assert once(RULES, LoadSignals(), 0).replicas == 1

    def test_two_hundred_waiting_clients_are_one_scale_event(self):
        memory, current, moves = ScaleHistory(), 0, 0
        for tick in range(60):
            signals = known(held=200, serving=0, queued_tokens=0)
            decision = decide(TO_ZERO, signals, current, memory, float(tick))
            moves += decision.replicas != current
            memory, current = decision.history, decision.replicas
        assert (current, moves) == (1, 1)


def test_a_minute_counts_what_was_moved_in_it():
    memory = ScaleHistory(moves=(DemandMark(9_990.0, 2),), since=0.0)
    assert decide(RULES, known(queued_tokens=90_000), 4, memory, 10_000.0).replicas == 4
    assert decide(RULES, known(queued_tokens=90_000), 4, memory, 10_051.0).replicas == 8
