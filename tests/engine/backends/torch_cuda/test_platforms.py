"""Devices by plug-in, with one that is torch's own CPU under another name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.registry import build_backend
from octavo_engine.backends.torch import platforms
from octavo_engine.backends.torch.memory import DeviceMemory
from octavo_engine.backends.torch.platforms import TorchPlatform, find_platform
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError
from octavo_engine.weights.source import ModelFiles
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.tiny import tiny_model

LIMITS = BackendLimits(max_tokens=64, max_seqs=4, max_logit_rows=8, max_model_len=128)


class Abacus:
    """A CPU that says what it has."""

    name = "abacus"
    reported: DeviceMemory | None = DeviceMemory(8 << 30, 16 << 30)
    missing: str | None = None

    def problem(self):
        return self.missing

    def device(self):
        return torch.device("cpu")

    def supports(self, dtype):
        return dtype != torch.float16

    def memory(self):
        return self.reported


@pytest.fixture
def abacus(monkeypatch):
    """The plug-in, as if a package had brought it."""
    platform = Abacus()
    entry = SimpleNamespace(name="abacus", load=lambda: lambda: platform)
    everything = importlib.metadata.entry_points

    def listed(**wish):
        return [entry] if wish.get("group") == platforms.GROUP else everything(**wish)

    monkeypatch.setattr(importlib.metadata, "entry_points", listed)
    return platform


def build(**options):
    files = ModelFiles("tiny", Path("nowhere"), "safetensors", tiny_model("llama").config, {})
    config = EngineConfig(device="plugin", platform="abacus", load_format="dummy", **options)
    return build_backend(config, files)


@pytest.mark.usefixtures("abacus")
def test_a_model_runs_on_a_device_that_a_package_brought(caplog):
    backend = build(dtype="float32")
    assert backend.name == "abacus/float32/plain"
    assert "Computing on abacus by plain torch, which has not been tested there" in caplog.text
    files = ModelFiles("tiny", Path("nowhere"), "safetensors", tiny_model("llama").config, {})
    truth = build_backend(EngineConfig(device="torch", dtype="float32", load_format="dummy"), files)
    token_ids = random_tokens(40)
    found, expected = (run_alone(cast("Any", b), token_ids) for b in (backend, truth))
    np.testing.assert_allclose(found, expected, **FLOAT32)


def test_memory_is_what_the_device_says(abacus):
    backend = build()
    assert 0 < backend.kv_memory(LIMITS, 0.5) <= 4 << 30
    assert backend.kv_memory(LIMITS, None) == int(0.9 * (8 << 30))  # nobody shares a device
    abacus.reported = None
    assert backend.kv_memory(LIMITS, 0.5) == 0  # --kv-cache-memory-bytes must say


@pytest.mark.usefixtures("abacus")
def test_dtypes_that_it_does_not_have_are_not_chosen():
    assert build().name == "abacus/bfloat16/plain"
    with pytest.raises(ConfigError, match="--dtype float16 is not available on abacus"):
        build(dtype="float16")


def test_what_is_missing_is_said(abacus):
    abacus.missing = "its beads are gone"
    with pytest.raises(ConfigError, match="--platform abacus cannot be used here: its beads"):
        find_platform("abacus")
    for name in (None, "slate"):
        with pytest.raises(ConfigError, match="one of abacus, hpu, npu, tpu, xpu"):
            find_platform(name)
    with pytest.raises(ConfigError, match="--platform goes with --device plugin"):
        EngineConfig(device="cpu", platform="xpu")


@pytest.mark.parametrize("name", ["xpu", "hpu", "npu", "tpu"])
def test_ours_say_what_they_need(name):
    try:
        find_platform(name)
    except ConfigError as error:
        assert "is not installed" in str(error) or "torch sees no device" in str(error)
    else:
        pytest.skip(f"there is a {name} here")


def test_a_package_s_module_is_asked(monkeypatch):
    fake = SimpleNamespace(is_available=lambda: True, mem_get_info=lambda: (3, 5))
    monkeypatch.setattr(torch, "xpu", fake)
    platform = find_platform("xpu")
    assert platform.memory() == DeviceMemory(3, 5)
    assert platform.device() == torch.device("xpu", 0)
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: True))
    assert TorchPlatform("xpu", None).memory() is None
