"""Latent attention: over long contexts, on every instruction set, and what it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.caches import KVSpec, LatentSpec, group_layers
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.test_native_models import bf16_as, reference_logits
from tests.engine.backends.tolerance import BF16_AGAINST_ROUNDED_REFERENCE, FLOAT32, error
from tests.engine.models.tiny import TinyModel, tiny_model

MAX_MODEL_LEN = 1408


def dense(**changes) -> TinyModel:
    """Without experts: rounding cannot choose another one."""
    return tiny_model("deepseek-v2-lite", first_k_dense_replace=3, **changes)


def native(model: TinyModel, dtype="f32", *, num_threads=2, isa="", **options) -> NativeBackend:
    config = ModelConfig.from_hf(model.config)
    return NativeBackend(
        config, model.checkpoint(), max_model_len=MAX_MODEL_LEN, dtype=dtype,
        num_threads=num_threads, isa=isa, **options,
    )  # fmt: skip


def run_long(backend: NativeBackend, token_ids: list[int], chunks=()) -> np.ndarray:
    limits = BackendLimits(
        max_tokens=MAX_MODEL_LEN, max_seqs=1, max_logit_rows=MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    driver = Driver(backend, limits=limits)
    request = driver.add(0, token_ids)
    for count in (*chunks, len(token_ids) - sum(chunks)):
        driver.step([(request, count)])
    return np.array(request.logits)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_keeps_both_promises(isa: str) -> None:
    model = dense()
    token_ids = random_tokens(90, seed=6)
    for dtype in ("f32", "bf16"):
        backend = native(model, dtype, isa=isa)
        logits = run_alone(backend, token_ids)
        assert np.array_equal(run_alone(backend, token_ids, chunks=[33, 1, 1, 20]), logits)
        if dtype == "f32":  # transformers multiplies keys and values out, for each head
            np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
        else:
            rounded = reference_logits(model, token_ids, bf16_as(backend))
            assert error(logits, rounded) < BF16_AGAINST_ROUNDED_REFERENCE


@pytest.mark.slow
def test_contexts_of_several_partitions() -> None:
    model = dense(num_hidden_layers=1, max_position_embeddings=2048, num_attention_heads=16,
                  num_key_value_heads=16)  # fmt: skip
    token_ids = random_tokens(1300, seed=7)
    logits = run_long(native(model), token_ids)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
    for dtype in ("f32", "bf16"):
        one = run_long(native(model, dtype, num_threads=1), token_ids)
        three = run_long(native(model, dtype, num_threads=3), token_ids, chunks=(600, 500, 1, 1))
        assert np.array_equal(three, one)


def test_two_sums_behind_a_product_are_both_made() -> None:
    """What the shared experts add to the others' sum is added to the residual as well."""
    model = tiny_model("glm4-moe-plain")
    token_ids = random_tokens(30, seed=9)
    fused = run_alone(native(model), token_ids)
    assert np.array_equal(run_alone(native(model, is_fused=False), token_ids), fused)


def test_a_page_holds_one_vector_a_token() -> None:
    backend = native(dense(), "bf16")
    assert backend.cache_layout.specs == (LatentSpec(32, 16),) * 3
    assert backend.kv_bytes_per_block == 3 * 16 * (32 + 16) * 2


def test_latent_layers_and_others_share_pages() -> None:
    layout = group_layers([LatentSpec(32, 16), KVSpec(2, 16, window=32)])
    cache = _native.KVCache(4, [(0, 0, 1, 48), (1, 0, 2, 16)], [0, 32], "f32", [32, 0])
    sizes = {LatentSpec: 16 * 48 * 4, KVSpec: 2 * 2 * 16 * 16 * 4}
    assert cache.bytes_per_block == layout.page_bytes(lambda spec: sizes[type(spec)])


def test_8_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype in 8 bits .* use auto"):
        native(dense(), "bf16", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="latent layers are held as f32 or bf16"):
        _native.KVCache(4, [(0, 0, 1, 48)], [0], "int8", [32])


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("kv_lora_rank", 40, "kv_lora_rank must be a multiple of 16; got 40"),
        ("qk_rope_head_dim", 8, "qk_rope_head_dim must be a multiple of 16; got 8"),
        ("v_head_dim", 7, "v_head_dim must be even; got 7"),
        ("topk_method", "best", "topk_method must be greedy, group_limited_greedy or noaux_tc"),
        ("scoring_func", "tanh", "scoring_func must be sigmoid with noaux_tc"),
        ("n_group", 3, "n_group must divide 8 experts; got 3"),
        ("topk_group", 9, "topk_group must be at most n_group, 4; got 9"),
        ("num_experts_per_tok", 5, "must not be more than the chosen groups have; got 5"),
    ],
)
def test_settings_are_checked(field: str, value: object, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        ModelConfig.from_hf(tiny_model("deepseek-v3").config | {field: value})


def test_dots_llm1_writes_the_method_of_the_choice_as_scoring_func() -> None:
    """As its published config.json does."""
    config = ModelConfig.from_hf(tiny_model("dots1").config | {"scoring_func": "noaux_tc"})
    assert config.experts is not None
    assert config.experts.routing.is_sigmoid
