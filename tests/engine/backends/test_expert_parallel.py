"""Ranks that have some experts each as a whole: the bits of one process, whatever their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.native.shard import Shard
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.checkpoint import StoredTensor
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.ranks import FORMATS, ThreadRanks, alone, check_as_alone, mixed_steps
from tests.engine.backends.test_native_models import reference_logits
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.recurrent import RECURRENT
from tests.engine.models.tiny import MIXTURES, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from octavo_engine.backends.native.graph import NativeExperts
    from tests.engine.models.tiny import TinyModel

DIVIDED = [name for name in MIXTURES if name not in RECURRENT]


def spread(model: TinyModel, size: int, *, num_threads: int = 0, **options: Any) -> ThreadRanks:
    threads = num_threads or size
    return ThreadRanks(model, size, num_threads=threads, spreads_experts=True, **options)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", DIVIDED)
def test_each_family_has_the_bits_of_one_process(name: str, size: int) -> None:
    model = tiny_model(name)
    ranks = spread(model, size)
    logits = mixed_steps(ranks)
    np.testing.assert_array_equal(logits, mixed_steps(alone(model)))
    ranks.close()


@pytest.mark.parametrize("name", DIVIDED)
def test_each_family_agrees_with_the_reference(name: str) -> None:
    model = tiny_model(name)
    tokens = random_tokens(130, seed=1)
    ranks = spread(model, 2, dtype="f32")
    logits = run_alone(ranks, tokens, chunks=[50, 1, 1])
    np.testing.assert_allclose(logits, reference_logits(model, tokens), **FLOAT32)
    ranks.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options",
    FORMATS,
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_sizes_and_formats(name: str, options: dict[str, Any], size: int) -> None:
    model = tiny_model(name)
    check_as_alone(spread(model, size, **options), model, **options)


def test_threads_within_ranks() -> None:
    model = tiny_model("qwen3-moe")
    check_as_alone(spread(model, 2, num_threads=4), model)


def test_every_rank_counts_the_tokens_of_all_experts() -> None:
    """Each token of a layer is one of `top_k` experts."""
    model = tiny_model("mixtral")
    config = ModelConfig.from_hf(model.config)
    ranks = spread(model, 2)
    run_alone(ranks, random_tokens(40, seed=1))
    counts = [rank._compiled.program.expert_tokens() for rank in ranks.ranks]  # type: ignore[union-attr]
    assert counts[0] == counts[1]
    assert config.experts is not None
    assert len(counts[0]) == config.num_layers
    for tokens in counts[0]:
        assert len(tokens) == config.experts.num_experts
        assert sum(tokens) == 40 * config.experts.top_k
    assert all(map(sum, zip(*counts[0], strict=True)))
    ranks.close()


class Watched:
    """A checkpoint that notes what is read of it; of some names it has what `others` say."""

    def __init__(self, model: TinyModel, **others: StoredTensor) -> None:
        self._plain, self._others = model.checkpoint(), others
        self.read_names: list[str] = []

    def names(self) -> Iterable[str]:
        return self._plain.names()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        self.read_names.append(name)
        return self._others.get(name) or self._plain.read(name, shape)

    @property
    def total_bytes(self) -> int:
        return self._plain.total_bytes


NAME = "model.layers.0.block_sparse_moe.experts.{}.w2"
COLUMNS, ROWS = 96, 64


def loader_of(checkpoint: Any, shard: Shard) -> NativeLoader:
    own = shard if shard.size > 1 else None
    return NativeLoader(checkpoint, _native.Team(1), "bf16", shard=shard, expert_shard=own)


def load(checkpoint: Any, shard: Shard, count: int = 4) -> NativeExperts:
    """The down projections of mixtral's first layer."""
    names = [[NAME.format(number)] for number in range(count)]
    return loader_of(checkpoint, shard).experts(names, COLUMNS, [ROWS])


@pytest.mark.parametrize(("rank", "own"), [(0, [0]), (1, [1]), (2, [2, 3])])
def test_a_rank_reads_only_its_experts(rank: int, own: list[int]) -> None:
    model = tiny_model("mixtral")
    whole = load(model.checkpoint(), Shard())
    assert (len(whole.weights), whole.first, whole.total) == (4, 0, 4)
    watched = Watched(model)
    part = load(watched, Shard(rank, 3))
    assert (part.first, part.total) == (own[0], 4)
    for packed, number in zip(part.weights, own, strict=True):
        np.testing.assert_array_equal(packed.unpack(), whole.weights[number].unpack())
    wanted = [NAME.format(number) + ".weight" for number in sorted({0, *own})]
    assert watched.read_names == wanted, "of the first one only how it is stored"


def test_experts_stored_in_several_types_are_refused_by_each_rank() -> None:
    model = tiny_model("mixtral")
    block = np.zeros(ROWS * COLUMNS // 32 * 34, np.uint8)
    name = NAME.format(0) + ".weight"
    odd = StoredTensor(name, "Q8_0", (ROWS, COLUMNS), block)
    for rank in range(2):
        with pytest.raises(ModelError, match="stored in several types, which become bf16 and q8"):
            load(Watched(model, **{name: odd}), Shard(rank, 2))


def test_each_rank_reports_a_missing_expert() -> None:
    for rank in range(2):
        loader = loader_of(tiny_model("mixtral").checkpoint(), Shard(rank, 2))
        loader.experts([[NAME.format(number)] for number in range(6)], COLUMNS, [ROWS])
        with pytest.raises(ModelError, match=r"lacks 2 tensors .*experts\.4\.w2.*experts\.5\.w2"):
            loader.finish()
