"""The scheduler: which sequences get how many tokens in the next step, and what came of it."""

from __future__ import annotations

import math
import time
from bisect import insort
from copy import copy
from typing import TYPE_CHECKING

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import InvalidRequest, QueueFull
from octavo_engine.kv.manager import KVManager
from octavo_engine.scheduling import background, limits
from octavo_engine.scheduling.adapter_slots import AdapterSlots
from octavo_engine.scheduling.admission import AdmissionControl
from octavo_engine.scheduling.chunks import (
    MIN_CHUNK,
    MIN_PICTURE_CHUNK,
    demand,
    is_long,
    schedule_chunks,
)
from octavo_engine.scheduling.deadlines import Deadlines
from octavo_engine.scheduling.invariants import check_invariants
from octavo_engine.scheduling.media import MediaPlanner, awaits
from octavo_engine.scheduling.policy import WaitingQueue, by_order, place_in_line
from octavo_engine.scheduling.prefills import Prefills
from octavo_engine.scheduling.queue_forecast import QueueForecast
from octavo_engine.scheduling.request_shares import RequestShares
from octavo_engine.scheduling.snapshots import plan_draft_saves, plan_rewinds, plan_saves
from octavo_engine.scheduling.speculation import count_drafts, make_speculation
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.batch import ScheduledBatch
from octavo_engine.state.outputs import EngineStats, SequenceOutput
from octavo_engine.state.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from collections.abc import Sequence as List

    from octavo_engine.config import SchedulerConfig, SpeculationConfig
    from octavo_engine.kv.manager import PrefixMatch
    from octavo_engine.kv.states import StateSnapshots
    from octavo_engine.scheduling.block_tiers import BlockTiers
    from octavo_engine.scheduling.media import MediaLimits
    from octavo_engine.scheduling.speculation import Speculation
    from octavo_engine.state.adapter import HeldAdapter
    from octavo_engine.state.outputs import FinishReason, StepResult
    from octavo_engine.state.request import EngineRequest
    from octavo_engine.state.sequence_grammar import SequenceGrammar

SPARE_LOGITS = 64  # rows of logits in a step beyond one a sequence, for prompt log-probabilities
ALONE = 4  # times max_step_ms is a step long in which no sequence decodes
STRETCH = 1.4  # times what its sequences that decode take is a step long beside pictures
MAX_LONG = 2  # prompts longer than half a step's room that run at once: more would only hold memory
LONG_LOOK_STEPS = 8  # after so many, a long prompt may have become short: its prefix is cached
BLOCKED_LOOK_STEPS = 8  # after so many, a sequence blocked for memory may find more of it cached
MAX_PASSED = 8  # sequences without memory that are looked past in one step


class Scheduler:
    """Gives each sequence some number of tokens in each step.

    There is one rule and no phases: `num_computed_tokens` chases `num_tokens`, and a sequence
    samples in the step in which it catches up. A new prompt, the rest of a long one, a prefix found
    in the cache, a resume, recomputation after preemption and plain decoding differ only in how far
    behind they are. Tokens that are guessed ahead stand behind a sequence's own in the batch, and
    become its own as far as they come true.

    A step serves the running sequences first, then admits waiting ones. Sequences one token behind
    all take part; those further behind share what is left of the token budget and of the time
    budget. A sequence is admitted with blocks for all its tokens, so only decoding can run out of
    memory; the last running sequence in policy order then gives its blocks up and waits again.

    Call schedule() and update() in turn: a batch is computed and reported before the next is
    planned, or some batches later, by the rules of `scheduling.ahead`: at most `max_under_way`
    batches are planned and not reported, which `num_stages` processes compute one after another.
    If computing a batch fails as a whole, update() it with every entry failed; no other sequence
    was touched by it.

    `windows` are those of the groups of the model's layers (`caches.CacheLayout`); `states` are
    there if some layers have recurrent states.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        windows: List[int | None] = (None,),
        states: StateSnapshots | None = None,
        max_under_way: int = 1,
        num_stages: int = 1,
        cache_key: bytes = b"",
        speculation: SpeculationConfig | None = None,
        num_adapter_slots: int = 0,
        media: MediaLimits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.windows = windows
        self._num_stages = num_stages
        self.kv = KVManager(
            num_blocks,
            windows=windows,
            max_step_tokens=max_under_way * config.max_num_batched_tokens,
            cache_key=cache_key,
            caching=config.enable_prefix_caching,
            states=states,
            retention=limits.retention_limits(config, num_blocks),
        )
        self.sequences: dict[str, Sequence] = {}  # all live ones: waiting or running
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in policy order
        self.free_rows = list(reversed(range(config.max_num_seqs)))
        self.max_num_logits = config.max_num_seqs + SPARE_LOGITS
        self._kv_tokens = self.kv.needs.tokens(num_blocks, config.max_model_len)
        self._now = now
        self._num_added = 0
        self.suspended: dict[str, Sequence] = {}  # live ones without a reader
        self._suspending: dict[str, Sequence] = {}  # running ones that are so from the next step on
        self._behind: list[Sequence] = []  # running ones that had to catch up in the last step
        self._finished: list[SequenceOutput] = []  # outside update()
        self._deadlines = Deadlines()
        self._admission = AdmissionControl(self.kv.needs)
        self._step_time = StepTimeModel()
        self._forecast = QueueForecast(config, self._step_time)
        self._background = background.BackgroundAccount(
            self._step_time, max_step_s=config.max_step_ms / 1e3
        )
        self.shares = RequestShares(config, self._step_time)
        self.adapter_slots = AdapterSlots(num_adapter_slots)
        self.media = None if media is None else MediaPlanner(media)
        self.tiers: BlockTiers | None = None  # that hold KV blocks beside the pool
        self._are_slots_kept = False  # for one that has waited long; others do not overtake it
        self._speculation: Speculation | None = None
        if speculation is not None:
            self._speculation = make_speculation(speculation)
        self._stats = EngineStats(kv_blocks_total=num_blocks)

    # -- requests come and go --------------------------------------------------------------------

    def add(
        self,
        request: EngineRequest,
        grammar: SequenceGrammar | None = None,
        adapter: HeldAdapter | None = None,
    ) -> None:
        """Put a request in line, with the grammar it must keep to and the adapter it wants.

        Raises QueueFull, ContextLengthExceeded or InvalidRequest.
        """
        max_num_tokens = limits.max_num_tokens(request, self.config, kv_tokens=self._kv_tokens)
        if request.request_id in self.sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(
                f"{len(self.waiting)} requests are waiting, the most allowed (--max-queue)",
                retry_after_s=self._retry_after_s(),
            )
        now = self._now()
        self._num_added += 1
        order = place_in_line(
            self.config, priority=request.priority, number=self._num_added, arrived_at=now
        )
        sequence = Sequence(request, max_num_tokens=max_num_tokens, order=order, added_at=now)
        sequence.grammar = grammar
        sequence.adapter = adapter
        if request.output_token_ids and (reason := limits.end_of(sequence)) is not None:
            sequence.finish_reason = reason  # a resume of what was complete already
            self._finished.append(limits.last_output(sequence))
            return
        ahead = self.shares.ahead_of(sequence, self.waiting, self.running)
        self._forecast.check(sequence, self.waiting, ahead, now)
        self.kv.name_blocks(sequence)
        self.sequences[request.request_id] = sequence
        self.waiting.push(sequence)
        self.shares.enter(sequence)
        if request.deadline_at is not None:
            self._deadlines.add(sequence, request.deadline_at, num_live=len(self.sequences))
        source, is_soon = request.kv_source, len(self.waiting) <= len(self.free_rows)
        if self.tiers is not None and source is not None and not source.is_computing and is_soon:
            # Another engine has its blocks: they may come while others are still before it.
            self.tiers.defers(sequence, self.kv.match(sequence), self._step_time)

    def abort(self, request_id: str, *, has_left: bool = False) -> SequenceOutput | None:
        """End a request at once, whatever its state. None if it is unknown or has ended already.

        `has_left`: its client went away.
        """
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return None
        if has_left:
            self._forecast.left(sequence, self._now())
        return self._finish(sequence, "abort")

    def suspend(self, request_id: str, *, on: bool) -> None:
        """Its client does not read: it gives back its row and its memory, and waits for nothing,
        until it is resumed. An unknown id is no error: it has ended."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return
        if on and sequence.row >= 0:
            self._suspending[request_id] = sequence
        elif on and request_id not in self.suspended:
            self.waiting.remove(sequence)
            self._note_suspended(sequence)
        elif not on:
            self._suspending.pop(request_id, None)
            if self.suspended.pop(request_id, None) is not None:
                self.waiting.push(sequence)
                self.shares.enter(sequence)

    def take_finished(self) -> list[SequenceOutput]:
        """Last outputs of sequences that ended outside update(); each is handed out once."""
        finished, self._finished = self._finished, []
        return finished

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing is done, while sequences run."""
        if self.running:
            return False
        self.kv.clear_cache()
        if self.media is not None:
            self.media.give_up()
        return True

    def expected_s(self, batch: ScheduledBatch) -> float:
        """How long computing it should take; 0 while nothing is known."""
        num_decodes = batch.num_decodes
        step_s = self._step_time.step_s(num_decodes, batch.num_tokens - num_decodes)
        return step_s if self.media is None else step_s + self.media.expected_s(batch)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self._finished)

    # -- one step --------------------------------------------------------------------------------

    def expire(self) -> float:
        """End what is past its deadline. Returns the moment that was judged, for `schedule`."""
        now = self._now()
        for sequence in self._deadlines.pop_expired(now):
            self._finished.append(self._finish(sequence, "deadline"))
        return now

    def schedule(self, now: float | None = None) -> ScheduledBatch:
        """Plan the next step. Empty if there is nothing to compute. With `now`, the moment of an
        `expire` just made, nothing else ends before the batch is planned."""
        if now is None:
            now = self.expire()
        if self.kv.retained is not None:
            self.kv.retained.expire(now)
        self._give_way()
        self.shares.start_step(now)
        batch, prefills = ScheduledBatch(), Prefills()
        num_preemptions = self._stats.preemptions
        budget = self._schedule_decodes(batch, prefills)
        num_decodes = len(batch.sequences)
        had_memory = num_preemptions == self._stats.preemptions  # for all that run
        can_admit = had_memory and bool(self.waiting and self.free_rows)
        num_drafts = 0
        if self._speculation is not None and num_decodes:
            is_shared = bool(prefills.regular or prefills.shared or can_admit)
            num_drafts = self._schedule_drafts(batch, budget // 2 if is_shared else budget)
        if can_admit or prefills:
            budget = self._prefill_budget(budget - num_drafts, num_decodes + num_drafts)
            if can_admit:
                self._admit(batch, prefills, budget, now)
            if self.media is not None:
                num_rows = num_decodes + num_drafts
                budget = self._start_media(self.media, batch, prefills, budget, num_rows)
            spare_logits = self.max_num_logits - len(self.running) - num_drafts
            self._schedule_prefills(batch, prefills, budget, spare_logits)
        if self.media is not None:
            self.media.finish_step(batch)
        if self.kv.has_windows:
            self._extend_tables(batch)
        if self._speculation is not None:
            self._speculation.plan_proposals(batch, self.kv, self._step_time)
        if self.kv.states is not None:
            self._plan_states(batch, self.kv.states)
        self._behind = prefills.all()
        batch.placed = self.adapter_slots.take_placed()
        self._forecast.after_schedule(self.waiting, len(self.running), now)
        return batch

    def _plan_states(self, batch: ScheduledBatch, states: StateSnapshots) -> None:
        """Of models with recurrent states: what is copied before the step, and saved in it."""
        if self._speculation is not None:
            plan_rewinds(batch, states)
        if self.config.enable_prefix_caching:
            plan_saves(batch, states)
        if batch.drafts:
            plan_draft_saves(batch)

    def _give_way(self) -> None:
        """Rows and memory that running sequences must give back before the step is planned."""
        if self._suspending:
            self._suspend_idle()
        while self._must_background_yield():
            self._preempt(self.running[-1])
            first = next(iter(self.waiting))
            if first.blocked_at is not None or first.slot_blocked_at is not None:
                break  # for memory one is given up a step: it may be enough
        if (displaced := self._displaced()) is not None:
            self._preempt(displaced)

    def _schedule_decodes(self, batch: ScheduledBatch, prefills: Prefills) -> int:
        """Add the sequences that are one token behind, and sort out those that are further behind.
        Returns what is left of the step's tokens."""
        shares, budget = self.shares, self.config.max_num_batched_tokens
        is_shared, is_limited = self._is_foreground_running(), shares.is_limited
        is_piped, most = self._num_stages > 1, budget
        if is_piped:
            most = min(budget, self._share_of_decodes())
        # Hot path: once per running sequence. Preemption shortens the list from its end meanwhile.
        for sequence in self.running:
            start = sequence.num_computed_tokens + sequence.num_ahead
            if sequence.grammar is not None and sequence.grammar.is_busy:
                continue  # its mask is late: it sits out
            if sequence.num_ahead and sequence.wants_prompt_scores:
                continue  # how far its prompt is scored is known once that is reported
            rest = len(sequence.token_ids) - start
            if rest > 1 or start < sequence.media_end:
                if sequence.grammar is not None and not self._grow_to_end(sequence, batch):
                    break
                if is_limited and shares.pays_for_prompt(sequence):
                    prefills.shared.append(sequence)
                elif is_shared and sequence.is_background:
                    prefills.background.append(sequence)
                else:
                    prefills.regular.append(sequence)
                continue
            if is_piped and (rest <= 0 or len(batch.sequences) == most):
                continue  # it is under way, or is left to the next batch
            if budget == 0:
                break
            if is_shared and sequence.is_background and not self._background.pay_row():
                continue
            if rest == 0 and len(sequence.token_ids) + 1 >= sequence.max_num_tokens:
                continue  # the token under way is its last
            if is_limited and shares.pays_for_row(sequence) and not shares.pay_row():
                continue
            if start == len(sequence.block_table) * BLOCK_SIZE and not self._grow(sequence, batch):
                break
            if is_limited:
                shares.serve(sequence)
            if rest == 0:
                batch.awaited.append(len(batch.sequences))
            batch.sequences.append(sequence)
            batch.rows.append(sequence.row)
            batch.starts.append(start)
            budget -= 1
        num_decodes = len(batch.sequences)
        batch.counts = [1] * num_decodes
        batch.num_logits = [1] * num_decodes
        batch.samples = [True] * num_decodes
        return budget

    def _share_of_decodes(self) -> int:
        """How many sequences that decode go into one of the batches that stages compute at once."""
        num_decodes = 0
        # Hot path: once per running sequence.
        for sequence in self.running:
            num_decodes += len(sequence.token_ids) - sequence.num_launched_tokens <= 1
        return -(-num_decodes // self._num_stages)

    def _schedule_drafts(self, batch: ScheduledBatch, max_tokens: int) -> int:
        """Add guesses to the sequences that decode. Returns how many."""
        assert self._speculation is not None
        num_decodes = len(batch.sequences)
        spare_logits = self.max_num_logits - self.config.max_num_seqs
        self._speculation.add_drafts(
            batch, self.kv, self._step_time, max_tokens=min(max_tokens, spare_logits)
        )
        return batch.num_tokens - num_decodes

    def _schedule_prefills(
        self, batch: ScheduledBatch, prefills: Prefills, budget: int, spare_logits: int
    ) -> None:
        """Add chunks of the sequences that are further behind; of those that a share of the time
        pays for, one at a time."""
        num_before = len(batch.sequences)
        media, room = self.media, 0
        if media is not None:
            room = self.config.max_num_batched_tokens - batch.num_tokens
        schedule_chunks(
            batch, prefills.regular, budget, spare_logits=spare_logits, media=media, room=room
        )
        if prefills.shared:
            budget -= sum(batch.counts[num_before:])
            spare_logits -= sum(max(0, num - 1) for num in batch.num_logits[num_before:])
            if budget > 0:
                first, is_idle = prefills.shared[0], not batch.sequences
                count = min(budget, self.shares.pay_prompt(first, is_idle=is_idle))
                room -= sum(batch.counts[num_before:])
                self.shares.owe(self._schedule_paid(batch, first, count, spare_logits, room))
        elif prefills.background and not prefills.regular:
            first = prefills.background[0]
            count = min(budget, self._background.pay_prompt(first))
            self._background.owe(self._schedule_paid(batch, first, count, spare_logits, room))

    def _schedule_paid(
        self, batch: ScheduledBatch, sequence: Sequence, count: int, spare_logits: int, room: int
    ) -> int:
        """Returns how many tokens more than `count` a picture takes that must be computed whole."""
        num_before = batch.num_tokens
        schedule_chunks(
            batch, [sequence], count, spare_logits=spare_logits, media=self.media, room=room
        )
        return max(0, batch.num_tokens - num_before - count)

    def _extend_tables(self, batch: ScheduledBatch) -> None:
        """Promised blocks that the step's tokens need."""
        for sequence, start, count in zip(batch.sequences, batch.starts, batch.counts, strict=True):
            if sequence.num_promised_blocks:
                batch.grown += self.kv.extend(sequence, start + count)

    # -- one step ahead --------------------------------------------------------------------------

    def can_plan_ahead(self) -> bool:
        """Whether schedule() may be called before the batch under way is reported. Sequences past
        their deadline have been ended: a deadline in between could make room for one that takes
        memory away."""
        if self._suspending or self._must_background_yield() or self._displaced() is not None:
            return False
        if self._num_stages > 1:
            return self._has_blocks_for_next()
        num_growing = 0
        # Hot path: once per running sequence.
        for sequence in self.running:
            if sequence.needs_host:
                return False
            start = sequence.num_computed_tokens + sequence.num_ahead
            num_growing += start == len(sequence.block_table) * BLOCK_SIZE
        return num_growing * self.kv.num_groups <= self.kv.num_available

    def _has_blocks_for_next(self) -> bool:
        """Whether all sequences that are not under way could get the blocks that their tokens need:
        then none is preempted, which one under way cannot be."""
        num_missing = 0
        # Hot path: once per running sequence.
        for sequence in self.running:
            length = len(sequence.token_ids)
            if length > sequence.num_admitted_tokens and length > sequence.num_launched_tokens:
                num_missing += max(0, -(-length // BLOCK_SIZE) - len(sequence.block_table))
        return num_missing * self.kv.num_groups <= self.kv.num_available

    def update(
        self, batch: ScheduledBatch, result: StepResult, step_s: float
    ) -> list[SequenceOutput]:
        """Take in what a step computed. Returns the output of each sequence that has any."""
        self.kv.end_step()
        outputs: list[SequenceOutput] = []
        failed, deferred, drafts = set(result.failed), set(result.deferred), batch.drafts
        num_generated = 0
        entries = zip(
            batch.sequences, batch.starts, batch.counts, batch.samples, result.tokens, strict=True
        )
        # Hot path: once per scheduled sequence.
        for index, (sequence, start, count, samples, token) in enumerate(entries):
            if sequence.finish_reason is not None:
                continue  # it was aborted while this step ran
            if index in failed:
                outputs.append(self._fail(sequence, is_refused=index in result.forbidden))
                continue
            if index in deferred:
                samples = False
                count -= 1  # its last token is computed again, once it may be followed by another
            if index in drafts:
                accepted = result.accepted.get(index, [])
                count -= len(drafts[index]) - len(accepted)
                num_generated += len(accepted)
                has_wrong = len(accepted) < len(drafts[index])
                self._take_accepted(sequence, accepted, start + count, has_wrong=has_wrong)
            computed = sequence.num_computed_tokens = start + count
            was_behind = computed <= sequence.num_admitted_tokens
            if was_behind or computed % BLOCK_SIZE < count:
                self.kv.publish(sequence)
                if sequence.held_from:
                    self.kv.trim(sequence)
            output = SequenceOutput(request_id=sequence.request_id)
            if was_behind and sequence.wants_prompt_scores and start >= sequence.num_scored_tokens:
                sequence.num_scored_tokens = min(computed, sequence.num_prompt_tokens - 1)
                output.prompt_logprobs = result.prompt_logprobs.get(index, [])
            if samples:
                if len(sequence.token_ids) == sequence.num_given_tokens:
                    self._stats.prompt_tokens += sequence.num_prompt_tokens
                    self._stats.prompt_tokens_cached += sequence.num_cached_tokens
                    output.num_cached_tokens = sequence.num_cached_tokens
                    output.queued_s = sequence.queued_s
                num_generated += 1
                sequence.token_ids.append(token)
                output.token_ids = [*accepted, token] if index in drafts else [token]
                if index in result.logprobs:
                    output.logprobs = result.logprobs[index]
                if sequence.grammar is not None:
                    num_generated += self._follow(sequence, output, result.forced.get(index, ()))
                elif (
                    token in sequence.stop_ids or len(sequence.token_ids) >= sequence.max_num_tokens
                ):
                    self._end_if_due(sequence, output)
            elif not output.prompt_logprobs:
                continue
            outputs.append(output)
        if self._speculation is not None and batch.sequences:
            self._speculation.take_proposals(batch, result)
        if deferred and self.kv.states is not None:
            self._recompute(batch, deferred)
        self._admission.after_step()
        if self.media is not None and batch.encode is not None:
            step_s -= self._learn_media(self.media, batch, result)
            if result.encode_error is not None:
                outputs += self._fail_media(batch.encode.digest, result.encode_error)
        self._learn(batch, result, step_s)
        self._count(batch, result, num_generated, step_s)
        return outputs

    def take_back(self, batch: ScheduledBatch) -> list[str]:
        """Of a batch that failed as a whole: the ids of all sequences that it was to change, those
        it admitted or gave blocks without computing any of their tokens included. What it was to
        place in adapters' slots is placed by the next one."""
        self.adapter_slots.place_again(batch.placed)
        grown = {growth.row for growth in batch.grown}
        touched = [*batch.sequences, *batch.admitted, *(s for s in self.running if s.row in grown)]
        return list(dict.fromkeys(sequence.request_id for sequence in touched))

    def _recompute(self, batch: ScheduledBatch, deferred: set[int]) -> None:
        """A recurrent state stands behind their last token already: it cannot be computed twice. So
        they begin again from a snapshot."""
        for index in deferred:
            if batch.sequences[index].row >= 0:
                self._preempt(batch.sequences[index])

    def _learn(self, batch: ScheduledBatch, result: StepResult, step_s: float) -> None:
        """What the length of a step says of the next ones, and the shares of time it earns."""
        self.shares.earn(step_s)
        if step_s > 0.0 and batch.sequences:
            self._background.earn_step(step_s)
            num_decodes = batch.num_decodes
            model_s = max(0.0, step_s - result.draft_s)
            if result.is_usual:
                self._step_time.observe(num_decodes, batch.num_tokens - num_decodes, model_s)

    def _learn_media(self, media: MediaPlanner, batch: ScheduledBatch, result: StepResult) -> float:
        """The seconds that the step's picture took, which say nothing of tokens."""
        if result.encode_s and result.encode_error is None:
            media.take(batch, result.encode_s)
        else:
            media.drop(batch)  # without a time the step failed as a whole
        self.shares.earn(result.encode_s)
        return result.encode_s

    def _fail_media(self, digest: bytes, error: str) -> list[SequenceOutput]:
        """End those that run and wait for a picture that cannot be encoded."""
        failed = [sequence for sequence in self.running if awaits(sequence, digest)]
        outputs = [self._finish(sequence, "error") for sequence in failed]
        for output in outputs:
            output.error = f"the engine failed to encode a picture: {error}"
        return outputs

    def _count(
        self, batch: ScheduledBatch, result: StepResult, num_generated: int, step_s: float
    ) -> None:
        stats = self._stats
        if batch.drafts:
            count_drafts(stats, batch, result)
        stats.steps += 1
        stats.generation_tokens += num_generated
        stats.step_ms = step_s * 1e3
        stats.step_tokens = batch.num_tokens
        stats.last_step_at = self._now()

    def _take_accepted(
        self, sequence: Sequence, accepted: list[int], num_computed: int, *, has_wrong: bool
    ) -> None:
        """What came true of its drafts is its own. None of it is an end."""
        sequence.token_ids += accepted
        if self.kv.states is not None:
            self.kv.states.settle_drafts(sequence, num_computed, has_wrong=has_wrong)
        if sequence.grammar is not None:
            for token in accepted:
                sequence.grammar.accept(token)

    def _follow(self, sequence: Sequence, output: SequenceOutput, forced: Iterable[int]) -> int:
        """Take the new token through the grammar, and append what must follow it. Returns how many
        tokens were appended."""
        grammar, tokens = sequence.grammar, sequence.token_ids
        assert grammar is not None
        num_before = len(tokens)
        for following in (None, *forced):
            if following is not None:
                tokens.append(following)
                output.token_ids.append(following)
            if tokens[-1] not in sequence.stop_ids:
                grammar.accept(tokens[-1])
            self._end_if_due(sequence, output)
            if output.finish_reason is not None:
                return len(tokens) - num_before
        grammar.start_slow_mask()
        return len(tokens) - num_before

    # -- memory for those that run ---------------------------------------------------------------

    def _grow(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Give it one more block, the last in line's if need be. False if that was itself."""
        while not (grown := self.kv.grow(sequence)):
            if len(self.running) == 1 and self.kv.reclaim(self.kv.num_groups):
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        batch.grown += grown
        return True

    def _grow_to_end(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Blocks for all its tokens: forced ones were appended. False if it was preempted."""
        if len(sequence.token_ids) <= sequence.num_admitted_tokens:
            return True  # those of its prompt are its own, or promised
        while len(sequence.block_table) * BLOCK_SIZE < len(sequence.token_ids):
            if not self._grow(sequence, batch):
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting. Its blocks stay cached until they are needed, so it may lose little."""
        assert sequence.num_ahead == 0, "a step under way still writes into its blocks"
        self._stop_running(sequence)
        self.kv.release(sequence)
        self.kv.name_blocks(sequence)
        sequence.num_preemptions += 1
        self._stats.preemptions += 1
        self._admission.after_preemption(self.running)
        self.waiting.push(sequence)

    def _suspend_idle(self) -> None:
        """Those for which nothing is under way. Their blocks stay cached until they are needed."""
        for request_id, sequence in list(self._suspending.items()):
            if sequence.num_ahead == 0:
                del self._suspending[request_id]
                self._stop_running(sequence)
                self.kv.release(sequence)
                self.kv.name_blocks(sequence)
                self._note_suspended(sequence)

    def _is_foreground_running(self) -> bool:
        """Whether any running sequence is not in the background: such are in front."""
        return bool(self.running) and not self.running[0].is_background

    def _is_background_alone(self) -> bool:
        """Whether all that run, or all that wait where none runs, are in the background."""
        first = next(iter(self.running or self.waiting), None)
        return first is not None and first.is_background

    def _must_background_yield(self) -> bool:
        """Whether a sequence waits for what the last one in line holds, a background one."""
        if not self.running or not self.running[-1].is_background or not self.waiting:
            return False
        first = next(iter(self.waiting))
        if first.is_background:
            return False
        is_blocked = first.blocked_at is not None or first.slot_blocked_at is not None
        return is_blocked or len(self.free_rows) < self.waiting.num_foreground

    def _displaced(self) -> Sequence | None:
        """The sequence of a large request that gives its row to another request's, if any."""
        if self.free_rows or not self.waiting:
            return None
        return self.shares.to_displace(self.waiting, self.running)

    def _note_suspended(self, sequence: Sequence) -> None:
        sequence.num_suspensions += 1
        self.shares.leave(sequence)
        self.suspended[sequence.request_id] = sequence

    # -- those that wait -------------------------------------------------------------------------

    def _admit(self, batch: ScheduledBatch, prefills: Prefills, budget: int, now: float) -> None:
        """Let waiting sequences run while the step has room for their tokens and memory for them.

        One that memory does not suffice for may be passed by smaller ones, for `aging_s` seconds;
        from then on no other overtakes it and what becomes free is kept for it.
        """
        lengths = [s.num_tokens - s.num_launched_tokens for s in prefills.regular]
        reserved = sum(self._admission.reserve(sequence) for sequence in self.running)
        num_passed = 0
        self._are_slots_kept = False
        shares = self.shares
        line = shares.in_order(self.waiting, self.running)
        for sequence in self._forecast.in_turn(line, now):
            num_long = sum(is_long(length, budget) for length in lengths)
            if not self.free_rows or len(lengths) >= budget or demand(lengths, budget) >= budget:
                break  # an admitted sequence computes at least one token now
            is_held = sequence.is_background and self._is_foreground_running()
            if is_held and (prefills or not self._background.has_credit):
                break
            is_further = shares.pays_for_prompt(sequence)
            is_idle = not (batch.sequences or prefills.regular)
            if is_further and (prefills.shared or not (shares.has_credit or is_idle)):
                continue
            if self._awaits_prefix(sequence, sequence.awaits):
                continue
            if self.kv.states is not None and sequence.grammar and sequence.grammar.is_busy:
                continue  # its last token would be computed in vain
            if sequence.adapter is not None and self._lacks_slot(sequence, sequence.adapter, now):
                continue
            has_no_place = num_long >= MAX_LONG
            if has_no_place and self._stats.steps < sequence.long_until_step:
                continue
            reserve = self._admission.reserve(sequence)
            if self._is_blocked_still(sequence, reserved + reserve):
                num_passed += 1
                if self._holds_all_up(sequence, now) or num_passed == MAX_PASSED:
                    break
                continue
            match = self.kv.match(sequence)
            sequence.awaits = match.awaits
            if self._awaits_prefix(sequence, match.awaits):
                continue
            length = sequence.num_tokens - match.num_tokens
            if self._is_hopeless(sequence, length, now):
                self._finished.append(self._finish(sequence, "deadline"))
                continue
            if has_no_place and is_long(length, budget):
                sequence.long_until_step = self._stats.steps + LONG_LOOK_STEPS
                continue
            if sequence.request.is_prefetch:
                if self.tiers is None or not self.tiers.defers(sequence, match, self._step_time):
                    self._finished.append(self._end_prefetch(sequence, match, now))
                continue
            # With nothing running all memory is free or retained, and add() saw that it is enough.
            if self.running and match.num_blocks + reserved + reserve > self.kv.num_available:
                if sequence.blocked_at is None:
                    sequence.blocked_at = now
                sequence.num_missing_blocks = match.num_blocks
                sequence.blocked_until_step = self._stats.steps + BLOCKED_LOOK_STEPS
                num_passed += 1
                if self._holds_all_up(sequence, now) or num_passed == MAX_PASSED:
                    break
                continue
            if self.tiers is not None and self.tiers.defers(sequence, match, self._step_time):
                continue
            self._start(sequence, match, batch, now)
            prefills.add(sequence, is_shared=is_further, is_background=is_held)
            lengths.append(length)
            reserved += reserve
        prefills.regular.sort(key=by_order)

    def _awaits_prefix(self, sequence: Sequence, digest: bytes | None) -> bool:
        """Whether it had better wait for the sequence that computes that block. Foreground
        sequences never wait for background ones, nor for another request's that a share of the
        time pays for."""
        owner = None if digest is None else self.kv.computing.get(digest)
        if owner is None:
            return False
        if owner.group != sequence.group and self.shares.pays_for_prompt(owner):
            return False
        return sequence.is_background or not owner.is_background

    def will_compute(self, digests: Collection[bytes]) -> bool:
        """Whether a sequence has yet to compute one of these blocks; of one that waits, the last
        of its prompt."""
        last = {digest for sequence in self.waiting for digest in sequence.digests[-2:]}
        return any(digest in last or digest in self.kv.computing for digest in digests)

    def publish_tails(self) -> None:
        """Let the partly filled last blocks of running sequences be found, as they are now."""
        for sequence in self.running:
            self.kv.publish_tail(sequence)

    def _lacks_slot(self, sequence: Sequence, adapter: HeldAdapter, now: float) -> bool:
        """Whether too many other adapters run. Who has waited for `aging_s` seconds gets the next
        slot: until then no later sequence with an adapter is admitted."""
        if not self._are_slots_kept and self.adapter_slots.has_room(adapter):
            return False
        if sequence.slot_blocked_at is None:
            sequence.slot_blocked_at = now
        self._are_slots_kept |= now - sequence.slot_blocked_at >= self.config.aging_s
        return True

    def _holds_all_up(self, sequence: Sequence, now: float) -> bool:
        """It has been passed for so long that no other may overtake it any more."""
        return now - (sequence.blocked_at or now) >= self.config.aging_s

    def _is_blocked_still(self, sequence: Sequence, reserved: float) -> bool:
        """Memory did not suffice for it lately, and is not much more now: its prompt need not be
        looked up again."""
        return (
            sequence.blocked_at is not None
            and self._stats.steps < sequence.blocked_until_step
            and bool(self.running)
            and sequence.num_missing_blocks + reserved > self.kv.num_available
        )

    def _start(
        self, sequence: Sequence, match: PrefixMatch, batch: ScheduledBatch, now: float
    ) -> None:
        self._forecast.started(sequence, now)
        self.waiting.remove(sequence)
        batch.copies += self.kv.admit(sequence, match)
        sequence.row = self.free_rows.pop()
        if self.kv.states is not None and match.num_tokens:
            source = self.kv.use_states(sequence, match.prefix.num_full)
            batch.state_loads.append((source, sequence.row))
        sequence.blocked_at = sequence.slot_blocked_at = sequence.awaits = None
        if sequence.adapter is not None:
            self.adapter_slots.acquire(sequence)
        insort(self.running, sequence, key=by_order)
        batch.admitted.append(sequence)
        if sequence.num_preemptions + sequence.num_suspensions == 0:
            sequence.queued_s = now - sequence.added_at
            sequence.num_cached_tokens = min(match.num_tokens, sequence.num_prompt_tokens)
            self._stats.prefix_hits += sequence.num_cached_tokens
            self._stats.prefix_queries += sequence.num_prompt_tokens

    def _end_prefetch(self, sequence: Sequence, match: PrefixMatch, now: float) -> SequenceOutput:
        """What the tiers have of its prompt is in the pool."""
        self.kv.retain(sequence, match.prefix.num_full, now)
        self._leave(sequence, "length")
        self.kv.release(sequence)
        return SequenceOutput(
            request_id=sequence.request_id,
            finish_reason="length",
            num_cached_tokens=min(match.num_tokens, sequence.num_prompt_tokens),
        )

    def _is_hopeless(self, sequence: Sequence, num_tokens: int, now: float) -> bool:
        """Its deadline would pass before it is done: computing it would be waste."""
        deadline_at = sequence.request.deadline_at
        if deadline_at is None:
            return False
        first_at = now + self._step_time.prefill_s(num_tokens)
        return first_at > deadline_at or self._forecast.is_late(sequence, now)

    # -- those that have to catch up -------------------------------------------------------------

    def _prefill_budget(self, budget: int, num_decodes: int) -> int:
        """Tokens that keep the step short enough for sequences that decode in it or arrive
        meanwhile."""
        if num_decodes == 0 and self._step_time.prefill_s(1) == 0.0:
            return budget  # no sequence waits for a token, and nothing is known yet
        max_step_s = self._max_step_s(num_decodes)
        in_time = self._step_time.prefill_tokens(max_step_s, num_decodes=num_decodes)
        return min(budget, max(in_time, MIN_CHUNK))

    def _max_step_s(self, num_decodes: int) -> float:
        """About how long a step with prompts or pictures may take."""
        max_step_s = self.config.max_step_ms / 1e3
        if self._is_background_alone():
            return max_step_s * background.ALONE
        return max_step_s if num_decodes else max_step_s * ALONE

    def _start_media(
        self,
        media: MediaPlanner,
        batch: ScheduledBatch,
        prefills: Prefills,
        budget: int,
        num_decodes: int,
    ) -> int:
        """What is left of the step's tokens where pictures are encoded and read.

        A picture must not be noticed by sequences that decode: beside them a step is longer by a
        part of what they take, whatever --max-step-ms is, and so are those that compute nothing but
        prompts with pictures.
        """
        behind = prefills.all()
        decode_s, max_step_s = self._step_time.decode_s(num_decodes), self._max_step_s(num_decodes)
        min_chunk = MIN_CHUNK
        if decode_s and not self._is_background_alone():
            max_step_s = min(max_step_s, STRETCH * decode_s)
            if all(sequence.request.media for sequence in behind):
                min_chunk = MIN_PICTURE_CHUNK
                in_time = self._step_time.prefill_tokens(max_step_s, num_decodes=num_decodes)
                budget = min(budget, max(in_time, min_chunk))
        room_s = max_step_s - decode_s
        # Parts are cut for the shortest step: sequences may decode before the picture is done.
        shared_room_s = (STRETCH - 1.0) * self._step_time.decode_s(1) or room_s
        shared_room_s = min(shared_room_s, room_s, self.config.max_step_ms / 1e3)
        media.start_step(batch, behind, room_s=room_s, shared_room_s=shared_room_s)
        token_s = self._step_time.prefill_s(1)
        encode_s = media.encode_s(batch, behind, budget)
        if not encode_s or not token_s:
            return budget
        return max(min(budget, min_chunk), budget - int(encode_s / token_s))

    # -- the end ---------------------------------------------------------------------------------

    def _end_if_due(self, sequence: Sequence, output: SequenceOutput) -> None:
        reason = limits.end_of(sequence)
        if reason is not None:
            self._finish(sequence, reason)
            output.finish_reason = reason
            output.stop_token_id = limits.stop_token_id(sequence)
            output.is_whole = limits.is_whole(sequence)

    def _fail(self, sequence: Sequence, *, is_refused: bool) -> SequenceOutput:
        if sequence.grammar is not None and sequence.grammar.error is not None:
            self._finish(sequence, "error")
            message = f"the answer cannot follow its grammar further: {sequence.grammar.error}"
            return SequenceOutput(
                request_id=sequence.request_id,
                finish_reason="error",
                error=message,
                is_refused=not sequence.grammar.is_internal,  # a grammar is its author's to mend
            )
        self._stats.nan_failures += not is_refused
        self._leave(sequence, "error")
        self.kv.release_spoiled(sequence)
        return limits.without_token(sequence, is_refused=is_refused)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> SequenceOutput:
        if reason in ("stop", "length"):
            self._forecast.ended(sequence, self._now())
            if self._speculation is not None:
                self._speculation.finish(sequence)
        self._leave(sequence, reason)
        self.kv.retain(sequence, sequence.num_published_blocks, self._now())
        self.kv.release(sequence)
        return SequenceOutput(request_id=sequence.request_id, finish_reason=reason)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        del self.sequences[sequence.request_id]
        if sequence.row >= 0:
            self._suspending.pop(sequence.request_id, None)
            self._stop_running(sequence)
        elif self.suspended.pop(sequence.request_id, None) is None:
            self.waiting.remove(sequence)
        else:
            return
        self.shares.leave(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free_rows.append(sequence.row)
        sequence.row = -1
        if sequence.adapter_slot >= 0:
            self.adapter_slots.release(sequence)

    # -- limits and facts ------------------------------------------------------------------------

    def _retry_after_s(self) -> int:
        """About how long it takes to work off what waits."""
        tokens_per_s = self._step_time.tokens_per_s
        seconds = self._queued_tokens() / tokens_per_s if tokens_per_s else 1.0
        return min(max(math.ceil(seconds), 1), 60)

    def _queued_tokens(self) -> int:
        rests = (s.num_tokens - s.num_computed_tokens for s in self._behind if s.row >= 0)
        return self.waiting.num_tokens + sum(rest for rest in rests if rest > 1)

    def stats(self) -> EngineStats:
        """Where the engine stands now."""
        stats = self._stats
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)
        stats.queued_tokens = self._queued_tokens()
        token_s = self._step_time.prefill_s(1)
        stats.prefill_tokens_per_s = 1.0 / token_s if token_s else 0.0
        stats.kv_blocks_used = stats.kv_blocks_total - self.kv.pool.num_free
        now = self._now()
        if (retained := self.kv.retained) is not None:
            retained.expire(now)
            stats.kv_blocks_retained = len(retained)
            stats.retention_refused_blocks = retained.num_refused
            stats.retention_given_up_blocks = retained.num_given_up
        ahead = self.shares.ahead_of(None, self.waiting, self.running)
        stats.queue_wait_s = self._forecast.wait_s(self.waiting, ahead, now)
        stats.longest_wait_s = self._forecast.longest_wait_s(now) if stats.queue_wait_s else 0.0
        if self.adapter_slots.num_slots:
            stats.running_adapters = sorted(self.adapter_slots.running)
            waiting = {s.request.adapter.name for s in self.waiting if s.request.adapter}
            stats.waiting_adapters = sorted(waiting)
        if self.media is not None:
            stats.mm_cache_queries = self.media.hits + self.media.misses
            stats.mm_cache_hits = self.media.hits
            stats.mm_encode_seconds = self.media.encoder_s
        snapshot = copy(stats)
        snapshot.spec_accepted_per_pos = list(stats.spec_accepted_per_pos)
        return snapshot

    def check_invariants(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests: it looks at every
        block."""
        check_invariants(self)
