"""Scheduler, runner and a backend that knows the truth: whatever is scheduled, it comes out.

A small pool and a small token budget make sequences share blocks, wait, be cut into chunks, be
preempted and computed again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.config import SchedulerConfig
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.scheduling.scheduler import SPARE_LOGITS, Scheduler
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.backend import FakeBackend

if TYPE_CHECKING:
    from octavo_engine.state.outputs import SequenceOutput

MAX_SEQS, MAX_MODEL_LEN, MAX_TOKENS = 6, 160, 48


class Together:
    def __init__(self, *, num_blocks: int) -> None:
        config = SchedulerConfig(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_MODEL_LEN
        )
        limits = BackendLimits(
            max_tokens=MAX_TOKENS,
            max_seqs=MAX_SEQS,
            max_logit_rows=MAX_SEQS + SPARE_LOGITS,
            max_model_len=MAX_MODEL_LEN,
        )
        self.backend = FakeBackend(num_blocks)
        self.scheduler = Scheduler(config, num_blocks=num_blocks, now=lambda: 0.0)
        self.executor = UniExecutor(
            self.backend, scheduler_config=config, limits=limits, num_blocks=num_blocks
        )
        self.news: dict[str, list[SequenceOutput]] = {}

    def add(self, name: str, prompt: list[int], *, outputs: list[int] | None = None, **params: Any):
        self.news[name] = []
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                output_token_ids=outputs or [],
                params=SamplingParams(**params),
            )
        )

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if not batch.is_empty:
            result = self.executor.execute(batch)
            for output in self.scheduler.update(batch, result, 0.0):
                self.news[output.request_id].append(output)
        self.scheduler.check_invariants()

    def finish(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the work does not come to an end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.news[name] for token in output.token_ids]


@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    together = Together(num_blocks=13)
    stems = [[rng.randrange(512) for _ in range(60)] for _ in range(3)]
    expected = {}
    for number in range(40):
        prompt = rng.choice(stems)[: rng.randint(1, 60)]
        prompt = prompt + [rng.randrange(512) for _ in range(rng.choice([0, 0, 1, 20]))]
        max_tokens = rng.choice([1, 5, 80])
        name = f"{seed}-{number}"
        together.add(name, prompt, max_tokens=max_tokens, ignore_eos=True)
        expected[name] = together.backend.continuation(prompt, max_tokens)
        for _ in range(rng.randint(0, 12)):
            together.step()
    together.finish()
    assert {name: together.tokens(name) for name in expected} == expected
    stats = together.scheduler.stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0  # the hard cases did occur


def test_prompt_scores_are_whole_whatever_the_chunks_are() -> None:
    together = Together(num_blocks=40)
    prompt = [number * 7 % 512 for number in range(130)]
    together.add("other", prompt[:40], max_tokens=60)
    together.add("scored", prompt, max_tokens=3, prompt_logprobs=0, logprobs=1)
    together.finish()
    scores = [one for output in together.news["scored"] for one in output.prompt_logprobs]
    assert [one.token_id for one in scores] == prompt[1:]
    chosen = [one for output in together.news["scored"] for one in output.logprobs]
    assert [one.token_id for one in chosen] == together.tokens("scored")
    assert together.tokens("scored") == together.backend.continuation(prompt, 3)


def test_a_stream_goes_on_elsewhere_from_its_tokens() -> None:
    first, second = Together(num_blocks=20), Together(num_blocks=20)
    first.add("r", [5, 6, 7], max_tokens=30, temperature=0.9, seed=4)
    first.finish()
    whole = first.tokens("r")
    second.add("r", [5, 6, 7], outputs=whole[:11], max_tokens=30, temperature=0.9, seed=4)
    second.finish()
    assert second.tokens("r") == whole[11:]


def test_a_request_that_is_not_a_number_leaves_its_mates_alone() -> None:
    together = Together(num_blocks=20)
    truth = together.backend.continuation([1, 2, 3], 12)
    together.backend.fail_after([1, 2, 3, *truth[:5]])
    together.add("sick", [1, 2, 3], max_tokens=12)
    together.add("well", [4, 5, 6], max_tokens=12)
    together.finish()
    assert together.tokens("sick") == truth[:5]
    assert together.news["sick"][-1].finish_reason == "error"
    assert together.tokens("well") == together.backend.continuation([4, 5, 6], 12)
