"""Which backend, kernels and dtype a machine gets, and what it costs to find out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo_engine.backends.registry import build_backend
from octavo_engine.backends.torch.build_cuda import settle_dtype
from octavo_engine.backends.torch.cuda import CudaBackend
from octavo_engine.backends.torch.kernels import choose_kernels
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError
from octavo_engine.weights.source import ModelFiles
from tests.engine.models.tiny import tiny_model

CPU = torch.device("cpu")
SHAPE = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16)


def choose(choice="auto", **options):
    return choose_kernels(CPU, torch.bfloat16, SHAPE, choice=choice, **options)


def test_a_host_gets_plain_kernels_unless_told_otherwise(caplog):
    caplog.set_level("INFO")
    assert choose().name == "plain"
    assert "Triton compiles for GPUs, not for cpu" in caplog.text
    assert choose("triton").name == "triton"
    with pytest.raises(ConfigError, match="batch-invariant results need the Triton kernels"):
        choose(batch_invariant=True)


def test_triton_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install triton"):
        choose("triton")


@pytest.mark.parametrize(
    ("requested", "stored", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.bfloat16),
        ("auto", "float16", torch.float16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_weights_are_held_in_sixteen_bits_unless_told_otherwise(requested, stored, expected):
    assert settle_dtype(requested, stored) == expected


def test_asking_for_a_gpu_that_is_not_there_is_an_error_not_another_device():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    files = ModelFiles("tiny", Path("nowhere"), "safetensors", tiny_model("llama").config, {})
    config = EngineConfig(device="cuda", load_format="dummy")
    with pytest.raises(ConfigError, match="--device cuda needs a GPU that torch can use"):
        build_backend(config, files)


def test_flags_reach_the_backend(monkeypatch):
    seen: dict[str, Any] = {}

    def open_backend(config, checkpoint, settings, **options):
        seen.update(options, settings=settings)

    monkeypatch.setattr(CudaBackend, "open", open_backend)
    files = ModelFiles("tiny", Path("nowhere"), "safetensors", tiny_model("llama").config, {})
    config = EngineConfig(device="cuda", load_format="dummy")
    build_backend(config, files)
    settings = seen["settings"]
    assert (settings.kernels, settings.use_graphs, seen["keep_quantized"]) == ("auto", True, True)
    assert not settings.batch_invariant
    chosen = config.replace(
        kernels="triton", enforce_eager=True, batch_invariant=True, quantization="none"
    )
    build_backend(chosen, files)
    settings = seen["settings"]
    assert (settings.kernels, settings.use_graphs) == ("triton", False)
    assert not seen["keep_quantized"] and settings.batch_invariant
    assert settings.attention == "auto"


def test_the_reference_has_no_batch_invariant_mode():
    with pytest.raises(ConfigError, match="--device must be cpu or cuda; got torch"):
        EngineConfig(device="torch", batch_invariant=True)
    assert EngineConfig(device="cpu", batch_invariant=True).batch_invariant  # as it always is
