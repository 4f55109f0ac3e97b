"""The smallest executor that tells the truth: it has KV memory, and nothing but the batch to go by.

Each slot holds a digest of all tokens up to its own, made from the digest that the block table
shows for the position before. The next token is a function of that digest. So a sequence's tokens
are right only if every block it reads holds what it should, and the truth is computable from the
prompt alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.state.outputs import StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import SequenceOutput

VOCABULARY = 500
_PRIME = (1 << 61) - 1


def continue_digest(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % _PRIME


def digest_of(tokens: Iterable[int]) -> int:
    digest = 1
    for token in tokens:
        digest = continue_digest(digest, token)
    return digest


def next_token(tokens: Iterable[int]) -> int:
    """The truth: what follows these tokens."""
    return digest_of(tokens) % VOCABULARY


def true_output(prompt: list[int], num_tokens: int) -> list[int]:
    digest, output = digest_of(prompt), []
    for _ in range(num_tokens):
        output.append(digest % VOCABULARY)
        digest = continue_digest(digest, output[-1])
    return output


class KVMachine:
    """Executes batches. Keeps rows as a runner would: written at admission, grown block by
    block, in each group of layers. Each group holds the digests, and what one sees through its
    window must be there."""

    def __init__(
        self,
        num_blocks: int,
        windows: Sequence[int | None] = (None,),
        *,
        has_states: bool = False,
    ) -> None:
        self.has_states = has_states
        self.slots: list[int | None] = [None] * (num_blocks * BLOCK_SIZE)
        self.states: dict[int, int] = {}  # by slot: the digest of all tokens so far
        self.windows = windows
        self.tables: dict[int, list[list[int]]] = {}  # by row, of each group
        self.tokens: dict[int, list[int]] = {}
        self.num_computed = 0
        self.fails: Callable[[list[int]], bool] = lambda tokens: False

    def execute(self, batch: ScheduledBatch) -> StepResult:
        for sequence in batch.admitted:
            self.tables[sequence.row] = [list(table) for table in sequence.block_tables]
            self.tokens[sequence.row] = list(sequence.token_ids)
        for growth in batch.grown:
            table = self.tables[growth.row][growth.group]
            if growth.place == len(table):
                table.append(growth.block_id)
            assert table[growth.place] == growth.block_id
        self._copy(batch)
        loaded = [(row, self.states[source]) for source, row in batch.state_loads]
        self.states.update(loaded)
        saves = {(save.entry, save.num_tokens): save.slot for save in batch.state_saves}
        result = StepResult(tokens=[])
        for index, row in enumerate(batch.rows):
            start, count = batch.starts[index], batch.counts[index]
            tokens, tables = self.tokens[row], self.tables[row]
            drafts = batch.drafts.get(index, [])
            tokens += drafts
            for position in range(start, start + count):
                self._compute(tokens, tables, position)
                if self.has_states:
                    self._continue_state(row, tokens, position)
                    if (slot := saves.pop((index, position + 1), None)) is not None:
                        self.states[slot] = self.states[row]
            end = start + count
            token = -1
            if batch.samples[index]:
                assert end == len(tokens)
                assert batch.num_logits[index] > len(drafts)
                if drafts:
                    end -= len(drafts)
                    del tokens[end:]
                    while drafts and self._read_all(tables, end - 1) % VOCABULARY == drafts[0]:
                        tokens.append(drafts[0])
                        drafts, end = drafts[1:], end + 1
                    result.accepted[index] = tokens[start + 1 :]
                token = self._read_all(tables, end - 1) % VOCABULARY
                if self.fails(tokens):
                    token = -1
                    result.failed.append(index)
                tokens.append(token)
            result.tokens.append(token)
            num_scored = batch.num_logits[index] - batch.samples[index]
            if num_scored and index not in batch.drafts:
                last = end - batch.samples[index]
                scored = tokens[last - num_scored + 1 : last + 1]
                scores = [TokenLogprobs(t, 0.0, 1, [], []) for t in scored]
                result.prompt_logprobs[index] = scores
        return result

    def _continue_state(self, row: int, tokens: list[int], position: int) -> None:
        before = self.states[row] if position else 1
        assert before == digest_of(tokens[:position]), "the state stands elsewhere"
        self.states[row] = continue_digest(before, tokens[position])

    def forget(self, block_ids: Iterable[int]) -> None:
        """Nobody may read them any more."""
        for block_id in block_ids:
            first = block_id * BLOCK_SIZE
            self.slots[first : first + BLOCK_SIZE] = [None] * BLOCK_SIZE

    def _copy(self, batch: ScheduledBatch) -> None:
        # All reads before all writes, as copies may run in any order: none may depend on another.
        contents = []
        for copy in batch.copies:
            source = copy.source * BLOCK_SIZE
            contents.append(self.slots[source : source + copy.num_tokens])
            assert None not in contents[-1]
        for copy, content in zip(batch.copies, contents, strict=True):
            target = copy.target * BLOCK_SIZE
            self.slots[target : target + BLOCK_SIZE] = [None] * BLOCK_SIZE
            self.slots[target : target + copy.num_tokens] = content
        sources = {copy.source for copy in batch.copies}
        assert not sources & {copy.target for copy in batch.copies}

    def _compute(self, tokens: list[int], tables: list[list[int]], position: int) -> None:
        before = self._read_all(tables, position - 1) if position else 1
        for table in tables:
            slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            assert slot >= 0, "written to a block that was given back"
            self.slots[slot] = continue_digest(before, tokens[position])
        self.num_computed += 1
        for table, window in zip(tables, self.windows, strict=True):
            if window is not None:  # the first token that it sees
                self._read(table, max(0, position - window + 1))

    def _read_all(self, tables: list[list[int]], position: int) -> int:
        digests = {self._read(table, position) for table in tables}
        assert len(digests) == 1, "the groups do not hold the same tokens"
        return digests.pop()

    def _read(self, table: list[int], position: int) -> int:
        assert table[position // BLOCK_SIZE] >= 0, "read from a block that was given back"
        digest = self.slots[table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE]
        assert digest is not None, "read before it was computed"
        return digest


class Loop:
    """Scheduler and machine in turn, with every invariant checked at every stage of every step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.machine = KVMachine(
            len(scheduler.kv.pool.blocks),
            scheduler.windows,
            has_states=scheduler.kv.states is not None,
        )
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.batches: list[ScheduledBatch] = []
        self.between: Callable[[ScheduledBatch], None] = lambda batch: None  # abort here, say
        self.step_s = 0.01

    def step(self) -> list[SequenceOutput]:
        scheduler = self.scheduler
        batch = scheduler.schedule()
        scheduler.check_invariants()
        self._check_batch(batch)
        self.batches.append(batch)
        result = self.machine.execute(batch)
        self.between(batch)
        outputs = scheduler.take_finished()
        if not batch.is_empty:
            outputs += scheduler.update(batch, result, self.step_s)
        self.machine.forget(b.id for b in scheduler.kv.pool.free_blocks() if not b.is_published)
        if scheduler.kv.states is not None:
            for slot in scheduler.kv.states.free:
                self.machine.states.pop(slot, None)
        scheduler.check_invariants()
        for output in outputs:
            self.take(output)
        return outputs

    def take(self, output: SequenceOutput) -> None:
        assert output.request_id not in self.reasons, "news after the end"
        self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def run(self, max_steps: int = 100_000) -> int:
        """Step until all work is done; the number of steps that took."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                return num_steps
            before = self.machine.num_computed
            finished = len(self.reasons)
            self.step()
            advanced = self.machine.num_computed > before or len(self.reasons) > finished
            assert advanced, "there is work, but nobody advances"
        raise AssertionError(f"not done after {max_steps} steps")

    def _check_batch(self, batch: ScheduledBatch) -> None:
        scheduler = self.scheduler
        assert batch.num_tokens <= scheduler.config.max_num_batched_tokens
        assert sum(batch.num_logits) <= scheduler.max_num_logits
        assert len(set(map(id, batch.sequences))) == len(batch.sequences)
        entries = zip(batch.sequences, batch.rows, batch.starts, batch.counts, strict=True)
        for index, (sequence, row, start, count) in enumerate(entries):
            num_drafts = len(batch.drafts.get(index, ()))
            assert sequence.row == row >= 0
            assert count > 0
            assert start == sequence.num_computed_tokens
            assert start + count - num_drafts <= sequence.num_tokens
            assert start + count < sequence.max_num_tokens
            for table in sequence.block_tables:
                assert start + count <= len(table) * BLOCK_SIZE
        grown = {growth.row for growth in batch.grown}
        assert not grown & {sequence.row for sequence in batch.admitted}
