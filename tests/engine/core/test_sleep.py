"""Sleep in the core: the KV cache's memory is let go only when nothing needs it, and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from tests.fakes.backend import POISON, FakeBackend
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from octavo_engine.core.engine import Engine

CONFIG = EngineConfig(
    device="sim",
    max_model_len=256,
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
    sim=SimConfig(kv_blocks=64),
)


class Releasing(FakeBackend):
    """Its memory can be taken away; what was in it is lost."""

    is_released = False

    def release_kv(self) -> None:
        self.is_released = True
        self.kv[:] = POISON

    def restore_kv(self) -> None:
        self.is_released = False


@pytest.fixture
def backend() -> Releasing:
    return Releasing(64)


@pytest.fixture
def engine(backend: Releasing) -> Engine:
    return build_engine(CONFIG, backend=backend)[0]


def answer(engine: Engine, number: int) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were found in the cache."""
    request = make_request(40, max_tokens=4, temperature=0.0, request_id=f"r{number}")
    engine.add(request)
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for output in engine.step().outputs:
            tokens += output.token_ids
            cached = max(cached, output.num_cached_tokens)
    engine.scheduler.check_invariants()
    return tokens, cached


def test_after_waking_answers_are_the_same_and_nothing_is_cached(engine, backend):
    first, _ = answer(engine, 1)
    assert answer(engine, 2) == (first, 39)  # all but the last

    engine.sleep(on=True)
    assert backend.is_released
    engine.sleep(on=True)  # a second time does no more
    engine.sleep(on=False)
    assert not backend.is_released
    assert answer(engine, 3) == (first, 0)


def test_while_something_runs_the_memory_stays(engine, backend):
    engine.add(make_request(40, max_tokens=4))
    engine.step()
    engine.sleep(on=True)
    assert not backend.is_released
    assert np.count_nonzero(backend.kv != POISON)


class OnADevice(Releasing):
    """Its weights have memory of their own; what is done with it is written down."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.log: list[str] = []

    def release_kv(self) -> None:
        super().release_kv()
        self.log.append("release kv")

    def restore_kv(self) -> None:
        super().restore_kv()
        self.log.append("restore kv")

    def release_weights(self, *, keep: bool) -> None:
        self.log.append("keep weights" if keep else "drop weights")

    def restore_weights(self) -> None:
        self.log.append("restore weights")


@pytest.mark.parametrize(("level", "reported"), [(1, "keep weights"), (2, "drop weights")])
def test_a_device_lets_go_of_weights_too_and_has_them_back_before_the_cache(level, reported):
    backend = OnADevice(64)
    engine = build_engine(CONFIG, backend=backend)[0]
    first, _ = answer(engine, 1)
    engine.heartbeat.begin()
    engine.sleep(on=True, level=level)
    engine.sleep(on=False)
    assert backend.log == ["release kv", reported, "restore weights", "restore kv"]
    assert engine.heartbeat.pulse().step_age_s == 0.0  # however long that takes, it is no hang
    assert answer(engine, 2) == (first, 0)


def test_a_backend_that_cannot_goes_on():
    engine = build_engine(CONFIG, backend=FakeBackend(64))[0]
    before, _ = answer(engine, 1)
    engine.sleep(on=True)
    engine.sleep(on=False)
    assert answer(engine, 2)[0] == before
