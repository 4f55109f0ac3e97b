"""Cores with tokens of their own and some experts each: the bits of one that has them all."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.lockstep import Lockstep
from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.errors import WorkerLost
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.ranks import MAX_MODEL_LEN, alone, mixed_steps
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import MIXTURES, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from numpy.typing import NDArray

    from tests.engine.models.tiny import TinyModel

DIVIDED = [name for name in MIXTURES if name not in RECURRENT]


def compute(backend: NativeBackend, number: int) -> NDArray[np.float32]:
    """Other requests, and another number of steps, for each core; the third one has none."""
    if number == 0:
        return mixed_steps(backend)
    if number == 1:
        return run_alone(backend, random_tokens(90, seed=7), chunks=[40, 1, 1, 17, 1])
    Driver(backend)
    return np.zeros(0, np.float32)


@contextmanager
def cores(
    model: TinyModel, size: int, *, patience_s: float = 60.0, num_threads: int = 1, **options: Any
) -> Iterator[list[NativeBackend]]:
    file = os.memfd_create("octavo-test")
    made = [
        NativeBackend(
            ModelConfig.from_hf(model.config),
            model.checkpoint(),
            max_model_len=MAX_MODEL_LEN,
            num_threads=num_threads,
            spreads_experts=True,
            peers=RankPlace(Shard(rank, size), file, patience_s),
            **options,
        )
        for rank in range(size)
    ]
    try:
        yield made
    finally:
        for core in made:
            core.close()
        os.close(file)


def check_bits(model: TinyModel, size: int, **options: Any) -> None:
    threads = options.pop("num_threads", 1)
    with (
        cores(model, size, num_threads=threads, **options) as made,
        ThreadPoolExecutor(size) as pool,
    ):
        found = list(pool.map(compute, made, range(size)))
    for number, logits in enumerate(found):
        np.testing.assert_array_equal(logits, compute(alone(model, **options), number))


@pytest.mark.parametrize("name", DIVIDED)
def test_each_family_has_the_bits_of_one_core(name: str) -> None:
    check_bits(tiny_model(name), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "f32"},
        {"quantization": "int8"},
        {"quantization": "int4", "activation_bits": 8},
        {"num_threads": 2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_three_cores_of_which_one_has_nothing_to_do(name: str, options: dict[str, Any]) -> None:
    check_bits(tiny_model(name), 3, **options)


def test_each_core_has_its_experts_only_and_counts_their_rows() -> None:
    model = tiny_model("mixtral")
    experts = ModelConfig.from_hf(model.config).experts
    assert experts is not None
    with cores(model, 2) as made, ThreadPoolExecutor(2) as pool:
        list(pool.map(compute, made, (1, 2)))
        counts = np.array([core.expert_rank_tokens() for core in made])
    assert counts[0, 1] == counts[1, 0] == 0
    assert counts.diagonal().min() > 0
    rows = 90 * ModelConfig.from_hf(model.config).num_layers * experts.top_k
    assert counts.sum() == rows


def test_a_core_that_hangs_is_named() -> None:
    heard: list[WorkerLost] = []
    with cores(tiny_model("mixtral"), 3, patience_s=0.5) as made, ThreadPoolExecutor(3) as pool:
        first, *_ = pool.map(Driver, made)
        made[2].watch_workers(heard.append)
        hung = made[1]._lockstep
        assert hung is not None
        with hung._turn:
            request = first.add(0, random_tokens(5))
            with pytest.raises(WorkerLost, match="data-parallel rank 1 of 3 has ended or hangs"):
                first.step([(request, 5)])
        until(lambda: heard)
        assert "rank 1 of 3" in str(heard[0])


class Steps:
    """A core that computes nothing: its steps are a barrier of all cores."""

    def __init__(self, rank: int, file: int) -> None:
        self.ranks = _native.Ranks(rank, 2, 1, file, 60.0)
        self.num_empty = 0
        self.lockstep = Lockstep(self.ranks, self._run_empty)

    def _run_empty(self) -> None:
        self.num_empty += 1
        if not self.ranks.barrier():
            raise RuntimeError("a rank has failed")

    def step(self) -> None:
        with self.lockstep.step():
            assert self.ranks.barrier()


@contextmanager
def two_steppers() -> Iterator[tuple[Steps, Steps]]:
    file = os.memfd_create("octavo-test")
    first, second = (Steps(rank, file) for rank in range(2))
    starting = threading.Thread(target=first.lockstep.start)
    starting.start()
    second.lockstep.start()
    starting.join()
    yield first, second
    for each in (first, second):
        each.lockstep.close()
    os.close(file)


def test_a_core_with_nothing_to_do_takes_every_step_of_the_other() -> None:
    with two_steppers() as (first, second):
        for _ in range(20):
            first.step()
        until(lambda: second.num_empty == 20)
        for _ in range(5):
            second.step()
        until(lambda: first.num_empty == 5)
        assert second.num_empty == 20


def test_cores_that_both_have_steps_take_them_together() -> None:
    """An empty step in the place of one that is about to come would cost a whole one."""
    with two_steppers() as (first, second):

        def work(core: Steps) -> None:
            for number in range(60):
                core.step()
                time.sleep(0.002 if number % 2 == core.ranks.rank else 0.0)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (first, second)))
        assert first.num_empty + second.num_empty <= 20


def until(fact: Any) -> None:
    end = time.monotonic() + 20
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.005)
