"""Benches on a GPU: its own limits, what it holds of a model, and both beside its steps. The device
is torch's CPU under another name; its kernels are the plain ones."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.commands import bench_latency, bench_steps
from octavo.measure import device_limits, limits
from octavo.measure.machine_limits import MachineLimits
from octavo.measure.shapes import write_shape
from octavo.measure.weight_formats import held_by_cpu, held_by_gpu
from octavo_engine.backends.torch import cuda
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError
from octavo_engine.weights.source import resolve_model
from tests.octavo.measure.no_words import write_tokenizer

CPU = torch.device("cpu")
LIMITS = MachineLimits(2, 10.0, {"bf16": 1.0, "int8": 2.0}, device="Abacus 9")
PROCESSOR = MachineLimits(2, 5.0, {"bf16": 0.5})


@pytest.fixture
def abacus(monkeypatch):
    """--device cuda computes on the host, whose limits are made up."""
    monkeypatch.setattr(cuda, "open_device", lambda name: CPU)
    monkeypatch.setattr(device_limits, "measure_device_limits", lambda device, dtype: LIMITS)


def test_a_device_s_limits_are_a_copy_and_products_of_what_it_multiplies():
    calls = []

    def timer(work):
        calls.append(work())
        return 2.0  # milliseconds

    found = device_limits.measure_device_limits(CPU, num_bytes=1000, size=64, timer=timer)
    assert found.read_gb_s == pytest.approx(2 * 1000 / 2e-3 / 1e9)
    rate = 2 * 64**3 / 2e-3 / 1e9
    assert found.gemm_gflop_s == pytest.approx({"bf16": rate, "int8": rate, "fp8": rate})
    assert [call.dtype for call in calls] == [
        torch.bfloat16, torch.int32, torch.bfloat16, torch.uint8,
    ]  # fmt: skip
    assert found.describe().startswith("cpu, 0.0 GB/s read, GFLOP/s: 0 bf16")
    wide = device_limits.measure_device_limits(
        CPU, dtype="float32", num_bytes=8, size=8, timer=timer
    )
    assert set(wide.gemm_gflop_s) == {"float32"}


def test_a_product_that_the_device_does_not_know_has_no_peak(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("needs compute capability 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    found = device_limits.measure_device_limits(
        CPU, num_bytes=8, size=32, timer=lambda work: (work(), 1.0)[1]
    )
    assert set(found.gemm_gflop_s) == {"bf16", "int8"}


def test_limits_are_those_of_what_the_settings_compute_on(abacus, monkeypatch):
    monkeypatch.setattr(limits, "measure_limits", lambda: PROCESSOR)
    assert limits.limits_for(EngineConfig(model="m", device="cuda")) is LIMITS
    assert limits.limits_for(EngineConfig(model="m")) is PROCESSOR
    assert limits.limits_for(EngineConfig(model="m", device="sim")) is None


def test_without_a_gpu_the_bench_says_so_before_it_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        limits.limits_for(EngineConfig(model="m", device="cuda"))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8},
        }
    },
}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}},
    },
}


@pytest.mark.parametrize(
    ("quantization", "settings", "has_fp8", "held"),
    [
        (None, {}, True, (16, 16, "bf16", "bf16")),
        (None, {"dtype": "float32"}, True, (32, 32, "float32", "float32")),
        (GPTQ, {}, True, (4 + 16 / 128, 16, "4-bit", "bf16")),
        (AWQ, {}, True, (4 + 32 / 128, 16, "4-bit", "bf16")),
        (GPTQ | {"group_size": -1}, {}, True, (4, 16, "4-bit", "bf16")),
        (GPTQ, {"quantization": "none"}, True, (16, 16, "bf16", "bf16")),
        (INT8, {}, True, (8, 16, "8-bit", "int8")),
        (INT8, {"dtype": "float32"}, True, (8, 32, "8-bit", "float32")),
        ({"quant_method": "fp8"}, {}, True, (8, 16, "fp8", "fp8")),
        ({"quant_method": "fp8"}, {}, False, (16, 16, "bf16", "bf16")),
        (NVFP4, {}, True, (16, 16, "bf16", "bf16")),
        ({"quant_method": "bitsandbytes"}, {}, True, (16, 16, "bf16", "bf16")),
    ],
)
def test_weights_count_in_the_form_that_a_gpu_holds(quantization, settings, has_fp8, held):
    files: Any = SimpleNamespace(gguf=None, config={"quantization_config": quantization})
    config = EngineConfig(model="m", device="cuda", **settings)
    assert held_by_gpu(config, files, has_fp8=has_fp8) == held


def test_floats_of_four_bits_are_held_so_by_a_cpu():
    files: Any = SimpleNamespace(gguf=None, config={"quantization_config": NVFP4})
    assert held_by_cpu(EngineConfig(model="m"), files) == (4.5, 16, "4-bit", "int8")


def test_of_a_gguf_file_the_types_count_that_stay_as_they_are():
    files = resolve_model("demo://smollm2")  # Q4_1 and Q8_0; the head is the embedding
    found = held_by_gpu(EngineConfig(model="m", device="cuda"), files, has_fp8=True)
    assert 5 <= found.body_bits < 8.5
    assert found[1:] == (16, "4-bit", "bf16")


@pytest.mark.slow
def test_steps_on_a_gpu_stand_beside_its_bandwidth_and_its_peak(tmp_path, abacus, capsys):
    file = tmp_path / "steps.json"
    argv = ["--shape", "tiny", "--device", "cuda", "--batch-sizes", "1,2", "--context-len", "20"]
    sizes = ["--input-len", "30", "--num-iters", "2", "--kv-cache-memory-bytes", "8MiB"]
    assert bench_steps.main("bench", [*argv, *sizes, "--json", str(file)]) == 0

    reported = capsys.readouterr()
    assert reported.err.startswith("Abacus 9, 10.0 GB/s read, GFLOP/s: 1 bf16, 2 int8")
    assert "of bandwidth" in reported.out and "of bf16 peak" in reported.out
    document = json.loads(file.read_text())
    assert document["backend"] == "cuda/bfloat16/plain"
    one, two = document["decode"]
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256
    num_bytes = 2 * (2 * layer + 1024 * 128)  # weights, twice as much for two as for one
    assert one["of_bandwidth"] * one["seconds"] * 10e9 == pytest.approx(num_bytes, rel=0.1)
    assert two["of_peak"] * two["seconds"] == pytest.approx(2 * one["of_peak"] * one["seconds"])


def test_a_batch_on_a_gpu_stands_beside_both_too(tmp_path, abacus, monkeypatch):
    write_shape("tiny", tmp_path)
    write_tokenizer(tmp_path)
    file = tmp_path / "latency.json"
    argv = [str(tmp_path), "--load-format", "dummy", "--device", "cuda"]
    sizes = ["--input-len", "8", "--output-len", "3", "--num-iters", "1", "--json", str(file)]
    assert bench_latency.main("bench", [*argv, *sizes, "--kv-cache-memory-bytes", "8MiB"]) == 0
    figures = json.loads(file.read_text())
    assert figures["machine"] == LIMITS.describe()
    assert figures["percent_of_bandwidth"] > 0 < figures["percent_of_peak_flops"]


def test_a_peak_that_is_not_known_has_no_share(tmp_path, abacus, monkeypatch, capsys):
    unknown = dataclasses.replace(LIMITS, gemm_gflop_s={})
    monkeypatch.setattr(device_limits, "measure_device_limits", lambda device, dtype: unknown)
    argv = ["--shape", "tiny", "--device", "cuda", "--batch-sizes", "1", "--context-len", "9"]
    sizes = ["--input-len", "9", "--num-iters", "1", "--kv-cache-memory-bytes", "8MiB"]
    assert bench_steps.main("bench", [*argv, *sizes, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompt"]["of_peak"] is None and document["prompt"]["of_bandwidth"] > 0
