"""What the measuring scripts do that needs no GPU: models, steps, the check, the verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from benchmarks.gpu import (
    adapters,
    attention,
    correctness,
    encoders,
    estimate,
    gap,
    kv,
    latent,
    measure,
    products,
    run,
    server,
    states,
    verify,
)
from benchmarks.gpu.measure import Ceilings
from benchmarks.gpu.random_model import TINY, Bench
from octavo.measure import device_limits
from octavo.measure.machine_limits import MachineLimits
from octavo_engine.backends.backend import BackendLimits
from octavo_engine.models.latent_config import LatentConfig
from octavo_engine.models.recurrent_config import DeltaConfig, MambaConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
LIMITS = BackendLimits(max_tokens=64, max_seqs=3, max_logit_rows=8, max_model_len=512)


def test_the_check_passes_on_the_host_and_fails_for_wrong_numbers(monkeypatch):
    errors = correctness.check("cpu", kernels="plain")
    assert set(errors) == {"prompts", "mixed", "decode"}
    assert 0.001 < max(errors.values()) < correctness.MAX_ERROR  # bf16 against float32
    monkeypatch.setattr(correctness, "MAX_ERROR", 0.001)
    with pytest.raises(AssertionError, match="logits are wrong"):
        correctness.check("cpu", kernels="plain")


def test_filled_rows_decode_as_one_prompt_would():
    bench = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.float32, kernels="plain")
    bench.fill(3, 70)
    step = bench.step([70] * 3, [1] * 3)
    logits = bench.backend.logits(step)
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    whole = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.float32, kernels="plain")
    whole.backend.execute(whole.step([0], [64]), whole.sampling(whole.step([0], [64])))
    np.testing.assert_allclose(
        whole.backend.logits(whole.step([64], [7])), logits[:1], rtol=1e-4, atol=1e-5
    )


def test_products_and_experts_are_measured_beside_bf16():
    best = Ceilings(bytes_per_s=1e9, flops_per_s=1e12)
    calls: list[torch.Tensor] = []

    def timer(works):
        calls.extend(work() for work in works)
        return 2.0

    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "rows": (1, 3),
        "kernels": "plain",
        "timer": timer,
    }
    found = products.quantized(best, shape=(64, 256), rotated_bytes=0, **options)
    assert found["bf16_1_bandwidth_share"] == pytest.approx(64 * 256 * 2 / 2e-3 / 1e9)
    assert found["int4_1_bandwidth_share"] == pytest.approx((64 * 128 + 64 * 2 * 4) / 2e-3 / 1e9)
    assert {name.rsplit("_", 2)[0] for name in found if name.endswith("_3_ms")} == set(
        products.KINDS
    )
    mixed = products.mixtures(best, shapes={"tiny": (4, 2, 64, 64)}, **options)
    assert mixed["tiny_3_peak_share"] == pytest.approx(2 * 3 * 2 * 3 * 64 * 64 / 2e-3 / 1e12)
    assert mixed["tiny_int4_3_ms"] == mixed["tiny_fp8_1_ms"] == 2.0
    assert len(calls) == 2 * len(products.KINDS) + 6
    assert all(torch.isfinite(result).all() for result in calls)


def test_latent_attention_is_measured_beside_a_copy_of_its_vectors():
    config = LatentConfig(
        rank=32, rope_dim=16, nope_dim=24, value_dim=20, query_rank=None, turns_neighbours=True
    )
    results: list[torch.Tensor] = []

    def timer(works):
        results.extend(work() for work in works)
        return 2e-3

    found = latent.measure(
        Ceilings(bytes_per_s=1e9, flops_per_s=1e12), device=torch.device("cpu"),
        shape=latent.Shape(4, config), walks={"1_x_300": [300], "2_x_40": [40, 40]},
        num_processors=3, timer=timer,
    )  # fmt: skip
    assert found["1_x_300_us"] == found["2_x_40_layer_us"] == 2.0
    assert found["1_x_300_copy_us"] == pytest.approx(300 * 48 * 4 / 1e3)
    assert found["2_x_40_bandwidth_share"] == pytest.approx(80 * 48 * 4 / 1e3 / 2)
    assert len(results) == 2 * 2 * latent.LAYERS
    assert all(torch.isfinite(result).all() for result in results)


def test_encoders_are_measured_by_texts_and_by_their_share_of_products(device):
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4}  # fmt: skip
    found = encoders.encoders(
        Ceilings(bytes_per_s=1e9, flops_per_s=1e12), device=device, shapes={"tiny": tiny},
        num_texts=12, step_tokens=(512,), kernels="plain",
    )  # fmt: skip
    assert list(found) == [
        "tiny_512_texts_per_s", "tiny_512_tokens_per_s", "tiny_512_peak_share",
        "tiny_512_step_ms", "tiny_512_step_peak_share", "tiny_one_text_ms",
    ]  # fmt: skip
    tokens = found["tiny_512_tokens_per_s"] / found["tiny_512_texts_per_s"] * 12
    assert 12 * 20 <= round(tokens) <= 12 * 200
    # By hand: 2 layers of 4 * 64 * 64 and 2 * 64 * 128 weights, and attention of each text.
    lengths = np.random.default_rng(0).integers(20, 201, 12)
    flops = 2 * 65536 * lengths.sum() + 4 * 2 * 64 * (lengths**2).sum()
    seconds = 12 / found["tiny_512_texts_per_s"]
    assert found["tiny_512_peak_share"] == pytest.approx(flops / seconds / 1e12)


def test_states_are_measured_beside_a_copy_of_their_bytes(device):
    best = Ceilings(bytes_per_s=1e9, flops_per_s=1e12)
    layers: dict[str, MambaConfig | DeltaConfig] = {
        "mamba2": MambaConfig(2, 16, 1, 24, 4, True, False, 0.0, float("inf")),
        "delta": DeltaConfig(1, 2, 16, 16, 3),
    }
    calls: list[torch.Tensor] = []

    def timer(works):
        calls.extend(work() for work in works)
        return 2.0

    found = states.measure(
        best, device=device, layers=layers, rows=(1, 3), prompt=19, rotated_bytes=0,
        timer=timer,
    )  # fmt: skip
    moved = 2 * 3 * 4 * (2 * 24 * 16 + 240)  # 3 inputs of 80 columns
    assert found["mamba2_3_bandwidth_share"] == pytest.approx(moved / 2e-3 / 1e9)
    assert found["delta_prompt_peak_share"] == pytest.approx(19 * 2 * 256 * 6 / 2e-3 / 1e12)
    assert [len(call) for call in calls[:8]] == [1, 1, 3, 3, 19, 19, 19, 19]
    assert all(torch.isfinite(result).all() for result in calls)


def test_whole_steps_are_timed_ahead_and_not_in_a_pool_that_is_free_again():
    bench = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.float32, kernels="plain")
    found = gap.steps(bench, 2, 20, device_ms=lambda: 0.0, num_steps=3)
    assert found["waiting_gap_share"] == found["ahead_gap_share"] == 1
    assert found["waiting_step_ms"] > 0 < found["ahead_step_ms"]
    assert found["ahead_penalised_step_ms"] > 0


def test_steps_with_adapters_are_timed_beside_the_bytes_that_they_add():
    bench = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.float32, kernels="plain")
    options: dict[str, Any] = {"num_seqs": 3, "counts": (0, 1, 3), "num_steps": 2}
    found = adapters.decode(bench, Ceilings(bytes_per_s=1e9, flops_per_s=1e12), **options)
    assert bench.backend._adapters is not None
    # q, k, v; o; gate and up; down: 3 layers of 16 ranks in float32, and a table.
    values = 3 * 16 * ((3 + 1 + 2) * 256 + 512 + 256 + 2 * 64 + 256 + 1024 + 256)
    assert found["adapter_mb"] * 1e6 == 4 * values + 3 * 7 * 16 + 48
    assert found["3_bytes_ms"] == pytest.approx(3 * found["adapter_mb"])
    assert found["3_added_ms"] == found["3_device_ms"] - found["0_device_ms"]
    assert found["upload_gb_per_s"] > 0 < found["3_step_beside_upload_ms"]


def test_steps_that_verify_are_timed_beside_plain_ones_and_loops_beside_loops(device):
    on_device = device.type == "cuda"
    bench = Bench.make(
        TINY | {"num_hidden_layers": 1}, LIMITS, device=device.type, dtype=torch.float32,
        kernels="plain", num_drafts=verify.NUM_DRAFTS,
    )  # fmt: skip
    head = next(layer.weight for layer in bench.linears if layer.is_head)
    assert isinstance(head, torch.Tensor)
    before = head.clone()

    def timer(work):
        work()
        return 2.0

    found = verify.verify(bench, Ceilings(1e9, 1e12), sizes=(1, 2), context=40, timer=timer)
    assert found["verify_2_cost"] == found["verify_2_ms"] / found["plain_2_ms"]
    assert found["loop_1_gain"] > 0 < found["loop_2_drafts_tokens_per_s"]
    assert found["plain_1_bandwidth_share"] > 0
    assert torch.equal(head, before) and head.is_cuda == on_device


def test_blocks_come_back_and_are_timed_beside_the_link_and_computing(monkeypatch):
    monkeypatch.setattr(kv, "LINK_BYTES", 1 << 20)
    bench = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.float32, kernels="plain")
    found = kv.tiers(bench, num_tokens=200, num_decodes=2)
    assert found["gigabytes"] == pytest.approx(12 * 16 * 3 * 2 * 2 * 32 * 4 / 1e9)
    for name in ("load_ms", "save_ms", "compute_ms", "link_gb_per_s", "decode_beside_copies_ms"):
        assert found[name] > 0
    assert found["faster_than_computing"] == pytest.approx(
        found["compute_ms"] / found["load_ms"], rel=1e-6
    )


def test_attention_over_eight_bits_is_timed_beside_sixteen():
    limits = BackendLimits(max_tokens=64, max_seqs=2, max_logit_rows=2, max_model_len=64)
    found = kv.fp8(
        lambda kind: attention.Layers("cpu", kv_cache_dtype=kind, limits=limits),
        Ceilings(bytes_per_s=1e9, flops_per_s=1e12), walks={"2 x 30": [30, 30]},
        timer=lambda works: float(torch.isfinite(cast("torch.Tensor", works[0]())).all()),
    )  # fmt: skip
    assert found["2 x 30 speedup"] == 1.0
    shares = [found[f"2 x 30 {kind} bandwidth_share"] for kind in ("bf16", "fp8")]
    assert shares[1] / shares[0] == pytest.approx(130 / 256)


def test_the_draw_is_timed_by_what_rows_wish_for():
    bench = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.float32, kernels="plain")
    drawn: list[Any] = []

    def timer(work):
        drawn.append(work())
        return 2.0

    found = measure.draw(bench, 3, timer=timer)
    assert list(found) == [
        "greedy_ms", "temperature_ms", "top_k_ms", "top_p_ms", "both_ms", "both_of_equal_ms",
    ]  # fmt: skip
    assert all((tokens >= 0).all() and not status.any() for tokens, status in drawn)


def test_the_report_begins_with_the_device_its_correctness_and_its_ceilings(monkeypatch, capsys):
    limits = MachineLimits(2, 3000.0, {"bf16": 800e3, "fp8": 1.5e6}, device="Abacus 9")
    monkeypatch.setattr(run, "describe", lambda: {"name": "Abacus 9"})
    monkeypatch.setattr(correctness, "check", lambda: {"prompts": 0.01})
    monkeypatch.setattr(device_limits, "measure_device_limits", lambda device: limits)
    monkeypatch.setattr(Bench, "make", lambda *args, **options: None)
    report = run.measure(2, [], lambda report: None)
    run.print_table(report)
    shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["ceilings", "copy_gb_per_s", "3000"] in shown
    assert ["ceilings", "bf16_tflops", "800"] in shown and [
        "ceilings",
        "fp8_tflops",
        "1500",
    ] in shown


def test_goals_are_judged_beside_their_numbers(capsys):
    parts = {"steps1": {"ahead_gap_share": 0.05}, "decode1": {"bandwidth_share": 0.9}}
    run.print_table({"layers": 32} | parts)
    share, bandwidth = capsys.readouterr().out.splitlines()
    assert share.endswith("goal <= 0.03: missed")
    assert bandwidth.endswith("goal >= 0.85: met")


def test_a_part_that_fails_is_reported_and_holds_up_no_other(monkeypatch, tmp_path):
    limits = MachineLimits(2, 3000.0, {"bf16": 800e3}, device="Abacus 9")
    monkeypatch.setattr(run, "describe", lambda: {"name": "Abacus 9"})
    monkeypatch.setattr(correctness, "check", lambda: {"prompts": 0.01})
    monkeypatch.setattr(device_limits, "measure_device_limits", lambda device: limits)
    monkeypatch.setattr(Bench, "make", lambda *args, **options: None)
    monkeypatch.setattr(measure, "draw", lambda *args: 1 // 0)
    monkeypatch.setattr(measure, "upload", lambda: {"gb_per_s": 26.0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "gpu.json"
    assert run.main(["--only", "draw", "upload", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["draw"] == {"failed": "ZeroDivisionError: integer division or modulo by zero"}
    assert report["upload"] == {"gb_per_s": 26.0}


def test_attention_is_compared_with_a_copy_of_its_bytes_and_with_its_products():
    walk = attention.figure("walk 64 x 300 (64, 2, 5)", 0.5, 1e12)
    assert walk["bandwidth_share"] == pytest.approx(64 * 300 * 8 * 128 * 4 / 0.5e-3 / 1e12)
    prompt = attention.figure("prompt 2048 cudnn", 0.1, 1e12)
    assert prompt["tflops"] == pytest.approx(4 * 2048**2 / 2 * 32 * 128 / 0.1e-3 / 1e12)


def test_a_step_is_estimated_by_what_it_must_read_and_multiply(capsys):
    bench = Bench.make(TINY, LIMITS, device="cpu", dtype=torch.bfloat16, kernels="plain")
    products = [each for each in estimate.of_decode(TINY, 1, 1) if each.flops][:5]
    values = sum(2 * (layer.weight.shape[0] + layer.weight.shape[1]) for layer in bench.linears)
    weights = sum(layer.weight.nbytes for layer in bench.linears)
    assert sum(each.num_bytes for each in products) == weights + values
    assert sum(each.flops for each in products) == weights  # two for each number of two bytes
    by_name = {each.name: each for each in estimate.of_prompt(TINY, 100)}
    assert by_name["attention"].flops == 3 * 4 * (100 * 101 / 2) * 8 * 32
    assert by_name["norms"].ms(1e15, 1e15) == pytest.approx(7 * estimate.LAUNCH_MS)
    assert estimate.main(["--bandwidth", "3016", "--peak", "786"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["a", "step", "5.146", "ms"]


def test_a_server_of_random_weights_is_measured_by_its_clients(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(server, "LOADS", ((3, 3, 8, 4), (1, 1, 8, 4)))
    out = tmp_path / "server.json"
    flags = ["--", "--num-threads", "1", "--kv-cache-memory-bytes", "16000000"]
    options = ["--shape", "tiny", "--device", "cpu", "--out", str(out)]
    assert server.main([*options, *flags]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["first start", "burst", "1 at once", "second start"]
    assert found["burst"]["completed"] == 3 and found["1 at once"]["failed"] == 0
    assert "burst" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_claimed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert "nothing was measured" in capsys.readouterr().err


@pytest.mark.timeout(900)  # a minute and a half, and many times that on a busy machine
def test_kernels_compile_for_hopper_without_spilling(tmp_path):
    """In a process of its own: here the kernels are the interpreter's. The report has them all."""
    out = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = ROOT / "benchmarks" / "gpu" / "compile_report.py"
    subprocess.run(
        [sys.executable, script, "--json", out, "--targets", "sm_90",
         "--only", "attend prompt", "texts", "draw: scan", "draw: weigh", "draw: pick", "adapters",
         "scan: "],
        env=environment | {"PYTHONPATH": str(ROOT / "engine")}, check=True, timeout=800,
        capture_output=True,
    )  # fmt: skip
    reports = {report["kernel"]: report for report in json.loads(out.read_text())}
    assert {name: r["stack"] + r["local"] for name, r in reports.items() if r["stack"]} == {}
    assert reports["attend prompt"]["wgmma"] and reports["attend prompt window cap"]["wgmma"]
    assert reports["adapters: shrink prompt"]["wgmma"]
    # A fused multiply-add would give other masses than the CPU's, and so other tokens.
    draws = [r["fused"] for name, r in reports.items() if name.startswith("draw")]
    assert draws == [0, 0, 0]
