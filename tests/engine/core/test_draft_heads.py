"""Heads with layers of their own change no bit of any output, and propose what their papers say.

Red when: a head's keys and values lie where the model's own are, it is given the state of another
position or the embedding of another token, a chunk, a prefix or a preemption passes it by.
"""

from __future__ import annotations

import dataclasses
import json
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.draft_head_files import open_draft_head
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.config import EngineConfig
from octavo_engine.core import build, kv_tiers
from octavo_engine.core.identity import identify
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.model_runner import state_drafter
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.source import resolve_model
from tests.engine.core.test_speculation import make_engine, random_wishes, run
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.draft_heads import FakeHead, eagle, eagle3, prediction_layer, qwen3_next_layer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo_engine.backends.backend import Backend
    from octavo_engine.backends.native.graph import Dtype


def four(name: str) -> TinyModel:
    """With layers enough to take some of."""
    return tiny_model(name, num_hidden_layers=4)


HEADS: dict[str, Callable[[], FakeHead]] = {
    "eagle": lambda: eagle(tiny_model("llama")),
    "eagle, biased": lambda: eagle(tiny_model("llama"), bias=True),
    "eagle of gemma2": lambda: eagle(tiny_model("gemma2")),
    "eagle3": lambda: eagle3(four("llama")),
    "eagle3, normed residual": lambda: eagle3(four("llama"), norm_before_residual=True),
    "eagle3 of two": lambda: eagle3(four("qwen3"), kept=(1, 3)),
    "mtp of deepseek-v3": lambda: prediction_layer("deepseek-v3"),
    "mtp of glm4-moe": lambda: prediction_layer("glm4-moe"),
    "mtp of qwen3-next": qwen3_next_layer,
    "eagle of qwen3-next": lambda: eagle(tiny_model("qwen3-next")),
}


def native(
    head: FakeHead, *, drafts: bool = True, is_fused: bool = True, dtype: Dtype = "bf16"
) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(head.model.config),
        head.model.checkpoint(),
        max_model_len=160,
        num_threads=1,
        draft_head=head.part() if drafts else None,
        is_fused=is_fused,
        dtype=dtype,
    )


def exact(head: FakeHead) -> NativeBackend:
    return native(head, dtype="f32")


def reference(head: FakeHead) -> TorchBackend:
    return TorchBackend(
        ModelConfig.from_hf(head.model.config),
        head.model.checkpoint(),
        max_model_len=160,
        draft_head=head.part(),
    )


@pytest.fixture(autouse=True)
def _slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For states of four sequences and of drafts, as the pool is sized as the simulator's, which
    has none; and snapshots in texts of 160 tokens."""
    monkeypatch.setattr(build, "StateSnapshots", partial(StateSnapshots, stride=32))
    settle = build._capacity

    def with_slots(config: EngineConfig, backend: Backend, length: int) -> Any:
        capacity = settle(config, backend, length)
        if not backend.cache_layout.states:
            return capacity
        return capacity._replace(max_num_seqs=4, num_snapshots=20)

    monkeypatch.setattr(build, "_capacity", with_slots)


def settings(head: FakeHead, count: int = 3) -> str:
    named = {} if head.kind == "mtp" else {"model": "head"}
    return json.dumps({"method": head.kind, "num_speculative_tokens": count, **named})


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_random_heads_change_no_bit(name: str, *, is_fused: bool) -> None:
    """Grammars, penalties, log-probabilities, preemption, chunks: see `random_wishes`."""
    rng, head = random.Random(3), HEADS[name]()
    pages = len(native(head).cache_layout.groups)
    wishes = random_wishes(rng, vocab=256, with_grammars=True)
    plain = make_engine(native(head, drafts=False, is_fused=is_fused), num_blocks=60 * pages)
    truth = run(plain, wishes, rng)
    plain.close()
    drafted = 0
    for num_blocks, budget, caching in ((10, 16, True), (60, 64, True), (60, 9, False)):
        engine = make_engine(
            native(head, is_fused=is_fused),
            num_blocks=num_blocks * pages,
            budget=budget,
            caching=caching,
            speculative_config=settings(head),
        )
        for request_id, output in run(engine, wishes, rng).items():
            assert output.all == truth[request_id].all
        drafted += engine.stats().spec_draft_tokens
        engine.close()
    assert drafted > 100


class Seen:
    """All that was proposed, behind which tokens."""

    def __init__(self, backend: Backend, head: FakeHead, **changes: Any) -> None:
        self.engine = make_engine(
            backend, num_blocks=60, speculative_config=settings(head), **changes
        )
        self.proposals: list[tuple[list[int], list[int]]] = []
        speculation = self.engine.scheduler._speculation
        assert speculation is not None
        self.speculation = speculation
        assert speculation._drafting is not None
        # Whether it pays depends on this machine's pace.
        speculation._drafting.count = lambda **_: 3  # type: ignore[method-assign]
        take = speculation.take_proposals

        def noting(batch: Any, result: Any) -> None:
            take(batch, result)
            for entry, proposed in result.proposed.items():
                self.proposals.append((list(batch.sequences[entry].token_ids), list(proposed)))

        speculation.take_proposals = noting  # type: ignore[method-assign]

    def check(self, head: FakeHead) -> None:
        """Each token has the highest logit of the reference, or almost."""
        assert sum(len(proposed) for _, proposed in self.proposals) > 60
        for tokens, proposed in self.proposals:
            for token, logits in zip(proposed, head.logits(tokens, proposed), strict=True):
                spread = np.abs(logits[logits.isfinite()].numpy()).max()
                assert logits[token] >= logits.max() - 0.001 * spread


def greedy(count: int = 4) -> list[dict[str, Any]]:
    return [
        {"prompt": [7 * index + 1, 9, 40] * (1 + 7 * index), "request_id": str(index),
         "temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("make", [exact, reference])
def test_proposals_are_those_of_the_papers(make: Any, name: str) -> None:
    """Against transformers' hidden states and layers, over whole texts, greedily."""
    torch.set_num_threads(1)
    head = HEADS[name]()
    seen = Seen(make(head), head, budget=16)  # prompts come in chunks
    run(seen.engine, greedy(), random.Random(1))
    seen.engine.close()
    seen.check(head)


def test_no_pass_follows_a_token_that_is_not_likely_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each proposal goes on while the product of its tokens' rates is above the least chance."""
    head = HEADS["eagle3"]()
    seen = Seen(exact(head), head)
    plan = seen.speculation.plan_proposals
    found: list[Any] = []
    # A random head is never sure: levels of many kinds, all the same.
    monkeypatch.setattr(state_drafter, "level_of", lambda chance: int(chance * 1e4) % 8)
    trust = (0.1, 0.1, 0.3, 0.3, 0.9, 0.9, 0.9, 0.9)

    def planning(batch: Any, *args: Any) -> None:
        plan(batch, *args)
        batch.num_proposed, batch.least_chance, batch.trust = 3, 0.2, trust

    take = seen.speculation.take_proposals

    def noting(batch: Any, result: Any) -> None:
        take(batch, result)
        found.extend((result.sureness[entry], len(own)) for entry, own in result.proposed.items())

    monkeypatch.setattr(seen.speculation, "plan_proposals", planning)
    monkeypatch.setattr(seen.speculation, "take_proposals", noting)
    run(seen.engine, greedy(), random.Random(1))
    seen.engine.close()
    assert len(found) > 30 and {count for _, count in found} == {1, 2, 3}
    for levels, count in found:
        assert len(levels) == count
        chance = 1.0
        for level in levels[:-1]:
            chance *= trust[level]
            assert chance > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp of deepseek-v3", "mtp of qwen3-next"])
def test_a_head_knows_of_tokens_for_which_it_drafted_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without proposals, and prefixes that other requests left in the cache."""
    head, rng = HEADS[name](), random.Random(5)
    seen = Seen(exact(head), head)
    plan = seen.speculation.plan_proposals

    def planning(batch: Any, *args: Any) -> None:
        plan(batch, *args)
        batch.num_proposed = rng.choice([0, 0, 3])

    monkeypatch.setattr(seen.speculation, "plan_proposals", planning)
    monkeypatch.setattr(seen.engine.scheduler, "_preempt", lambda _: None)
    wishes = greedy(6)
    answers = run(seen.engine, wishes, rng)
    again = [
        wish
        | {"prompt": [*wish["prompt"], *answers[wish["request_id"]].tokens[: 3 + 2 * index]],
           "request_id": f"again {index}", "max_tokens": 40}
        for index, wish in enumerate(wishes)
    ]  # fmt: skip
    run(seen.engine, again, rng)
    assert seen.engine.stats().prefix_hits > 0
    seen.engine.close()
    seen.check(head)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "mtp of deepseek-v3"])
def test_blocks_of_a_head_come_back_from_host_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    head, rng = HEADS[name](), random.Random(1)
    seen = Seen(exact(head), head, kv_offloading_size=1 / 256)
    for _ in range(2):
        seen.engine.reset_prefix_cache()
        run(seen.engine, greedy(), rng)
    tiers = seen.engine.stats().tiers
    assert tiers is not None and tiers.host_hit_blocks > 4
    seen.engine.close()
    seen.check(head)


def config_for(folder: Path, method: str, **changes: Any) -> EngineConfig:
    speculation = {"method": method, "model": str(folder)}
    if method == "mtp":
        del speculation["model"]
    return EngineConfig(
        device="cpu", max_model_len=64, speculative_config=json.dumps(speculation)
    ).replace(**changes)


def opened(head: FakeHead, folder: Path, **changes: Any) -> Any:
    head.write(folder)
    return open_draft_head(
        config_for(folder, head.kind, **changes),
        ModelConfig.from_hf(head.model.config),
        resolve_model(str(folder)),
    )


@pytest.mark.parametrize("name", HEADS)
def test_files_become_the_same_head(name: str, tmp_path: Path) -> None:
    head = HEADS[name]()
    part, same = opened(head, tmp_path), head.part()
    assert part.config == same.config
    assert set(part.checkpoint.names()) == set(same.checkpoint.names())
    if same.token_ids is None:
        assert part.token_ids is None
    else:
        assert np.array_equal(part.token_ids, same.token_ids)


def with_prefix(head: FakeHead) -> FakeHead:
    """As vLLM names the layers of later files."""
    head.tensors.update(
        {
            f"model.{name.replace('midlayer.', 'layers.0.')}": head.tensors.pop(name)
            for name in list(head.tensors)
            if name.startswith(("midlayer.", "layers."))
        }
    )
    return head


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_both_spellings_of_names_are_known(make: Any) -> None:
    one, other = make(four("llama")), with_prefix(make(four("llama")))
    assert set(one.part().checkpoint.names()) == set(other.part().checkpoint.names())


def test_fields_may_be_in_an_object_of_their_own(tmp_path: Path) -> None:
    head = eagle(tiny_model("llama"))
    own = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": head.config}
    nested = dataclasses.replace(head, config=own)
    assert opened(nested, tmp_path).config == head.part().config


@pytest.mark.parametrize(
    ("make", "fields", "changes", "message"),
    [
        (eagle, {"vocab_size": 300}, {}, "of another model: its vocab_size is 300 and the model's"),
        (eagle, {"hidden_size": 32}, {}, "of another model: its hidden_size is 32 and the model's"),
        (eagle3, {"target_hidden_size": 32}, {}, "its target_hidden_size is 32 and the model's 64"),
        (eagle3, {"eagle_aux_hidden_state_layer_ids": [2, 1, 9]}, {}, "the model has 4: choose a"),
        (eagle3, {"eagle_config": {"use_aux_hidden_state": False}}, {}, "name one that takes the"),
        (eagle, {}, {"device": "sim"}, "a draft head is computed by --device cpu, cuda and torch"),
        (eagle, {}, {"tensor_parallel_size": 2}, "a draft head is not computed with --tensor"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    make: Any, fields: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head = make(four("llama"))
    head.config.update(fields)
    with pytest.raises(ConfigError, match=message):
        opened(head, tmp_path, **changes)


@pytest.mark.parametrize(
    ("without", "message"),
    [("d2t", "but no tensor d2t"), ("lm_head.weight", "but no tensor lm_head.weight")],
)
def test_a_head_that_lacks_a_tensor_is_refused(without: str, message: str, tmp_path: Path) -> None:
    head = eagle3(four("llama"))
    del head.tensors[without]
    with pytest.raises(ModelError, match=message):
        opened(head, tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    head = eagle3(four("llama"))
    head.tensors["d2t"] = head.tensors["d2t"] + 200
    with pytest.raises(ModelError, match="must lead to 100 different tokens below 256"):
        opened(head, tmp_path)


@pytest.mark.parametrize(
    ("name", "prefix"), [("deepseek-v3", r"model\.layers\.2\."), ("qwen3-next", r"mtp\.")]
)
def test_a_checkpoint_without_a_prediction_layer_is_refused(
    name: str, prefix: str, tmp_path: Path
) -> None:
    head = HEADS[f"mtp of {name}"]()
    for tensor in [tensor for tensor in head.tensors if tensor not in head.model.tensors]:
        del head.tensors[tensor]
    with pytest.raises(ConfigError, match=rf"no prediction layer \({prefix}…\), which"):
        opened(head, tmp_path)


def test_models_for_which_nothing_is_drafted_take_no_head(tmp_path: Path) -> None:
    eagle(tiny_model("llama")).write(tmp_path)
    llama = ModelConfig.from_hf(tiny_model("llama").config)
    whisper = dataclasses.replace(llama.family, page="whisper")
    model = dataclasses.replace(llama, family=whisper)
    with pytest.raises(ConfigError, match="no draft head is computed for Llama"):
        open_draft_head(config_for(tmp_path, "eagle"), model, resolve_model(str(tmp_path)))


def test_blocks_with_a_head_are_of_another_model(tmp_path: Path) -> None:
    """What is on disk or at another engine without the head's layers is not taken for its own."""
    head = prediction_layer("deepseek-v3")
    head.write(tmp_path)
    eagle(tiny_model("llama")).write(tmp_path / "eagle")
    files = resolve_model(str(tmp_path))
    named = str(tmp_path / "eagle")
    names = [
        None,
        {"method": "mtp"},
        {"method": "mtp", "quantization": "int8"},
        *({"method": method, "model": named} for method in ("eagle", "eagle3", "draft_model")),
    ]
    configs = [
        EngineConfig(device="cpu", model=str(tmp_path), max_model_len=64,
                     speculative_config=None if name is None else json.dumps(name))
        for name in names
    ]  # fmt: skip
    assert len({identify(config, files).digest for config in configs}) == len(configs)
