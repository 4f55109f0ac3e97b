"""How sequences that have to catch up share the tokens of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from octavo_engine.scheduling.media import MediaPlanner
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.sequence import Sequence

MIN_CHUNK = 16  # prefill tokens that a step computes however slow it is: prompts must advance
MIN_PICTURE_CHUNK = 4  # the same, where all prompts have pictures and others decode

MAX_CHOICES = 1 << 20  # log-probabilities of prompt tokens that a step hands out for a sequence


def schedule_chunks(
    batch: ScheduledBatch,
    behind: List[Sequence],
    budget: int,
    *,
    spare_logits: int,
    media: MediaPlanner | None = None,
    room: int = 0,
) -> None:
    """Add to the batch a chunk of each sequence that gets any of `budget`; they are in policy
    order. `media` says how far chunks with pictures can go, within the `room` that the step has."""
    needs = []
    for sequence in behind:
        length = sequence.num_tokens - sequence.num_launched_tokens
        if sequence.wants_prompt_scores:
            length, num_logits = _scoring_chunk(sequence, spare_logits)
            spare_logits -= num_logits
        needs.append(length)
    counts = share_budget(needs, budget)
    if media is not None:
        counts = media.whole_spans(behind, counts, room)
    for sequence, count in zip(behind, counts, strict=True):
        start = sequence.num_launched_tokens
        if media is not None and count and start < sequence.media_end:
            count = media.clip(sequence, start, count, batch)
        if count == 0:
            continue
        samples = start + count == sequence.num_tokens
        scores = sequence.wants_prompt_scores and start >= sequence.num_scored_tokens
        batch.sequences.append(sequence)
        batch.rows.append(sequence.row)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.num_logits.append(count if scores else int(samples))
        batch.samples.append(samples)


def share_budget(needs: List[int], budget: int) -> list[int]:
    """Split tokens over needs in policy order: one each, half to the oldest, the rest to those
    that need the least.

    The oldest always advance, whatever comes after them; and a short prompt finishes while a long
    one is under way. Prompts of equal length are served one after the other, not in slices, which
    would make all of them as late as the last.
    """
    given = [int(index < budget) for index in range(len(needs))]
    rest = budget - sum(given)
    for_oldest = (rest + 1) // 2
    for index in range(len(needs)):
        more = min(needs[index] - given[index], for_oldest)
        given[index] += more
        for_oldest -= more
        rest -= more
    for index in sorted(range(len(needs)), key=lambda i: needs[i] - given[i]):
        more = min(needs[index] - given[index], rest)
        given[index] += more
        rest -= more
    return given


def demand(needs: List[int], budget: int) -> int:
    """How much of a step's tokens is spoken for; long prompts together get no more than half."""
    num_long_tokens = sum(need for need in needs if is_long(need, budget))
    return min(num_long_tokens, (budget + 1) // 2) + sum(needs) - num_long_tokens


def is_long(need: int, budget: int) -> bool:
    """More than half a step."""
    return 2 * need > budget


def _scoring_chunk(sequence: Sequence, spare_logits: int) -> tuple[int, int]:
    """How far a prompt whose tokens are to be scored may go in a step, and the logits it takes
    beside the one that every sequence may have."""
    start = sequence.num_computed_tokens
    if start < sequence.num_scored_tokens:  # computed again after preemption, not scored again
        return sequence.num_scored_tokens - start, 0
    num_prompt = sequence.num_prompt_tokens
    # With a resume, tokens follow the prompt that are not to be scored: stop short of them.
    end = num_prompt if sequence.num_tokens == num_prompt else num_prompt - 1
    # Rows of a whole vocabulary are large: a step holds so many of them, and its reply too.
    most = max(1, MAX_CHOICES // (1 + (sequence.request.params.prompt_logprobs or 0)))
    length = min(end - start, spare_logits + 1, most)
    return length, length - 1
