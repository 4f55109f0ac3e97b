"""Retained blocks: found until their time is over, within limits, and never in the way of the
engine.

Red when: allocate() takes from the retained ones; a block that expired stays out of line; a limit
counts blocks that were dropped; a session gives up what another one retains too; a request that
needs more than is left waits forever.
"""

from __future__ import annotations

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.retention import KVRetention
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request

NUM_BLOCKS = 20


class Engine:
    """A scheduler with the truth, one request after the other."""

    def __init__(self, *, windows=(None,), states=None, **config) -> None:
        self.clock = ManualClock()
        settings = {"max_num_seqs": 4, "max_retained_kv": 0.5, "max_retained_kv_per_tenant": 0.5}
        self.scheduler = Scheduler(
            SchedulerConfig(**{**settings, **config}),
            num_blocks=NUM_BLOCKS * len(windows),
            windows=windows,
            states=states,
            now=self.clock,
        )
        self.loop = Loop(self.scheduler)

    def ask(self, prompt: list[int], ttl_s: float | None = None, **given) -> int:
        """Returns how many of the prompt's tokens were computed."""
        retention = None
        if ttl_s is not None:
            names = ("priority", "session", "owner")
            retention = KVRetention(ttl_s, **{n: given.pop(n) for n in names if n in given})
        before = self.loop.machine.num_computed
        request = make_request(prompt, max_tokens=1, retention=retention, **given)
        self.scheduler.add(request)
        self.loop.run()
        assert self.loop.outputs[request.request_id] == true_output(prompt, 1)
        return self.loop.machine.num_computed - before

    def flood(self) -> None:
        """Prompts of others, which take all memory that is not retained, one after the other."""
        for first in range(100, 130):
            self.ask(make_prompt(64, first=first))

    @property
    def stats(self):
        return self.scheduler.stats()


PROMPT = make_prompt(80)  # five blocks, the last of which is not looked for whole


def test_what_is_not_retained_is_evicted():
    engine = Engine()
    engine.ask(PROMPT)
    engine.flood()
    assert engine.ask(PROMPT) == 80


def test_a_retained_prompt_is_found_until_its_time_is_over():
    engine = Engine()
    engine.ask(PROMPT, ttl_s=60.0)
    assert engine.stats.kv_blocks_retained == 5
    assert engine.stats.kv_blocks_used == 0, "free blocks are not in use"
    engine.clock.advance(59.0)
    engine.flood()
    assert engine.ask(PROMPT) <= 16
    engine.clock.advance(1.5)
    engine.flood()
    assert engine.stats.kv_blocks_retained == 0
    assert engine.ask(PROMPT) == 80


def test_a_longer_time_is_cut():
    engine = Engine(max_retention_s=10.0)
    engine.ask(PROMPT, ttl_s=86400.0)
    engine.clock.advance(10.0)
    assert engine.stats.kv_blocks_retained == 0


def test_each_use_with_the_hint_begins_the_time_anew():
    engine = Engine()
    engine.ask(PROMPT, ttl_s=60.0)
    engine.clock.advance(50.0)
    engine.ask(PROMPT, ttl_s=60.0)
    engine.clock.advance(50.0)
    engine.flood()
    assert engine.ask(PROMPT) <= 16


def test_answers_are_retained_as_far_as_their_blocks_are_full():
    engine = Engine()
    request = make_request(make_prompt(30), max_tokens=40, retention=KVRetention(60.0))
    engine.scheduler.add(request)
    engine.loop.run()
    assert engine.stats.kv_blocks_retained == (30 + 40 - 1) // 16
    turn = [*make_prompt(30), *engine.loop.outputs[request.request_id], 7]
    engine.flood()
    assert engine.ask(turn) == len(turn) - 64


def test_limits_hold_and_the_beginning_is_what_is_retained():
    engine = Engine(max_retained_kv=0.2)
    engine.ask(PROMPT, ttl_s=60.0)
    assert engine.stats.kv_blocks_retained == 4
    assert engine.stats.retention_refused_blocks == 1
    engine.ask(make_prompt(64, first=3), ttl_s=60.0)
    assert engine.stats.kv_blocks_retained == 4
    engine.flood()
    assert engine.ask(PROMPT) == 16


def test_one_tenant_leaves_room_for_others():
    engine = Engine(max_retained_kv_per_tenant=0.2)
    engine.ask(PROMPT, ttl_s=60.0, owner="a")
    engine.ask(make_prompt(64, first=3), ttl_s=60.0, owner="a")
    assert engine.stats.kv_blocks_retained == 4
    engine.ask(make_prompt(64, first=4), ttl_s=60.0, owner="b")
    assert engine.stats.kv_blocks_retained == 8
    retained = engine.scheduler.kv.retained
    assert retained is not None
    assert (retained.of_owner("a"), retained.of_owner("b")) == (4, 4)
    engine.clock.advance(61.0)
    assert engine.stats.kv_blocks_retained == 0
    assert retained.of_owner("a") == retained.of_owner("b") == 0


def test_at_the_limit_a_higher_priority_takes_the_place_of_a_lower_one():
    engine = Engine(max_retained_kv=0.2)
    low, same, high = (make_prompt(64, first=first) for first in (1, 2, 3))
    engine.ask(low, ttl_s=60.0, priority=10)
    engine.ask(same, ttl_s=60.0, priority=10)
    engine.ask(high, ttl_s=60.0, priority=90)
    engine.flood()
    assert engine.ask(high) <= 16
    assert engine.ask(low) == engine.ask(same) == 64
    assert engine.stats.retention_given_up_blocks == 4


def test_a_request_that_needs_all_memory_runs_though_everything_is_retained():
    engine = Engine(max_retained_kv=1.0, max_retained_kv_per_tenant=1.0)
    for first in range(5):
        engine.ask(make_prompt(64, first=first), ttl_s=1e6)
    assert engine.stats.kv_blocks_retained == NUM_BLOCKS
    long = make_prompt(NUM_BLOCKS * 16 - 40, first=200)
    request = make_request(long, max_tokens=38)
    engine.scheduler.add(request)
    engine.loop.run()
    assert engine.loop.outputs[request.request_id] == true_output(long, 38)
    assert engine.stats.preemptions == 0
    assert engine.stats.retention_given_up_blocks == NUM_BLOCKS


def test_what_is_worth_least_is_given_up_first():
    engine = Engine(max_retained_kv=1.0, max_retained_kv_per_tenant=1.0)
    prompts = [make_prompt(64, first=first) for first in range(5)]
    for prompt, priority in zip(prompts, (50, 50, 10, 50, 50), strict=True):
        engine.ask(prompt, ttl_s=100.0 if prompt is prompts[3] else 200.0, priority=priority)
    engine.ask(make_prompt(7 * 16, first=200))
    computed = [engine.ask(prompt) for prompt in prompts[:2] + prompts[4:]]
    assert max(computed) <= 16, "only the lowest priority and the next to end were given up"


def test_of_one_prompt_the_end_is_given_up_first():
    engine = Engine(max_retained_kv=1.0, max_retained_kv_per_tenant=1.0)
    prompt = make_prompt(160)
    engine.ask(prompt, ttl_s=60.0)
    engine.ask(make_prompt(NUM_BLOCKS * 16 - 7 * 16, first=200))
    assert engine.stats.retention_given_up_blocks == 3
    assert engine.ask(prompt) == 160 - 7 * 16


def test_what_is_found_retained_takes_no_other_memory():
    engine = Engine()
    engine.scheduler._admission.ratio = 0.0
    engine.ask(PROMPT, ttl_s=60.0)
    other = make_request(make_prompt(12 * 16, first=200), max_tokens=10)  # leaves two blocks
    engine.scheduler.add(other)
    engine.loop.step()
    again = make_request([*PROMPT, 1, 2, 3], max_tokens=1)
    engine.scheduler.add(again)
    engine.loop.step()
    assert again.request_id in engine.loop.reasons, "it waited for memory that it did not need"
    engine.loop.run()


def test_others_wait_for_memory_rather_than_take_what_is_retained():
    engine = Engine(max_retained_kv=0.5)
    engine.scheduler._admission.ratio = 0.0
    engine.ask(PROMPT, ttl_s=60.0)
    requests = [make_request(make_prompt(100, first=i), max_tokens=60) for i in (200, 300, 400)]
    for request in requests:
        engine.scheduler.add(request)
    engine.loop.run()
    for request in requests:
        prompt = request.prompt_token_ids
        assert engine.loop.outputs[request.request_id] == true_output(prompt, 60)
    assert engine.stats.retention_given_up_blocks == 0
    assert engine.ask(PROMPT) <= 16


def test_a_session_gives_up_what_it_retained_and_no_other_does():
    engine = Engine()
    shared, one = PROMPT[:32], [*PROMPT[:32], *make_prompt(48, first=9)]
    engine.ask(one, ttl_s=60.0, session="one")
    engine.ask([*shared, 1, 2], ttl_s=60.0, session="two")
    assert engine.stats.kv_blocks_retained == 5
    engine.ask([1], ttl_s=0.0, session="one", owner="another tenant")
    assert engine.stats.kv_blocks_retained == 5
    engine.ask([1], ttl_s=0.0, session="one")
    assert engine.stats.kv_blocks_retained == 2, "of the beginning that the other one retains too"
    engine.ask([1], ttl_s=0.0, session="two")
    engine.clock.advance(60.0)
    assert engine.stats.kv_blocks_retained == 0


def test_a_reset_of_the_prefix_cache_ends_all():
    engine = Engine()
    engine.ask(PROMPT, ttl_s=60.0)
    assert engine.scheduler.reset_prefix_cache()
    engine.scheduler.check_invariants()
    assert engine.stats.kv_blocks_retained == 0


def test_blocks_with_wrong_numbers_are_not_retained():
    engine = Engine()
    engine.ask(PROMPT, ttl_s=60.0)
    engine.loop.machine.fails = lambda _: True
    request = make_request([*PROMPT, 1, 2, 3], retention=KVRetention(60.0))
    engine.scheduler.add(request)
    engine.loop.run()
    assert engine.loop.reasons[request.request_id] == "error"
    assert engine.stats.kv_blocks_retained == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_retained_kv": 0.0},
        {"enable_prefix_caching": False},
        {"windows": (None, 24)},
        {"states": StateSnapshots(4, 4, stride=16)},
    ],
)
def test_where_nothing_can_be_retained_the_hint_has_no_effect(settings):
    engine = Engine(**settings)
    request = make_request(PROMPT, max_tokens=1, retention=KVRetention(60.0))
    engine.scheduler.add(request)
    for _ in range(5):
        if "states" not in settings:
            engine.loop.step()
    assert engine.stats.kv_blocks_retained == 0


def test_outdated_entries_do_not_pile_up():
    engine = Engine()
    for _ in range(200):
        engine.ask(PROMPT, ttl_s=60.0)
    retained = engine.scheduler.kv.retained
    assert retained is not None
    assert len(retained._by_end) < 200 and len(retained._by_worth[""]) < 200
    engine.clock.advance(61.0)
    assert engine.stats.kv_blocks_retained == 0
