"""How many tokens are drafted: as many as make tokens come faster, and none where none does."""

from __future__ import annotations

import pytest

from octavo_engine.scheduling.proposals import LONGEST_PROBE, PROBE, DraftGain, ProposedGuesser
from octavo_engine.state.batch import ScheduledBatch
from octavo_engine.state.outputs import StepResult
from tests.fakes.requests import make_sequence


def observed(pass_s: float, *, num_sequences: int = 1, num_tokens: int = 4) -> DraftGain:
    gain = DraftGain(num_tokens)
    sequences = [make_sequence(5) for _ in range(num_sequences)]
    batch = ScheduledBatch(sequences=sequences, counts=[1] * num_sequences)
    result = StepResult([7] * num_sequences, proposed={0: [1, 2]}, draft_passes=2)
    result.draft_s = 2 * pass_s
    gain.observe(batch, result)
    return gain


def best(gain: DraftGain, rate: float, *, row_s: float = 0.0, num_sequences: int = 1) -> int:
    return gain.count(num_sequences=num_sequences, rate=rate, step_s=0.010, row_s=row_s)


def test_as_many_are_drafted_as_pay() -> None:
    # With a tenth of a step for a pass and half of the tokens right: 1.5 / 1.1, 1.75 / 1.2,
    # 1.875 / 1.3, 1.9375 / 1.4.
    assert best(observed(0.001), 0.5) == 2
    assert best(observed(0.001), 0.9) == 4
    assert best(observed(0.001), 0.09) == 0
    assert best(observed(0.001), 0.5, row_s=0.004) == 0, "verification is too dear"
    assert best(observed(0.006), 0.5) == 0


def test_all_are_drafted_while_no_times_are_known() -> None:
    assert best(DraftGain(4), 0.01) == 4
    assert observed(0.001).count(num_sequences=1, rate=0.01, step_s=0.0, row_s=0.0) == 4
    assert best(observed(0.001), 0.01, num_sequences=9) == 4, "known of one sequence only"


def test_what_does_not_pay_is_looked_at_now_and_then() -> None:
    gain = observed(0.1)
    counts = [best(gain, 0.1) for _ in range(LONGEST_PROBE)]
    assert [step for step, count in enumerate(counts, 1) if count] == [
        PROBE, PROBE + 1, 3 * PROBE + 1, 3 * PROBE + 2, 7 * PROBE + 2, 7 * PROBE + 3,
        15 * PROBE + 3, 15 * PROBE + 4,
    ]  # fmt: skip


def test_steps_that_say_nothing_of_a_pass_are_not_counted() -> None:
    gain = DraftGain(4)
    batch = ScheduledBatch(sequences=[make_sequence(5)], counts=[1])
    result = StepResult([7], proposed={0: [1]}, draft_passes=1, draft_tokens=3, draft_s=0.1)
    gain.observe(batch, result)
    assert best(gain, 0.01) == 4, "it had tokens to catch up with"
    batch.counts = [6]
    gain.observe(batch, result)
    assert best(gain, 0.01) == 4, "it was a prompt"


def test_passes_that_were_prepared_as_they_were_launched_are_not_counted() -> None:
    gain = DraftGain(4)
    batch = ScheduledBatch(sequences=[make_sequence(5)], counts=[1])
    result = StepResult([7], proposed={0: [1]}, draft_passes=1, draft_s=0.1, draft_is_usual=False)
    gain.observe(batch, result)
    assert best(gain, 0.01) == 4
    result.draft_is_usual = True
    gain.observe(batch, result)
    assert best(gain, 0.01) == 0


def test_a_proposal_is_for_the_tokens_that_it_followed() -> None:
    guesser = ProposedGuesser()
    guesser.propose(3, [7, 8, 9])
    assert guesser.guess([1, 2, 3]) == [7, 8, 9]
    assert guesser.guess([1, 2, 3, 4]) == []
    assert guesser.compare([1, 2, 3, 7, 5]) == (2, 1)
    assert guesser.guess([1, 2, 3]) == [], "it is compared once"
    assert guesser.rate == pytest.approx((0.5 + 0.5 / 16) * 15 / 16)


def test_new_sequences_begin_with_the_rate_of_those_before() -> None:
    gain = DraftGain(2)
    for _ in range(600):
        sequence = make_sequence(5)
        guesser = sequence.guesser = gain.guesser()
        guesser.propose(4, [sequence.token_ids[4], 400])
        gain.take(ScheduledBatch(sequences=[sequence], samples=[True]), StepResult([1]))
    assert gain.rate > 0.95 and gain.guesser().rate == gain.rate


def trusting(right: dict[int, list[bool]], *, pass_s: float = 0.001) -> DraftGain:
    """Where proposals of some levels of sureness were so often right."""
    gain = observed(pass_s)
    for _ in range(400):
        sequence = make_sequence(5)
        for level, outcomes in right.items():
            for is_right in outcomes:
                guesser = sequence.guesser = gain.guesser()
                token = sequence.token_ids[4] + (not is_right)
                guesser.propose(4, [token], [level])
                gain.take(ScheduledBatch(sequences=[sequence], samples=[True]), StepResult([1]))
    return gain


def test_a_head_that_is_seldom_right_pays_where_it_knows_when() -> None:
    """One in four is right; a pass costs a tenth of a step, a row a third."""
    knowing = trusting({7: [True], 0: [False] * 3})
    assert best(knowing, 0.25, row_s=0.0033) == 4
    assert 0.05 < knowing.least_chance < 0.8
    assert knowing.trust[7] > 0.95 and knowing.trust[0] < 0.05
    unknowing = trusting({3: [True, False, False, False]})
    assert best(unknowing, 0.25, row_s=0.0033) == 0
    assert unknowing.least_chance == 1.0


def test_passes_are_made_as_long_as_what_they_follow_is_likely() -> None:
    """The cheaper a pass, the less likely need it be that it is of use."""
    bars = []
    for pass_s in (0.0001, 0.0005, 0.002):
        gain = trusting({6: [True, True, False], 1: [True, False, False]}, pass_s=pass_s)
        assert best(gain, 0.5, row_s=0.0005) == 4
        bars.append(gain.least_chance)
    assert bars == sorted(bars) and bars[0] < 0.1 < bars[2]


def test_a_proposal_has_the_rates_of_its_levels() -> None:
    gain = trusting({7: [True], 0: [False]})
    guesser = gain.guesser()
    guesser.propose(3, [7, 8, 9], [7, 0, 7])
    assert guesser.rates(2) == [gain.trust[7], gain.trust[0]]
    guesser.propose(3, [7, 8, 9])
    assert guesser.rates(3) == [guesser.rate] * 3, "nobody knows how sure they are"
