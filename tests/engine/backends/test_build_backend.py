"""From settings to a model in memory, and from a step to sampled tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.sampling.batch import SAMPLED_OK, SAMPLING_ROW, SamplingBatch
from octavo_engine.weights.source import ModelFiles
from tests.engine.backends.driver import LIMITS, NUM_BLOCKS, Driver, random_tokens
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.tiny import tiny_model

if TYPE_CHECKING:
    from octavo_engine.backends.backend import BackendStep


def files(config: dict[str, Any], folder: Path = Path("nowhere")) -> ModelFiles:
    return ModelFiles("tiny", folder, "safetensors", config, {})


def greedy(step: BackendStep) -> SamplingBatch:
    table = np.zeros(LIMITS.max_seqs, SAMPLING_ROW)
    table["repetition_penalty"] = 1.0
    num_rows = len(step.logit_rows)
    return SamplingBatch(
        table=table,
        rows=np.zeros(num_rows, np.int32),
        positions=step.positions[step.logit_rows] + 1,
        targets=np.full(num_rows, -1, np.int32),
        history=np.zeros((LIMITS.max_seqs, LIMITS.max_model_len), np.int32),
    )


@pytest.mark.parametrize("device", ["cpu", "auto", "torch"])
def test_a_folder_becomes_a_backend_that_samples(tmp_path: Path, device: Any) -> None:
    model = tiny_model("gemma3")
    save_file(model.tensors, tmp_path / "model.safetensors")
    progress: list[tuple[int, int]] = []
    config = EngineConfig(device=device, dtype="float32", num_threads=1, max_model_len=128)
    backend = build_backend(
        config, files(model.config, tmp_path), lambda done, total: progress.append((done, total))
    )
    assert backend.name.startswith("torch/" if device == "torch" else "native/")
    assert backend.vocab_size == 256
    # A page is of one of its layers: two have a window, and one has none.
    assert len(backend.cache_layout.groups) == 3
    assert backend.kv_bytes_per_block == 2 * 16 * 2 * 32 * 4
    assert progress[-1][0] == progress[-1][1] == sum(t.nbytes for t in model.tensors.values())

    driver = Driver(backend)  # type: ignore[arg-type]  # both real backends show their logits
    request = driver.add(0, random_tokens(40))
    inner = dataclasses.replace(
        driver.plan([(request, 39)]), logit_rows=np.empty(0, np.int32)
    )  # a chunk within a prompt: nothing to sample
    assert backend.execute(inner, greedy(inner)).tokens.tolist() == []
    last = driver.plan([(request, 1)])
    sampled = backend.execute(last, greedy(last))
    assert sampled.status.tolist() == [SAMPLED_OK]
    assert sampled.tokens.tolist() == [int(model.logits(request.token_ids)[-1].argmax())]
    backend.close()


@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_that_sees_is_served(tmp_path: Path, wrapper: str) -> None:
    model = tiny_model("gemma3")
    tensors = {name.replace("model.", wrapper, 1): t for name, t in model.tensors.items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.zeros(3)}, tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").rename(tmp_path / "model.safetensors")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": model.config}
    config = EngineConfig(dtype="float32", num_threads=1)
    driver = Driver(build_backend(config, files(whole, tmp_path)))  # type: ignore[arg-type]
    request = driver.add(0, random_tokens(50))
    (logits,) = driver.step([(request, 50)])
    np.testing.assert_allclose(logits, model.logits(request.token_ids), **FLOAT32)


def test_dummy_weights_need_no_files() -> None:
    config = EngineConfig(load_format="dummy", num_threads=1)
    backend = build_backend(config, files(tiny_model("qwen3").config))
    driver = Driver(backend)  # type: ignore[arg-type]  # as above
    (logits,) = driver.step([(driver.add(0, random_tokens(20)), 20)])
    assert np.isfinite(logits).all()


def test_copied_blocks_and_poison_on_native() -> None:
    model = tiny_model("llama")
    config = EngineConfig(load_format="dummy", num_threads=1)
    driver = Driver(build_backend(config, files(model.config)))  # type: ignore[arg-type]
    first = driver.add(0, random_tokens(40))
    driver.step([(first, 40)])
    alone = driver.add(2, [*first.token_ids[:38], 9, 8, 7])
    driver.step([(alone, 41)])
    second = driver.add(1, alone.token_ids, prefix=first)
    copy = driver.take_block()
    second.blocks.append(copy)
    second.num_computed = 38
    driver.step([(second, 3)], copies=[(first.blocks[2], copy, 6)])
    assert np.array_equal(second.logits, alone.logits[38:])

    driver.poison(alone.blocks[:1])
    alone.token_ids.append(1)
    assert np.isnan(driver.step([(alone, 1)])[0]).all()


def test_errors_name_the_flag_or_the_field(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    with pytest.raises(ConfigError, match="--dtype float16"):
        build_backend(EngineConfig(dtype="float16"), files(config))
    with pytest.raises(ConfigError, match="--device cpu needs a model"):
        build_backend(EngineConfig(device="cpu"), None)
    with pytest.raises(ModelError, match="head_dim must be a multiple of 16"):
        build_backend(EngineConfig(load_format="dummy"), files({**config, "head_dim": 24}))
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 20 tensors.*model\.embed_tokens\.weight"):
        build_backend(EngineConfig(), files(config, tmp_path))


def test_a_cache_that_does_not_fit_is_told_with_its_size() -> None:
    backend = build_backend(
        EngineConfig(load_format="dummy", num_threads=1), files(tiny_model("llama").config)
    )
    with pytest.raises(ConfigError, match=r"KV cache of \d+ bytes.*--kv-cache-memory-bytes"):
        backend.prepare(LIMITS, (1 << 27) - 1)


def test_the_simulator_needs_no_files() -> None:
    backend = build_backend(EngineConfig(device="sim"), None)
    backend.prepare(LIMITS, NUM_BLOCKS)
    assert backend.vocab_size == EngineConfig().sim.vocab_size
    backend.close()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("device", ["torch", "plugin", "sim"])
def test_devices_that_hold_no_8_bit_kv_say_so(device: Any, kv_cache_dtype: Any) -> None:
    config = EngineConfig(device=device, kv_cache_dtype=kv_cache_dtype)
    message = (
        f"--kv-cache-dtype {kv_cache_dtype} is computed by --device cpu and cuda only; --device "
        f"{device} takes auto"
    )
    with pytest.raises(ConfigError, match=message):
        build_backend(config, files(tiny_model("llama").config))


def test_activations_of_8_bits_are_refused_where_nothing_would_come_of_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_file(model.tensors, tmp_path / "model.safetensors")
    stored = files(model.config, tmp_path)
    for device in ("torch", "cuda", "sim"):
        with pytest.raises(
            ConfigError, match=f"--activation-bits 8 .*leave it out on --device {device}"
        ):
            build_backend(EngineConfig(device=device, activation_bits=8), stored)
    with pytest.raises(
        ConfigError, match=r"--activation-bits 8 .*--quantization none holds none so"
    ):
        build_backend(EngineConfig(activation_bits=8, quantization="none"), stored)
    with pytest.raises(ConfigError, match="this model has none: add --quantization int8 or int4"):
        build_backend(EngineConfig(activation_bits=8), stored)
    config = EngineConfig(activation_bits=8, quantization="int4", num_threads=1, max_model_len=128)
    Driver(build_backend(config, stored))  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("kv_cache_dtype", "row_bytes"),
    [("auto", 64), ("bfloat16", 64), ("float32", 128), ("int8", 34), ("fp8", 34)],
)
def test_the_kv_cache_has_the_format_that_was_asked_for(
    tmp_path: Path, kv_cache_dtype: Any, row_bytes: int
) -> None:
    model = tiny_model("gemma3")
    save_file(model.tensors, tmp_path / "model.safetensors")
    config = EngineConfig(num_threads=1, max_model_len=128, kv_cache_dtype=kv_cache_dtype)
    backend = build_backend(config, files(model.config, tmp_path))
    assert backend.kv_bytes_per_block == 2 * 16 * 2 * row_bytes  # of one of its layers
    Driver(backend)  # type: ignore[arg-type]  # as above: its cache is as large as it says


def test_a_device_takes_the_dtype_it_computes_in_as_that_of_its_kv(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_file(model.tensors, tmp_path / "model.safetensors")
    config = EngineConfig(device="torch", dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert build_backend(config, files(model.config, tmp_path)).name.startswith("torch/")
