"""Models whose layers have windows: what they say does not depend on what was given back.

The same requests go through an engine that frees what left the windows, in small memory, in chunks,
with hits and preemptions, and through one whose layers all keep everything: every log-probability
has the same bits. Memory that is free and that nobody may find is poisoned after each step.

Red when: `trim` gives back a block more; `match_groups` forgets that a window must be whole; a
sequence is admitted with fewer blocks in a window; csrc reads a table from its beginning.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.caches import one_group
from octavo_engine.config import SchedulerConfig
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.scheduler import SPARE_LOGITS, Scheduler
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.tiny import tiny_model
from tests.fakes.random_life import RandomLife, random_requests
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from octavo_engine.state.batch import ScheduledBatch

MAX_MODEL_LEN = 192
# One window in all layers; every other one; two of three; chunks in two of three.
FAMILIES = ["mistral", "gemma2", "gemma3", "llama4"]
NUM_LAYERS = {"mistral": 2, "gemma2": 4, "gemma3": 6, "llama4": 3}


def make_backend(family: str, dtype: Any, *, frees: bool) -> NativeBackend | TorchBackend:
    model = tiny_model(family, num_hidden_layers=NUM_LAYERS[family])
    config = ModelConfig.from_hf(model.config)
    backend: NativeBackend | TorchBackend
    if dtype == "torch":
        backend = TorchBackend(config, model.checkpoint(), max_model_len=MAX_MODEL_LEN)
    else:
        backend = NativeBackend(
            config, model.checkpoint(), max_model_len=MAX_MODEL_LEN, dtype=dtype, num_threads=1
        )
    if not frees:
        backend.cache_layout = one_group(config.caches())
    return backend


class Rig(RandomLife):
    def __init__(
        self,
        backend: NativeBackend | TorchBackend,
        *,
        num_blocks: int,
        budget: int,
        caching: bool,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_prefix_caching=caching,
        )
        limits = BackendLimits(
            max_tokens=budget,
            max_seqs=4,
            max_logit_rows=4 + SPARE_LOGITS,
            max_model_len=max_model_len,
        )
        scheduler = Scheduler(
            config, num_blocks=num_blocks, windows=backend.cache_layout.windows, now=lambda: 0.0
        )
        executor = UniExecutor(
            backend, scheduler_config=config, limits=limits, num_blocks=num_blocks
        )
        super().__init__(backend, scheduler, executor)
        self.most_held: dict[str, int] = {}

    def note(self, batch: ScheduledBatch) -> None:
        for sequence in batch.sequences:
            held = sum(block >= 0 for table in sequence.block_tables for block in table)
            name = sequence.request_id
            self.most_held[name] = max(held, self.most_held.get(name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "torch"])
def test_the_bits_are_those_of_layers_that_keep_everything(family: str, dtype: str) -> None:
    rng = random.Random(family)
    requests = random_requests(rng)
    truth = Rig(make_backend(family, dtype, frees=False), num_blocks=120, budget=512, caching=False)
    truth.run(requests, rng)
    num_hits = num_preemptions = 0
    for pages, budget, caching in ((11, 32, True), (60, 512, True), (14, 9, False)):
        backend = make_backend(family, dtype, frees=True)
        num_blocks = pages * len(backend.cache_layout.groups)
        rig = Rig(backend, num_blocks=num_blocks, budget=budget, caching=caching)
        rig.run(requests, rng)
        stats = rig.check_as_in(truth, is_exact=dtype != "torch")
        num_hits += stats.prefix_hits
        num_preemptions += stats.preemptions
    assert num_hits > 0 and num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_holds_its_windows_and_no_more(family: str) -> None:
    backend = make_backend(family, "f32", frees=True)
    rig = Rig(backend, num_blocks=400, budget=16, caching=False)
    prompt = random_tokens(150)
    rig.run([make_request(prompt, request_id="long", max_tokens=40)], random.Random(0))
    # Of a window of 24 tokens: the block under way, two that it sees, one that a chunk may reach.
    per_group = [13 if window is None else 4 for window in backend.cache_layout.windows]
    assert rig.most_held["long"] <= sum(per_group)
    assert rig.scheduler.kv.needs.blocks(MAX_MODEL_LEN) == sum(per_group) - per_group.count(13)


def test_a_long_text_runs_in_a_fifth_of_the_memory_that_all_its_layers_would_fill() -> None:
    """Five layers of six with a window, as Gemma 3 has them; a sixth is the least there can be."""
    length = 2000
    model = tiny_model(
        "gemma3",
        num_hidden_layers=6,
        max_position_embeddings=2048,
        sliding_window_pattern=6,
    )
    config = ModelConfig.from_hf(model.config)
    backend = NativeBackend(config, model.checkpoint(), max_model_len=2048, dtype="f32")
    kept = one_group(config.caches()).page_bytes(backend.kv_format.bytes_of) * (length // 16)
    num_blocks = kept // 5 // backend.kv_bytes_per_block
    prompt = random_tokens(length - 20, seed=5)
    rig = Rig(backend, num_blocks=num_blocks, budget=32, caching=True, max_model_len=2048)
    request = make_request(prompt, request_id="r", max_tokens=20, temperature=0.0, ignore_eos=True)
    rig.run([request], random.Random(0))
    kept_backend = NativeBackend(config, model.checkpoint(), max_model_len=2048, dtype="f32")
    kept_backend.cache_layout = one_group(config.caches())
    limits = BackendLimits(max_tokens=2048, max_seqs=1, max_logit_rows=2048, max_model_len=2048)
    driver = Driver(kept_backend, limits=limits)
    tokens = [*prompt, *rig.tokens["r"]]
    (truth,) = driver.step([(driver.add(0, tokens), len(tokens))])
    assert rig.tokens["r"] == truth[len(prompt) - 1 : -1].argmax(axis=1).tolist()
    assert rig.most_held["r"] <= num_blocks


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "torch"])
def test_logits_of_freed_windows_are_transformers_own(family: str, dtype: str) -> None:
    model = tiny_model(family, num_hidden_layers=NUM_LAYERS[family])
    token_ids = random_tokens(170, seed=3)
    backend = make_backend(family, dtype, frees=True)
    logits = run_alone(backend, token_ids, chunks=[50, 1, 1, 30, 7, 40, 1], frees=True)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
    whole = run_alone(make_backend(family, dtype, frees=False), token_ids)
    np.testing.assert_allclose(logits, whole, **FLOAT32)


def test_bf16_of_freed_windows_is_that_of_kept_ones() -> None:
    for family in FAMILIES:
        token_ids = random_tokens(170, seed=4)
        freed = make_backend(family, "bf16", frees=True)
        kept = make_backend(family, "bf16", frees=False)
        logits = run_alone(freed, token_ids, chunks=[33, 1, 70], frees=True)
        assert np.array_equal(logits, run_alone(kept, token_ids))


def test_a_block_that_is_given_back_too_early_shows() -> None:
    """The poison of the tests above would be seen."""
    rig = Rig(make_backend("gemma3", "f32", frees=True), num_blocks=400, budget=64, caching=False)
    rig.scheduler.add(make_request(random_tokens(60), request_id="r", max_tokens=30))
    rig.step()
    (sequence,) = rig.scheduler.running
    windowed = rig.backend.cache_layout.windows.index(24)
    held = [block for block in sequence.block_tables[windowed] if block >= 0]
    rig.backend.poison_blocks(held[1:2])  # the first is of tokens that the 61st does not see
    with pytest.raises(AssertionError, match="not finite"):
        rig.step()
