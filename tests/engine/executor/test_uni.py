"""The executor in one process: it owns its backend from preparation to close."""

from __future__ import annotations

import pytest

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.config import SchedulerConfig
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.state.batch import ScheduledBatch
from tests.engine.model_runner.building import make_request, make_sequence
from tests.fakes.backend import FakeBackend

LIMITS = BackendLimits(max_tokens=64, max_seqs=4, max_logit_rows=68, max_model_len=64)


def make_executor(backend: FakeBackend) -> UniExecutor:
    config = SchedulerConfig(max_num_seqs=4, max_model_len=64)
    return UniExecutor(backend, scheduler_config=config, limits=LIMITS, num_blocks=8)


def make_batch(prompt: list[int], *, block: int) -> ScheduledBatch:
    sequence = make_sequence(make_request(prompt), row=0, blocks=[block])
    return ScheduledBatch(
        sequences=[sequence],
        rows=[0],
        starts=[0],
        counts=[len(prompt)],
        num_logits=[1],
        samples=[True],
        admitted=[sequence],
    )


def test_a_batch_is_computed_on_the_prepared_backend() -> None:
    backend = FakeBackend(8)
    executor = make_executor(backend)
    assert backend.limits == LIMITS
    assert executor.execute(make_batch([4, 5], block=7)).tokens == [backend.truth([4, 5])]


def test_what_the_backend_raises_is_not_hidden() -> None:
    backend = FakeBackend(8)

    def raise_error(step: object) -> None:
        raise RuntimeError("the device is gone")

    backend.on_execute = raise_error
    with pytest.raises(RuntimeError, match="the device is gone"):
        make_executor(backend).execute(make_batch([4, 5], block=7))


def test_poisoned_blocks_are_felt_by_who_reads_them() -> None:
    backend = FakeBackend(8)
    executor = make_executor(backend)
    batch = make_batch([4, 5], block=7)
    executor.execute(batch)
    executor.poison_blocks([7])
    batch.starts, batch.counts, batch.admitted = [2], [1], []
    assert executor.execute(batch).failed == [0]


def test_the_backend_is_closed_once() -> None:
    backend = FakeBackend(8)
    executor = make_executor(backend)
    executor.close()
    assert backend.is_closed
    backend.is_closed = False
    executor.close()
    assert not backend.is_closed
