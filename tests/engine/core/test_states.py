"""Models with recurrent states: what they say depends on the tokens and on nothing else.

The same requests go through an engine without a prefix cache in one chunk each, and through engines
in small memory, in small chunks, with hits and preemptions: every log-probability has the same
bits. Slots and blocks that are free are poisoned after each step.

Red when: a snapshot is named by a block more or less; a row's state is not zeroed or loaded at
admission; a preempted sequence goes on from its own row; csrc saves a state one token late; a state
stays behind draft tokens that were wrong.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.backends.backend import BackendLimits, HoldsStates
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.registry import _check_states
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.state_capacity import settle_states
from octavo_engine.errors import ConfigError
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.scheduler import SPARE_LOGITS, Scheduler
from octavo_engine.scheduling.speculation import Speculation
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import tiny_model
from tests.fakes.guessing import AnswerGuesser
from tests.fakes.random_life import RandomLife, random_requests

if TYPE_CHECKING:
    from octavo_engine.state.sequence import Sequence

MAX_MODEL_LEN = 192
MAX_NUM_SEQS = 4


class Rig(RandomLife):
    def __init__(
        self,
        name: str,
        dtype: Any,
        *,
        num_blocks: int,
        budget: int,
        num_snapshots: int,
        caching: bool = True,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching and num_snapshots > 0,
        )
        limits = BackendLimits(
            max_tokens=budget,
            max_seqs=MAX_NUM_SEQS,
            max_logit_rows=MAX_NUM_SEQS + SPARE_LOGITS,
            max_model_len=MAX_MODEL_LEN,
            num_state_slots=MAX_NUM_SEQS + num_snapshots,
        )
        backend = self.build(name, dtype)
        scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            windows=backend.cache_layout.windows,
            states=StateSnapshots(MAX_NUM_SEQS, num_snapshots, stride=32),
            now=lambda: 0.0,
        )
        executor = UniExecutor(
            backend, scheduler_config=config, limits=limits, num_blocks=num_blocks
        )
        super().__init__(backend, scheduler, executor)

    def build(self, name: str, dtype: Any) -> Any:
        model = tiny_model(name)
        shape = ModelConfig.from_hf(model.config)
        if dtype == "torch":
            return TorchBackend(shape, model.checkpoint(), max_model_len=MAX_MODEL_LEN)
        return NativeBackend(
            shape, model.checkpoint(), max_model_len=MAX_MODEL_LEN, dtype=dtype, num_threads=1
        )

    def poison(self) -> None:
        super().poison()
        assert isinstance(self.backend, HoldsStates)
        self.backend.poison_states([*self.free_states, *self.scheduler.free_rows])

    @property
    def free_states(self) -> list[int]:
        assert self.scheduler.kv.states is not None
        return self.scheduler.kv.states.free


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "torch"])
def test_the_bits_are_those_of_prompts_computed_whole(name: str, dtype: str) -> None:
    rng = random.Random(3)
    requests = random_requests(rng)
    truth = Rig(name, dtype, num_blocks=120, budget=512, num_snapshots=0)
    truth.run(requests, rng)
    num_hits = num_preemptions = 0
    for num_blocks, budget, num_snapshots in ((20, 32, 12), (60, 512, 3), (14, 9, 0)):
        rig = Rig(name, dtype, num_blocks=num_blocks, budget=budget, num_snapshots=num_snapshots)
        rig.run(requests, rng)
        stats = rig.check_as_in(truth, is_exact=dtype != "torch")
        num_hits += stats.prefix_hits
        num_preemptions += stats.preemptions
    assert num_hits > 0 and num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "torch"])
def test_drafts_change_no_bit(name: str, dtype: str) -> None:
    """Wrong ones, too, with snapshots at the same places, in slots that are scarce, among sequences
    that are preempted."""
    rng = random.Random(4)
    requests = random_requests(rng)
    truth = Rig(name, dtype, num_blocks=120, budget=512, num_snapshots=0)
    truth.run(requests, rng)

    def guesser(sequence: Sequence) -> AnswerGuesser:
        tokens = truth.tokens[sequence.request_id]
        return AnswerGuesser(tokens, sequence.num_prompt_tokens, honesty=0.7, rng=rng)

    num_accepted = num_wrong = 0
    for num_blocks, num_snapshots, caching in ((60, 40, True), (20, 5, True), (60, 24, False)):
        rig = Rig(
            name, dtype, num_blocks=num_blocks, budget=64, num_snapshots=num_snapshots,
            caching=caching,
        )  # fmt: skip
        rig.scheduler._speculation = Speculation(guesser)
        rig.run(requests, rng)
        if dtype != "torch":  # whose matrix products depend on the number of rows
            assert rig.tokens == truth.tokens
            assert rig.scores == truth.scores
        stats = rig.scheduler.stats()
        num_accepted += stats.spec_accepted_tokens
        num_wrong += stats.spec_draft_tokens - stats.spec_accepted_tokens
        assert len(rig.free_states) == num_snapshots or caching
    assert num_accepted > 100 < num_wrong


def test_memory_is_shared_out() -> None:
    settings = SchedulerConfig(max_num_seqs=8)
    states = settle_states(settings, 1000, state_bytes=10, length=4096, has_pages=True)
    assert (states.max_num_seqs, states.num_snapshots, states.memory) == (8, 23, 690)
    few = settle_states(settings, 100, state_bytes=10, length=4096, has_pages=True)
    assert (few.max_num_seqs, few.num_snapshots) == (5, 1)
    assert "--max-num-seqs is cut" in few.note
    alone = settle_states(settings, 100, state_bytes=10, length=4096, has_pages=False)
    assert (alone.max_num_seqs, alone.num_snapshots) == (8, 2)
    with pytest.raises(ConfigError, match="recurrent states of one sequence"):
        settle_states(settings, 10, state_bytes=30, length=4096, has_pages=True)
    uncached = SchedulerConfig(max_num_seqs=8, enable_prefix_caching=False)
    for num_drafts, count in ((0, 0), (5, 5), (64, 23)):
        states = settle_states(
            uncached, 1000, state_bytes=10, length=4096, has_pages=True, num_drafts=num_drafts
        )
        assert states.num_snapshots == count
    none = settle_states(settings, 1000, state_bytes=0, length=4096, has_pages=True)
    assert (none.max_num_seqs, none.memory, none.note) == (8, 1000, "")


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("lfm2", {"tensor_parallel_size": 2}, "recurrent states, which --tensor-parallel"),
        ("gemma3n", {"tensor_parallel_size": 2}, "several streams, which --tensor-parallel"),
        ("gemma3n", {"device": "cuda"}, "several streams, which --device cuda"),
    ],
)
def test_what_does_not_compute_states_says_so(
    name: str, settings: dict[str, Any], what: str
) -> None:
    shape = ModelConfig.from_hf(tiny_model(name).config)
    with pytest.raises(ConfigError, match=what):
        _check_states(EngineConfig(model="m").replace(**settings), shape)
