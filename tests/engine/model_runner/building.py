"""Builders of sequences, and a scheduler by hand: a test says who computes how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.config import BLOCK_SIZE, SchedulerConfig
from octavo_engine.model_runner.runner import ModelRunner
from octavo_engine.state.batch import BlockGrowth, ScheduledBatch
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.state.sequence import Sequence
from tests.fakes.backend import FakeBackend

if TYPE_CHECKING:
    from octavo_engine.sampling.processors import ProcessorRegistry
    from octavo_engine.state.outputs import StepResult

CONFIG = SchedulerConfig(max_num_seqs=8, max_model_len=128)
LIMITS = BackendLimits(max_tokens=512, max_seqs=8, max_logit_rows=200, max_model_len=128)


def make_request(
    prompt: list[int],
    *,
    outputs: list[int] | None = None,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    **params: Any,
) -> EngineRequest:
    params.setdefault("max_tokens", None)
    return EngineRequest(
        request_id=f"r{prompt[0]}",
        prompt_token_ids=prompt,
        output_token_ids=outputs or [],
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=eos,
    )


def make_sequence(request: EngineRequest, *, row: int, blocks: list[int]) -> Sequence:
    sequence = Sequence(request, max_num_tokens=128)
    sequence.row = row
    sequence.set_block_tables([blocks])
    return sequence


class HandScheduler:
    """Runs sequences on a fake backend, as told; hands out blocks from the last to the first."""

    def __init__(
        self, *, num_blocks: int = 64, vocab: int = 512, processors: ProcessorRegistry | None = None
    ) -> None:
        self.backend = FakeBackend(num_blocks, vocab)
        self.backend.prepare(LIMITS, num_blocks)
        self.runner = ModelRunner(
            self.backend, scheduler_config=CONFIG, limits=LIMITS, processors=processors
        )
        self.free_blocks = list(range(num_blocks))
        self.free_rows = list(range(CONFIG.max_num_seqs))
        self.admitted: list[Sequence] = []

    def admit(self, request: EngineRequest, *, num_cached: int = 0) -> Sequence:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        blocks = [self.free_blocks.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        sequence = make_sequence(request, row=self.free_rows.pop(), blocks=blocks)
        sequence.num_computed_tokens = num_cached
        self.admitted.append(sequence)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Its blocks are overwritten with poison, and go to whoever comes next."""
        self.backend.poison_blocks(sequence.block_table)
        self.free_blocks += sequence.block_table
        self.free_rows.append(sequence.row)

    def step(
        self,
        *work: tuple[Sequence, int],
        num_logits: int | None = None,
        drafts: dict[int, list[int]] | None = None,
    ) -> StepResult:
        """Compute so many tokens of each, and the drafts; whoever is caught up samples."""
        batch = ScheduledBatch(admitted=self.admitted, drafts=drafts or {})
        self.admitted = []
        for sequence, count in work:
            start = sequence.num_computed_tokens
            if (start + count - 1) // BLOCK_SIZE == len(sequence.block_table):
                sequence.block_table.append(self.free_blocks.pop())
                batch.grown.append(
                    BlockGrowth(
                        sequence.row, len(sequence.block_table) - 1, sequence.block_table[-1]
                    )
                )
            samples = start + count == sequence.num_tokens
            batch.sequences.append(sequence)
            batch.rows.append(sequence.row)
            batch.starts.append(start)
            batch.counts.append(count)
            batch.samples.append(samples)
            batch.num_logits.append(int(samples) if num_logits is None else num_logits)
        for i, tokens in batch.drafts.items():
            batch.counts[i] += len(tokens)
            batch.num_logits[i] += len(tokens)
        result = self.runner.execute(batch)
        for i, sequence in enumerate(batch.sequences):
            sequence.num_computed_tokens += batch.counts[i]
            if result.tokens[i] >= 0:
                sequence.token_ids.append(result.tokens[i])
        return result

    def outputs(self, sequence: Sequence) -> list[int]:
        return sequence.token_ids[sequence.num_prompt_tokens :]
