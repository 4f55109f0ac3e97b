"""A draft model changes no bit of any output, whatever it proposes, in any batch, in any memory.

Red when: a draft layer's keys and values lie where the model's own are, a proposal follows another
token than the one that was sampled, a block of another sequence is written to.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine import ops
from octavo_engine.backends.draft_files import open_draft
from octavo_engine.backends.draft_part import DraftPart, LaterLayers
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.config import EngineConfig
from octavo_engine.core import kv_tiers
from octavo_engine.core.draft_tokenizer import check_same_tokens
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from tests.engine.core.test_speculation import make_engine, random_wishes, run
from tests.engine.models.tiny import TinyModel, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo_engine.backends.backend import Backend

pytestmark = pytest.mark.slow

DRAFT = '{"model": "draft", "num_speculative_tokens": 3}'


def part(model: TinyModel) -> DraftPart:
    return DraftPart(ModelConfig.from_hf(model.config), model.checkpoint())


def native(model: TinyModel, draft: TinyModel | None) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=160,
        num_threads=1,
        draft=None if draft is None else part(draft),
    )


def reference(model: TinyModel, draft: TinyModel | None) -> TorchBackend:
    return TorchBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=160,
        draft=None if draft is None else part(draft),
    )


def compare(
    make: Callable[[TinyModel, TinyModel | None], Backend],
    model: TinyModel,
    draft: TinyModel,
    rng: random.Random,
    *,
    pages: int = 1,
    wishes: list[dict[str, Any]] | None = None,
    kv_offloading_size: float = 0.0,
) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    wishes = wishes or random_wishes(rng, vocab=256, with_grammars=True)
    plain = make_engine(make(model, None), num_blocks=60 * pages)
    truth = run(plain, wishes, rng)
    plain.close()
    drafted = accepted = 0
    for num_blocks, budget, caching in ((10, 16, True), (60, 64, True), (60, 9, False)):
        engine = make_engine(
            make(model, draft),
            num_blocks=num_blocks * pages,
            budget=budget,
            caching=caching,
            speculative_config=DRAFT,
            kv_offloading_size=kv_offloading_size if caching else 0.0,
        )
        for _ in range(2 if kv_offloading_size else 1):
            engine.reset_prefix_cache()
            outputs = run(engine, wishes, rng)
            for name, output in outputs.items():
                assert output.all == truth[name].all
        stats = engine.stats()
        if stats.tiers is not None:
            assert stats.tiers.host_hit_blocks >= len(wishes)
        drafted += stats.spec_draft_tokens
        accepted += stats.spec_accepted_tokens
        engine.close()
    return drafted, accepted


@pytest.mark.parametrize("seed", range(2))
def test_a_draft_model_that_knows_nothing_changes_no_bit(seed: int) -> None:
    drafted, _ = compare(native, tiny_model("llama"), tiny_model("qwen3"), random.Random(seed))
    assert drafted > 100


@pytest.mark.parametrize(
    ("model", "draft"),
    [
        ("llama", "deepseek-v2"),
        ("deepseek-v2", "qwen3"),
        ("deepseek-v2", "deepseek-v3"),
        ("glm4-moe-lite", "deepseek-v2"),
        ("gemma2", "deepseek-v3"),
    ],
)
def test_draft_layers_of_another_kind_of_cache_change_no_bit(model: str, draft: str) -> None:
    """A latent vector of the draft model that lay in the model's own layer would."""
    one, other = tiny_model(model), tiny_model(draft)
    pages = len(native(one, other).cache_layout.groups)
    drafted, _ = compare(native, one, other, random.Random(1), pages=pages)
    assert drafted > 50


def test_each_operation_that_writes_to_a_cache_is_moved_to_the_draft_layers() -> None:
    """But for those of recurrent states and of encoders, which draft models do not have."""
    without = {"short_conv", "ssd_scan", "selective_scan", "delta_rule", "store_cross",
               "cross_attention", "encoder_attention"}  # fmt: skip
    kinds = [kind for kind in vars(ops).values() if isinstance(kind, type)]
    found = {
        name
        for kind in kinds
        for name, method in vars(kind).items()
        if "layer" in spec_fields(method)
    }
    assert {"attention", "latent_attention"} <= found - without <= set(vars(LaterLayers))


def spec_fields(method: Any) -> tuple[str, ...]:
    """Of the value that it takes as `spec`."""
    kind = getattr(ops, getattr(method, "__annotations__", {}).get("spec", ""), None)
    return getattr(kind, "__slots__", ())


def wishes_that_the_draft_sees(rng: random.Random) -> list[dict[str, Any]]:
    """All that is in the sampler's table: what else a request bans or prefers is not drafted by."""
    extras: list[dict[str, Any]] = [
        {"logprobs": 3}, {"ignore_eos": True}, {"prompt_logprobs": 1}, {"stop_token_ids": (98, 34)},
        {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"frequency_penalty": 1.0},
        {"presence_penalty": 0.5}, {"repetition_penalty": 1.5},
    ]  # fmt: skip
    wishes: list[dict[str, Any]] = random_wishes(rng, vocab=256, with_grammars=False)
    plain = {"prompt", "request_id", "seed", "temperature", "max_tokens"}
    return [
        {name: value for name, value in wish.items() if name in plain} | rng.choice(extras)
        for wish in wishes
    ]


@pytest.mark.parametrize("seed", range(2))
def test_each_token_of_a_draft_model_that_is_the_model_is_accepted(seed: int) -> None:
    """Its draws are those of the model, also where they are random: the seed and the position are
    the same. A prefix found in the cache, a preemption, a chunk that it had not seen would show."""
    rng = random.Random(seed)
    model = tiny_model("llama")
    drafted, accepted = compare(native, model, model, rng, wishes=wishes_that_the_draft_sees(rng))
    assert accepted == drafted > 200


def test_the_reference_drafts_too() -> None:
    """Its last bits depend on the batch, so answers are greedy and compared by their tokens."""
    model = tiny_model("llama")
    wishes: list[dict[str, Any]] = [
        {"prompt": [7 * index + 1, 9, 40], "request_id": str(index), "temperature": 0.0,
         "max_tokens": 24, "ignore_eos": True}
        for index in range(3)
    ]  # fmt: skip
    answers, stats = [], []
    for draft in (None, model):
        engine = make_engine(
            reference(model, draft),
            num_blocks=60,
            speculative_config=None if draft is None else DRAFT,
        )
        outputs = run(engine, wishes, random.Random(1))
        answers.append({name: output.tokens for name, output in outputs.items()})
        stats.append(engine.stats())
        engine.close()
    assert answers[0] == answers[1]
    assert stats[1].spec_accepted_tokens > 0.9 * stats[1].spec_draft_tokens > 20


def test_a_served_model_drafts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the settings to the answers, through files and tokenizers."""
    monkeypatch.setattr(StepTimeModel, "observe", lambda *_: None)  # whatever this machine's times
    results: list[Any] = []
    for config in (None, {"model": "demo://smollm2", "num_speculative_tokens": 3}):
        with LLM(
            "demo://smollm2", max_model_len=256, kv_cache_memory_bytes=1 << 26,
            speculative_config=config,
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0.8, seed=4, max_tokens=24, logprobs=1, n=2)
            outputs = llm.generate(["The sea is", "A list:"], params, use_tqdm=False)
            results.append([output.outputs for output in outputs])
            stats = llm._engine.stats()  # type: ignore[attr-defined]  # no public counter offline
    assert results[0] == results[1]
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 10


class OtherTokens(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return b"?" if token_id == 65 else super().token_bytes(token_id)


def test_a_draft_model_with_another_tokenizer_is_refused() -> None:
    check_same_tokens(ByteTokenizer(512), ByteTokenizer(600), "draft")
    with pytest.raises(ConfigError, match=r"draft has another tokenizer than the model: token 65"):
        check_same_tokens(ByteTokenizer(512), OtherTokens(512), "draft")


def config_for(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", max_model_len=64, speculative_config=json.dumps({"model": str(folder)})
    ).replace(**changes)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"vocab_size": 300}, {}, "has 300 tokens and the model 256: choose a draft model of the"),
        ({"max_position_embeddings": 32}, {}, "is for 32 tokens and the model is served with 64"),
        ({}, {"device": "sim"}, "by --device cpu, cuda and torch only; with --device sim use"),
        ({}, {"tensor_parallel_size": 2}, "a draft model is not computed with --tensor"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    fields: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    (tmp_path / "config.json").write_text(json.dumps(model.config | fields))
    with pytest.raises(ConfigError, match=message):
        open_draft(config_for(tmp_path, **changes), ModelConfig.from_hf(model.config))


def test_a_gpu_quantises_no_draft_model_itself(tmp_path: Path) -> None:
    model = tiny_model("llama")
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    named = json.dumps({"model": str(tmp_path), "quantization": "int4"})
    config = EngineConfig(device="cuda", max_model_len=64, speculative_config=named)
    with pytest.raises(ConfigError, match="int4 is computed by --device cpu only; --device cuda"):
        open_draft(config, ModelConfig.from_hf(model.config))


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_layers_with_windows_take_no_draft_into_blocks_that_they_gave_back(name: str) -> None:
    model = tiny_model(name)
    pages = len(native(model, model).cache_layout.groups)
    drafted, accepted = compare(native, model, model, random.Random(1), pages=pages)
    assert accepted > 0.5 * drafted > 100


def test_a_draft_model_with_windows_drafts_for_one_without() -> None:
    model, draft = tiny_model("llama"), tiny_model("gemma2")
    pages = len(native(model, draft).cache_layout.groups)
    drafted, _ = compare(native, model, draft, random.Random(3), pages=pages)
    assert drafted > 100


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v2", "deepseek-v3", "glm4-moe-lite"])
def test_blocks_of_draft_layers_come_back_from_host_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block in a tier holds the draft layers' part too, of every kind of cache."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    model = tiny_model(name)
    pages = len(native(model, model).cache_layout.groups)
    rng = random.Random(1)
    wishes: list[dict[str, Any]] = [
        {"prompt": [rng.randrange(256) for _ in range(rng.randrange(20, 80))], "seed": index,
         "request_id": str(index), "temperature": rng.choice((0.0, 1.0)), "max_tokens": 24}
        for index in range(8)
    ]  # fmt: skip
    drafted, accepted = compare(
        native, model, model, rng, pages=pages, wishes=wishes, kv_offloading_size=1 / 256
    )
    assert accepted > 0.5 * drafted > 100
