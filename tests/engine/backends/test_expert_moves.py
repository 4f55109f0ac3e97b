"""Experts that move between ranks while requests run: no bit of an answer changes."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.native.expert_balance import first_slots
from octavo_engine.config import EplbConfig
from tests.engine.backends.ranks import alone, check_as_alone, mixed_steps
from tests.engine.backends.test_expert_cores import compute, cores
from tests.engine.backends.test_expert_parallel import spread
from tests.engine.models.tiny import tiny_model
from tests.kernels.harness import Recorder, pack

if TYPE_CHECKING:
    from typing import Any

    from octavo_engine.backends.native.backend import NativeBackend
    from tests.engine.backends.ranks import ThreadRanks

FORMATS = [
    {"dtype": "f32"},
    {"quantization": "int8"},
    {"quantization": "int4", "activation_bits": 8},
]


class Shuffler:
    """In place of a balancer: after each step every slot gets some expert, the same everywhere."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program
        self._random = random.Random(3)
        self.num_moves = 0

    def after_step(self) -> None:
        layouts = []
        for slots, experts in zip(
            self._program.slot_tokens(), self._program.expert_tokens(), strict=True
        ):
            layout = list(range(len(experts)))
            layout += self._random.choices(layout, k=len(slots) - len(experts))
            self._random.shuffle(layout)
            layouts.append(layout)
        self._program.move_experts(layouts)
        self.num_moves += 1


def shuffle(backend: NativeBackend) -> Shuffler:
    assert backend._compiled is not None
    shuffler = Shuffler(backend._compiled.program)
    backend._balancer = shuffler  # type: ignore[assignment]
    return shuffler


class ShuffledRanks:
    """Ranks whose experts are elsewhere after each step."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def prepare(self, *args: Any) -> None:
        self._ranks.prepare(*args)
        self.shufflers = [shuffle(rank) for rank in self._ranks.ranks]


@pytest.mark.parametrize("redundant", [0, 3])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3", "llama4"])
def test_answers_keep_their_bits_wherever_experts_are(name: str, size: int, redundant: int) -> None:
    """With biases, groups of experts, weighed inputs; and with experts that several ranks have."""
    model = tiny_model(name)
    eplb = EplbConfig(num_redundant_experts=redundant)
    ranks = ShuffledRanks(spread(model, size, eplb=eplb))
    np.testing.assert_array_equal(mixed_steps(ranks), mixed_steps(alone(model)))
    assert {shuffler.num_moves for shuffler in ranks.shufflers} == {5}
    ranks.close()


@pytest.mark.parametrize(
    "options", FORMATS, ids=lambda options: " ".join(map(str, options.values()))
)
def test_formats_and_threads(options: dict[str, Any]) -> None:
    model = tiny_model("gpt-oss")
    eplb = EplbConfig(num_redundant_experts=2)
    ranks = ShuffledRanks(spread(model, 2, num_threads=4, eplb=eplb, **options))
    np.testing.assert_array_equal(mixed_steps(ranks), mixed_steps(alone(model, **options)))
    ranks.close()


@pytest.mark.parametrize("redundant", [0, 2])
def test_experts_move_by_what_they_have_to_do(redundant: int) -> None:
    model = tiny_model("mixtral")
    eplb = EplbConfig(window_size=1, step_interval=1, num_redundant_experts=redundant)
    ranks = spread(model, 2, eplb=eplb)
    check_as_alone(ranks, model)
    slots = [rank._balancer._slots for rank in ranks.ranks]  # type: ignore[union-attr]
    assert slots[0] == slots[1], "each rank came to the same"
    assert any(own != first_slots(4 + redundant, 4) for own in slots[0]), "some moved"


def test_without_its_setting_experts_stay() -> None:
    ranks = spread(tiny_model("mixtral"), 2)
    mixed_steps(ranks)
    assert all(rank._balancer is None for rank in ranks.ranks)
    ranks.close()


def test_rows_are_counted_for_the_rank_that_computed_them() -> None:
    """And those of an expert that two ranks have, half for each."""
    model = tiny_model("mixtral")
    ranks = spread(model, 2, eplb=EplbConfig(num_redundant_experts=4))
    mixed_steps(ranks)
    counts = ranks.ranks[0].expert_rank_tokens()
    assert sum(counts) == sum(map(sum, ranks.ranks[0].expert_layer_tokens()))
    assert max(counts) < 1.1 * min(counts), "each has all four"
    ranks.close()


@pytest.mark.parametrize("redundant", [0, 2])
def test_cores_with_requests_of_their_own(redundant: int) -> None:
    """One of them takes empty steps."""
    model = tiny_model("mixtral")
    eplb = EplbConfig(window_size=1, step_interval=2, num_redundant_experts=redundant)
    with cores(model, 3, eplb=eplb) as made, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(compute, made, range(3)))
        slots = [core._balancer._slots for core in made]  # type: ignore[union-attr]
    for number, logits in enumerate(found):
        np.testing.assert_array_equal(logits, compute(alone(model), number))
    assert slots[0] == slots[1] == slots[2]
    assert any(own != first_slots(4 + redundant, 4) for own in slots[0])


COLS, WIDTH, EXPERTS, TOP_K = 512, 768, 4, 2
RANDOM = np.random.default_rng(3)
GATE_UP = RANDOM.standard_normal((EXPERTS, 2 * WIDTH, COLS)).astype(np.float32)
DOWN = RANDOM.standard_normal((EXPERTS, COLS, WIDTH)).astype(np.float32)


class Half:
    """Two of four large experts, and the program that computes them."""

    def __init__(self, rank: int, file: int) -> None:
        team = _native.Team(1, "")
        self.ranks = _native.Ranks(rank, 2, 1, file, 30.0)
        own = slice(2 * rank, 2 * rank + 2)
        gate_up, down = (
            tuple(pack(team, w, "f32") for w in whole[own]) for whole in (GATE_UP, DOWN)
        )
        self.weights = (gate_up, down)
        sizes = [COLS, EXPERTS, COLS, TOP_K * COLS, TOP_K * WIDTH, TOP_K * COLS]
        offsets = np.cumsum([0, *(4 * 4 * size for size in sizes)])
        self.program = _native.Program(team, int(offsets[-1]), 4, 4, ranks=self.ranks)
        src, scores, dst, gathered, hidden, results = (
            self.program.buffer(int(offset), size, "f32", "T")
            for offset, size in zip(offsets, sizes, strict=False)
        )
        self.program.moe(
            dst, src, scores, gathered, hidden, results, gate_up, down,
            top_k=TOP_K, renormalise=True, activation="silu", first_slot=2 * rank, num_slots=4,
            num_experts=4,
        )  # fmt: skip


def test_experts_larger_than_the_room_for_what_moves() -> None:
    """They go in pieces, one of each at a time: none is lost where two are exchanged."""
    file = os.memfd_create("octavo-test")
    halves = [Half(rank, file) for rank in range(2)]
    assert 4 * halves[0].weights[0][0].nbytes > 8 << 20
    layout = [2, 0, 3, 1]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda half: half.program.move_experts([layout]), halves))
    for slot, expert in enumerate(layout):
        for kind, whole in enumerate((GATE_UP, DOWN)):
            held = halves[slot // 2].weights[kind][slot % 2].unpack()
            np.testing.assert_array_equal(held, whole[expert])
    os.close(file)


def test_what_cannot_be_a_layout_is_refused() -> None:
    file = os.memfd_create("octavo-test")
    program = Half(0, file).program
    for layouts, message in (
        ([], "slots of 0 mixtures; there are 1"),
        ([[0, 1, 2]], "3 slots; there are 4"),
        ([[0, 1, 2, 4]], "expert 4 of 4"),
        ([[0, 1, 2, -1]], "expert -1 of 4"),
        ([[0, 1, 2, 2]], "no slot has expert 3"),
    ):
        with pytest.raises(ValueError, match=message):
            program.move_experts(layouts)
    os.close(file)


def test_a_process_alone_has_nowhere_to_move_them() -> None:
    recorder = Recorder(_native.Team(1, ""), 4)
    with pytest.raises(ValueError, match="there are no other ranks"):
        recorder.program.move_experts([])
