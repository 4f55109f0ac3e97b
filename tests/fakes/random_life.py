"""Requests that come, go, pause and are preempted at random, through a scheduler and a backend.

After each step the memory that holds nothing is poisoned, so that an answer read from it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.engine.backends.driver import random_tokens
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    import random

    from octavo_engine.backends.native.backend import NativeBackend
    from octavo_engine.backends.torch.backend import TorchBackend
    from octavo_engine.executor.uni import UniExecutor
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import EngineStats
    from octavo_engine.state.request import EngineRequest


class RandomLife:
    """Scheduler and backend in turn; all tokens and log-probabilities by request."""

    def __init__(
        self, backend: NativeBackend | TorchBackend, scheduler: Scheduler, executor: UniExecutor
    ) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self.executor = executor
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}

    def check_as_in(self, truth: RandomLife, *, is_exact: bool) -> EngineStats:
        """The same tokens and log-probabilities, and no block is left in use."""
        assert self.tokens == truth.tokens
        if is_exact:
            assert self.scores == truth.scores
        else:  # its matrix products depend on the number of rows
            for request, scores in self.scores.items():
                np.testing.assert_allclose(scores, truth.scores[request], rtol=1e-3, atol=1e-4)
        stats = self.scheduler.stats()
        assert stats.kv_blocks_used == 0
        return stats

    def note(self, batch: ScheduledBatch) -> None:
        """For those who look at a batch once it is computed."""

    def poison(self) -> None:
        free = self.scheduler.kv.pool.free_blocks()
        self.backend.poison_blocks([block.id for block in free if not block.is_published])

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if not batch.is_empty:
            result = self.executor.execute(batch)
            self.note(batch)
            for output in self.scheduler.update(batch, result, 0.0):
                assert output.finish_reason in (None, "length"), output
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                found = [*output.prompt_logprobs, *output.logprobs]
                self.scores.setdefault(output.request_id, []).extend(one.logprob for one in found)
        self.scheduler.check_invariants()
        self.poison()

    def run(self, requests: list[EngineRequest], rng: random.Random) -> None:
        for request in rng.sample(requests, len(requests)):
            self.scheduler.add(request)
            for _ in range(rng.randint(0, 4)):
                self.step()
            running = self.scheduler.running
            if running and rng.random() < 0.2:
                self.scheduler._preempt(rng.choice(running))
            if running and rng.random() < 0.2:
                name = rng.choice(running).request_id
                self.scheduler.suspend(name, on=True)
                self.step()
                self.scheduler.suspend(name, on=False)
        while self.scheduler.has_work:
            self.step()


def random_requests(rng: random.Random) -> list[EngineRequest]:
    """Ten, of two beginnings that they share."""
    stems = [random_tokens(120, seed=seed) for seed in range(2)]
    requests = []
    for index in range(10):
        prompt = rng.choice(stems)[: rng.choice([3, 17, 60, 96, 97, 120])]
        prompt += random_tokens(rng.choice([0, 0, 1, 20]), seed=50 + index)
        requests.append(
            make_request(
                prompt,
                request_id=str(index),
                max_tokens=rng.choice([1, 8, 40]),
                logprobs=0,
                prompt_logprobs=rng.choice([None, None, None, 0]),
                temperature=rng.choice([0.0, 1.0]),
                seed=index,
                ignore_eos=True,
            )
        )
    return requests
