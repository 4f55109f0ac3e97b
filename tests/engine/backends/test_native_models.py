"""The native backend against the reference, and against itself: the bits of an answer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from octavo_engine import _native
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import (
    BF16_AGAINST_FLOAT32,
    BF16_AGAINST_ROUNDED_REFERENCE,
    FLOAT32,
    INT4_AGAINST_FLOAT32,
    INT8_AGAINST_FLOAT32,
    KV_AGAINST_FLOAT32,
    error,
)
from tests.engine.models.latents import LATENTS
from tests.engine.models.tiny import FAMILIES, MIXTURES, TinyModel, tiny_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import KVCacheDType, Quantization

MAX_MODEL_LEN = 160


def native(
    model: TinyModel,
    dtype: Dtype = "bf16",
    quantization: Quantization = "auto",
    *,
    kv_cache_dtype: KVCacheDType = "auto",
    activation_bits: int = 16,
    is_fused: bool = True,
    num_threads: int = 2,
) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=MAX_MODEL_LEN,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        activation_bits=activation_bits,
        num_threads=num_threads,
        is_fused=is_fused,
    )


def reference_logits(
    model: TinyModel, token_ids: list[int], precision: Precision | None = None
) -> NDArray[np.float32]:
    backend = TorchBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=MAX_MODEL_LEN,
        precision=precision,
    )
    return run_alone(backend, token_ids)


def bf16_as(backend: NativeBackend) -> Precision:
    """What the backend rounds to bf16; some instruction sets multiply nothing wider."""
    multiplies_pairs = backend.name in ("native/avx512bf16", "native/amx")
    return Precision(storage=torch.bfloat16, products=torch.bfloat16 if multiplies_pairs else None)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_equals_the_reference(name: str) -> None:
    model = tiny_model(name)
    token_ids = random_tokens(130, seed=1)
    logits = run_alone(native(model, "f32"), token_ids, chunks=[50, 1, 1])
    np.testing.assert_allclose(logits, reference_logits(model, token_ids), **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MIXTURES])
def test_bf16_is_as_near_as_bf16_can_be(name: str) -> None:
    model = tiny_model(name)
    token_ids = random_tokens(100, seed=2)
    backend = native(model)
    logits = run_alone(backend, token_ids)
    assert error(logits, reference_logits(model, token_ids)) < BF16_AGAINST_FLOAT32
    rounded = reference_logits(model, token_ids, bf16_as(backend))
    assert error(logits, rounded) < BF16_AGAINST_ROUNDED_REFERENCE


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    ("quantization", "tolerance"),
    [
        ("none", BF16_AGAINST_FLOAT32),
        pytest.param("int8", INT8_AGAINST_FLOAT32, marks=pytest.mark.slow),
        pytest.param("int4", INT4_AGAINST_FLOAT32, marks=pytest.mark.slow),
    ],
)
def test_experts_are_as_near_but_where_a_token_meets_others(
    name: str, quantization: Quantization, tolerance: float
) -> None:
    """Of two experts with nearly the same score rounding may choose the other one."""
    model = tiny_model(name)
    token_ids = random_tokens(100, seed=2)
    logits = run_alone(native(model, quantization=quantization), token_ids)
    truth = reference_logits(model, token_ids)
    assert np.median(of_rows(logits, truth)) < tolerance


def of_rows(logits: NDArray[np.float32], truth: NDArray[np.float32]) -> NDArray[np.float32]:
    """The error of each row."""
    squares: NDArray[np.float32] = np.mean((logits - truth) ** 2, axis=1) / np.var(truth)
    return np.sqrt(squares)


EACH_FAMILY_AND_PACKING = [(name, "none", "auto", 16) for name in FAMILIES] + [
    (name, quantization, kv_cache_dtype, 16)
    for name in ("llama-tied-biased", "gemma3", "qwen3")
    for quantization, kv_cache_dtype in (
        ("int8", "auto"), ("int4", "auto"), ("none", "int8"), ("int4", "fp8"), ("none", "fp8_e5m2")
    )
] + [("mixtral", quantization, "auto", 16) for quantization in ("none", "int8", "int4")] + [
    (name, quantization, "auto", 8)
    for name in ("llama-tied-biased", "mixtral")
    for quantization in ("int8", "int4")
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "quantization", "kv_cache_dtype", "activation_bits"), EACH_FAMILY_AND_PACKING
)
def test_bits_depend_on_nothing_but_the_tokens(
    name: str, quantization: Quantization, kv_cache_dtype: KVCacheDType, activation_bits: int
) -> None:
    """Alone and whole, or in company, in chunks of any size, and on top of another's prefix."""
    backend = native(
        tiny_model(name),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        activation_bits=activation_bits,
    )
    prompts = [random_tokens(count, seed=count) for count in (90, 61, 130)]
    prompts.append(prompts[2][:100] + random_tokens(12, seed=9))
    alone = [run_alone(backend, prompt) for prompt in prompts]

    rng = random.Random(name)
    driver = Driver(backend)
    requests = [driver.add(row, prompt) for row, prompt in enumerate(prompts[:3])]
    while any(r.num_computed < len(r.token_ids) for r in requests):
        work = [
            (r, rng.randint(1, min(rng.choice((1, 20, 50)), len(r.token_ids) - r.num_computed)))
            for r in rng.sample(requests, rng.randint(1, 3))
            if r.num_computed < len(r.token_ids)
        ]
        if work:
            driver.step(work)
    for request, truth in zip(requests, alone[:3], strict=True):
        assert np.array_equal(request.logits, truth)

    heir = driver.add(3, prompts[3], prefix=requests[2])
    assert heir.num_computed == 96
    driver.step([(heir, 5)])
    driver.step([(heir, 11)])
    assert np.array_equal(heir.logits, alone[3][96:])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize(
    "name",
    [
        "llama-tied-biased", "granite", "gemma3", "phi3-longrope", "gpt2", "falcon-new", "olmo2",
        "lfm2", "granite4-moe", "qwen3-next", *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mpt-clipped-six-heads", "hunyuan", "cohere-plus", "jamba", "zamba2",
                         "qwen3.5", "gemma3n")
        ),
    ],
)  # fmt: skip
def test_fused_and_unfused_programs_give_the_same_bits(
    name: str, quantization: Quantization, dtype: Dtype
) -> None:
    model = tiny_model(name)
    token_ids = random_tokens(70, seed=3)
    fused = run_alone(native(model, dtype, quantization), token_ids)
    unfused = run_alone(native(model, dtype, quantization, is_fused=False), token_ids)
    assert np.array_equal(unfused, fused)


def test_a_gated_width_of_no_whole_panels_runs_unfused() -> None:
    model = tiny_model("llama", intermediate_size=72)
    token_ids = random_tokens(40)
    logits = run_alone(native(model, "f32"), token_ids)
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
    assert error(run_alone(native(model), token_ids), logits) < BF16_AGAINST_FLOAT32


# Mixtures attend alike, but where rounding chooses another expert, no logit is near any more.
# Latent vectors are not kept in 8 bits.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*MIXTURES, *LATENTS)])
def test_keys_and_values_in_8_bits_are_as_near_as_they_can_be(name: str) -> None:
    model = tiny_model(name)
    token_ids = random_tokens(100, seed=5)
    truth = reference_logits(model, token_ids)
    for kv_cache_dtype, tolerance in KV_AGAINST_FLOAT32.items():
        logits = run_alone(native(model, "f32", kv_cache_dtype=kv_cache_dtype), token_ids)
        assert 0 < error(logits, truth) < tolerance, kv_cache_dtype


def test_fp8_is_e4m3() -> None:
    model = tiny_model("qwen3")
    token_ids = random_tokens(60, seed=5)
    logits = run_alone(native(model, kv_cache_dtype="fp8"), token_ids)
    same = run_alone(native(model, kv_cache_dtype="fp8_e4m3"), token_ids)
    other = run_alone(native(model, kv_cache_dtype="fp8_e5m2"), token_ids)
    assert np.array_equal(logits, same)
    assert not np.array_equal(logits, other)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3", "bloom", "mamba2", *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("olmo2", "cohere-plus", "nemotron", "lfm2-biased", "mamba",
                         "qwen3-next", "gemma3n")
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_keeps_both_promises(isa: str, name: str) -> None:
    model = tiny_model(name)
    config = ModelConfig.from_hf(model.config)
    token_ids = random_tokens(90, seed=6)
    for dtype in ("f32", "bf16"):
        backend = NativeBackend(
            config, model.checkpoint(), max_model_len=MAX_MODEL_LEN, dtype=dtype, isa=isa
        )
        assert backend.name == f"native/{isa}"
        logits = run_alone(backend, token_ids)
        assert np.array_equal(run_alone(backend, token_ids, chunks=[33, 1, 1, 20]), logits)
        if dtype == "f32":
            np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
        else:
            rounded = reference_logits(model, token_ids, bf16_as(backend))
            assert error(logits, rounded) < BF16_AGAINST_ROUNDED_REFERENCE


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_bits_do_not_depend_on_the_number_of_threads(quantization: Quantization) -> None:
    model = tiny_model("gemma2")
    token_ids = random_tokens(150, seed=4)
    one = run_alone(native(model, quantization=quantization, num_threads=1), token_ids)
    three = run_alone(native(model, quantization=quantization, num_threads=3), token_ids)
    assert np.array_equal(three, one)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integer_weights_are_the_same_on_every_instruction_set(quantization: Quantization) -> None:
    """But for attention over bf16, which has an order of its own on one of them: hence f32."""
    config = ModelConfig.from_hf(tiny_model("qwen3").config)
    logits = [
        run_alone(
            NativeBackend(
                config,
                tiny_model("qwen3").checkpoint(),
                max_model_len=MAX_MODEL_LEN,
                dtype="f32",
                quantization=quantization,
                isa=isa,
            ),
            random_tokens(90, seed=6),
        )
        for isa in _native.available_isas()
    ]
    for other in logits[1:]:
        assert np.array_equal(other, logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MIXTURES])
@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("int8", INT8_AGAINST_FLOAT32), ("int4", INT4_AGAINST_FLOAT32)]
)
def test_quantised_weights_are_as_near_as_they_can_be(
    name: str, quantization: Quantization, tolerance: float
) -> None:
    model = tiny_model(name)
    token_ids = random_tokens(100, seed=2)
    logits = run_alone(native(model, quantization=quantization), token_ids)
    assert error(logits, reference_logits(model, token_ids)) < tolerance
