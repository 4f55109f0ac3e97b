"""The runner on a backend whose truth is known: only the right arrays give the right tokens."""

from __future__ import annotations

import random
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine.sampling.processors import GROUP, ProcessorRegistry
from octavo_engine.state.batch import BlockCopy, ScheduledBatch
from tests.engine.model_runner.building import HandScheduler, make_request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.state.sequence import Sequence


def decode(by_hand: HandScheduler, sequence: Sequence, num_tokens: int) -> list[int]:
    by_hand.step((sequence, sequence.num_tokens - sequence.num_computed_tokens))
    for _ in range(num_tokens - 1):
        by_hand.step((sequence, 1))
    return by_hand.outputs(sequence)


def test_a_prompt_is_continued_with_the_truth() -> None:
    by_hand = HandScheduler()
    sequence = by_hand.admit(make_request([3, 1, 4], temperature=0.0))
    assert decode(by_hand, sequence, 40) == by_hand.backend.continuation([3, 1, 4], 40)


@pytest.mark.parametrize("seed", range(6))
def test_any_batch_and_any_chunks_give_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    by_hand = HandScheduler()
    running: list[Sequence] = []
    for _ in range(120):
        if running and rng.random() < 0.05:
            by_hand.release(running.pop(rng.randrange(len(running))))
        if by_hand.free_rows and rng.random() < 0.3:
            prompt = [rng.randrange(512) for _ in range(rng.randint(1, 40))]
            running.append(by_hand.admit(make_request(prompt)))
        chosen = rng.sample(running, rng.randint(0, len(running)))
        chosen += [s for s in by_hand.admitted if s not in chosen]
        if chosen:
            behind = [(s, s.num_tokens - s.num_computed_tokens) for s in chosen]
            by_hand.step(*[(s, rng.randint(1, num_tokens)) for s, num_tokens in behind])
        for sequence in running:
            prompt = sequence.request.prompt_token_ids
            expected = by_hand.backend.continuation(prompt, sequence.num_output_tokens)
            assert by_hand.outputs(sequence) == expected
    assert by_hand.backend.num_steps > 60


def test_a_preempted_sequence_comes_back_with_all_its_tokens() -> None:
    by_hand = HandScheduler()
    sequence = by_hand.admit(make_request([9, 9], temperature=0.0))
    first = decode(by_hand, sequence, 20)
    by_hand.release(sequence)
    other = by_hand.admit(make_request([8] * 30))
    decode(by_hand, other, 3)
    again = by_hand.admit(make_request([9, 9], outputs=first, temperature=0.0))
    assert decode(by_hand, again, 5) == by_hand.backend.continuation([9, 9], 25)


def test_a_copied_block_stands_for_the_tokens_it_holds() -> None:
    by_hand = HandScheduler()
    prompt = list(range(40, 60))
    first = by_hand.admit(make_request(prompt, temperature=0.0))
    by_hand.step((first, 20))
    twin = by_hand.admit(make_request(prompt, temperature=0.0), num_cached=19)
    by_hand.free_blocks.append(twin.block_table[0])
    twin.block_table[0] = first.block_table[0]  # full: shared
    copy = BlockCopy(first.block_table[1], twin.block_table[1], 3)
    by_hand.admitted = []
    result = by_hand.runner.execute(
        ScheduledBatch(
            sequences=[first, twin],
            rows=[first.row, twin.row],
            starts=[20, 19],
            counts=[1, 1],
            num_logits=[1, 1],
            samples=[True, True],
            admitted=[twin],
            copies=[copy],
        )
    )
    truth = by_hand.backend.continuation(prompt, 2)
    assert result.tokens == [truth[1], truth[0]]


def test_a_missing_copy_does_not_go_unnoticed() -> None:
    by_hand = HandScheduler()
    sequence = by_hand.admit(make_request(list(range(20))), num_cached=19)
    assert by_hand.step((sequence, 1)).failed == [0]


def test_sequences_within_their_prompt_sample_nothing() -> None:
    by_hand = HandScheduler()
    one, two = by_hand.admit(make_request([1] * 9)), by_hand.admit(make_request([2] * 9))
    assert by_hand.step((one, 5), (two, 9)).tokens == [-1, by_hand.backend.truth([2] * 9)]
    assert by_hand.step((two, 1), (one, 3)).tokens[1] == -1


def test_not_a_number_fails_its_own_sequence_only() -> None:
    by_hand = HandScheduler()
    healthy, sick = by_hand.admit(make_request([1, 2])), by_hand.admit(make_request([3, 4]))
    by_hand.backend.fail_after([3, 4])
    result = by_hand.step((healthy, 2), (sick, 2))
    assert result.failed == [1]
    assert result.tokens == [by_hand.backend.truth([1, 2]), -1]
    later = by_hand.admit(make_request([5, 6], logprobs=1))
    by_hand.backend.fail_after([5, 6])
    result = by_hand.step((healthy, 1), (later, 2))
    assert result.failed == [1] and result.logprobs == {} and result.forbidden == []
    truth = by_hand.backend.continuation([1, 2], 3)
    by_hand.backend.fail_after([1, 2, *truth[:2]])
    assert by_hand.step((healthy, 1)).failed == [0]


def test_a_prompt_that_cannot_be_scored_yields_no_token_either() -> None:
    by_hand = HandScheduler()
    by_hand.backend.fail_after([1, 2])
    sequence = by_hand.admit(make_request([1, 2, 3], prompt_logprobs=0))
    result = by_hand.step((sequence, 3), num_logits=3)
    assert (result.failed, result.tokens, result.prompt_logprobs) == ([0], [-1], {})


def test_log_probabilities_go_to_those_who_asked() -> None:
    by_hand = HandScheduler(vocab=100)
    plain = by_hand.admit(make_request([1, 2]))
    two = by_hand.admit(make_request([3, 4, 5], logprobs=2))
    none = by_hand.admit(make_request([6], logprobs=0))
    result = by_hand.step((plain, 2), (two, 3), (none, 1))
    assert sorted(result.logprobs) == [1, 2] and result.prompt_logprobs == {}
    logits = by_hand.backend.logits([3, 4, 5]).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum())
    (found,) = result.logprobs[1]
    order = np.argsort(-logits)
    assert found.token_id == by_hand.backend.truth([3, 4, 5]) == found.top_ids[0]
    assert found.rank == 1 and found.top_ids == order[:2].tolist()
    assert found.top_logprobs == pytest.approx(exact[order[:2]], abs=1e-5)
    assert found.logprob == pytest.approx(exact.max(), abs=1e-5)
    assert result.logprobs[2][0].top_ids == []
    assert sorted(by_hand.step((plain, 1), (two, 1)).logprobs) == [1]


def test_prompt_log_probabilities_add_up_over_chunks() -> None:
    by_hand = HandScheduler(vocab=100)
    prompt = [5, 17, 3, 99, 4, 28, 7]
    sequence = by_hand.admit(make_request(prompt, prompt_logprobs=1))
    scored = []
    for count in (3, 1, 3):
        result = by_hand.step((sequence, count), num_logits=count)
        assert result.logprobs == {}
        scored += result.prompt_logprobs[0]
    assert [one.token_id for one in scored] == prompt[1:]
    for length, one in enumerate(scored, start=1):
        logits = by_hand.backend.logits(prompt[:length]).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert one.logprob == pytest.approx(exact[prompt[length]], abs=1e-5)
        assert one.rank == 1 + int((logits > logits[prompt[length]]).sum())
        assert one.top_ids == [int(logits.argmax())]
    assert by_hand.outputs(sequence) == [by_hand.backend.truth(prompt)]


def test_early_stops_and_bad_words_are_banned_while_they_must_be() -> None:
    by_hand = HandScheduler()
    truth = by_hand.backend.continuation([1, 2], 3)
    late = by_hand.admit(
        make_request([1, 2], min_tokens=2, eos=(truth[0],), stop_token_ids=(7,), temperature=0.0)
    )
    bad = by_hand.admit(
        make_request([1, 2], bad_words_token_ids=(tuple(truth[:2]),), temperature=0.0)
    )
    free = by_hand.admit(make_request([1, 2], temperature=0.0))
    tokens = [by_hand.step((late, 2), (bad, 2), (free, 2)).tokens]
    tokens.append(by_hand.step((late, 1), (bad, 1), (free, 1)).tokens)
    assert [t[2] for t in tokens] == truth[:2]
    assert tokens[0][0] != truth[0] and tokens[0][1] == truth[0]
    assert tokens[1][1] != truth[1]
    # Nothing is banned any more: the truth of what stands there.
    for sequence in (late, bad):
        known = list(sequence.token_ids)
        assert by_hand.step((sequence, 1)).tokens == [by_hand.backend.truth(known)]


def test_allowed_ids_and_bias_reach_only_their_row() -> None:
    by_hand = HandScheduler()
    truth = by_hand.backend.truth([1, 2])
    only = by_hand.admit(make_request([1, 2], allowed_token_ids=(11, 12), temperature=0.0))
    free = by_hand.admit(make_request([1, 2], temperature=0.0))
    pushed = by_hand.admit(make_request([1, 2], logit_bias={33: 100.0}, temperature=0.0))
    tokens = by_hand.step((only, 2), (free, 2), (pushed, 2)).tokens
    assert tokens[0] in (11, 12) and tokens[1:] == [truth, 33]


def test_nothing_allowed_fails_the_request_and_emits_no_token() -> None:
    by_hand = HandScheduler()
    request = make_request([1, 2], allowed_token_ids=(3,), logit_bias={3: float("-inf")})
    result = by_hand.step((by_hand.admit(request), 2))
    assert result.failed == result.forbidden == [0] and result.tokens == [-1]


def push_42(token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
    assert token_ids.tolist()[:2] == [1, 2]
    logits[42] += 1000


def broken(token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
    raise RuntimeError("this plug-in does not work")


def registry() -> ProcessorRegistry:
    return ProcessorRegistry(
        EntryPoint(name, f"{__name__}:{name}", GROUP) for name in ("push_42", "broken")
    )


def test_a_custom_processor_sees_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.name])
    by_hand = HandScheduler(processors=registry())
    pushed = by_hand.admit(make_request([1, 2], logits_processors=("push_42",)))
    free = by_hand.admit(make_request([1, 2]))
    assert by_hand.step((pushed, 2), (free, 2)).tokens == [42, by_hand.backend.truth([1, 2])]
    assert by_hand.step((free, 1), (pushed, 1)).tokens[1] == 42


@pytest.mark.parametrize("name", ["broken", "unknown"])
def test_a_processor_that_fails_fails_its_request_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.name])
    by_hand = HandScheduler(processors=registry())
    sick = by_hand.admit(make_request([1, 2], logits_processors=(name,)))
    free = by_hand.admit(make_request([1, 2]))
    result = by_hand.step((sick, 2), (free, 2))
    assert result.failed == [0] and result.tokens == [-1, by_hand.backend.truth([1, 2])]


def after_three(token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
    logits[int(token_ids[-1]) + 1 if len(token_ids) > 3 else 42] += 1000


def test_drafts_are_in_the_history_of_those_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor sees each position's own tokens, and so do a ban and the end's minimum."""
    monkeypatch.setattr(EntryPoint, "load", lambda point: globals()[point.name])
    processors = ProcessorRegistry([EntryPoint("after_three", f"{__name__}:after_three", GROUP)])
    by_hand = HandScheduler(processors=processors)
    sequence = by_hand.admit(make_request([1, 2], logits_processors=("after_three",)))
    other = by_hand.admit(
        make_request([7, 8], temperature=0.0, bad_words_token_ids=((44, 45),), logprobs=0,
                     logit_bias={44: 100.0, 45: 200.0})
    )  # fmt: skip
    free = by_hand.admit(make_request([5, 6]))
    assert by_hand.step((sequence, 2), (other, 2)).tokens == [42, 45]
    result = by_hand.step(
        (sequence, 1), (other, 1), (free, 2), drafts={0: [42, 43, 44, 9], 1: [45, 45, 44, 44]}
    )
    assert result.accepted == {0: [42, 43, 44], 1: [45, 45]}
    assert result.tokens == [45, 45, by_hand.backend.truth([5, 6])]
    assert [entry.token_id for entry in result.logprobs[1]] == [45, 45, 45]


def test_a_row_that_fails_ends_what_is_accepted_before_it() -> None:
    for bad_at, accepted in ((0, []), (1, []), (2, [0]), (4, [0, 1, 2])):
        by_hand = HandScheduler()
        sequence = by_hand.admit(make_request([1, 2]))
        first = by_hand.step((sequence, 2)).tokens[0]
        truth = by_hand.backend.continuation([1, 2, first], 4)
        by_hand.backend.fail_after([1, 2, first, *truth[:bad_at]])
        result = by_hand.step((sequence, 1), drafts={0: truth})
        assert result.accepted == {0: [truth[place] for place in accepted]}
        assert result.failed == ([0] if bad_at == 0 else [])
        assert result.tokens == [-1 if bad_at == 0 else truth[len(accepted)]]
