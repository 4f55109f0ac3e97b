"""What a step has to read and to multiply, against sums made by hand."""

from __future__ import annotations

import math

import pytest

from octavo.measure.machine_limits import MachineLimits
from octavo.measure.shapes import SHAPES, write_shape
from octavo.measure.work import ModelWork, WorkStep
from octavo_engine.config import EngineConfig
from octavo_engine.weights.source import resolve_model

LIMITS = MachineLimits(2, read_gb_s=10.0, gemm_gflop_s={"float32": 100.0, "bf16": 200.0})


def work_of(tmp_path, shape="tiny", **settings):
    write_shape(shape, tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="dummy", **settings)
    return ModelWork.of(config, resolve_model(str(tmp_path)), kv_bytes_per_token=1024.0)


def test_the_demo_model_s_weights_are_those_of_its_file():
    model = "demo://smollm2"
    files = resolve_model(model)
    work = ModelWork.of(EngineConfig(model=model), files, kv_bytes_per_token=0.0)

    assert work.head_weights == 49_152 * 576  # tied: the embedding is the head
    norms = 61 * 576
    assert work.body_weights + work.head_weights + norms == 134_515_008
    assert files.gguf is not None
    # Q8_0 and Q4_1 are computed from as they are: all of the file's matrices, byte for byte.
    matrices = [t for t in files.gguf.tensors.values() if len(t.shape) == 2]
    assert work.weight_bytes == sum(t.end - t.begin for t in matrices)
    assert work.form == "4-bit"


@pytest.mark.parametrize(
    ("settings", "form", "bits", "head_bits"),
    [
        ({}, "bf16", 16, 16),
        ({"dtype": "float32"}, "float32", 32, 32),
        ({"quantization": "int8"}, "8-bit", 8.5, 8.5),
        ({"quantization": "int4"}, "4-bit", 5, 8.5),
    ],
)
def test_weights_count_in_the_form_that_they_are_held_in(tmp_path, settings, form, bits, head_bits):
    work = work_of(tmp_path, **settings)
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256  # qkv, o; gate, up, down

    assert (work.body_weights, work.head_weights) == (2 * layer, 1024 * 128)
    assert work.form == form
    assert work.weight_bytes == (2 * layer * bits + 1024 * 128 * head_bits) / 8


def test_one_sequence_is_bound_by_reading_and_a_prompt_by_multiplying(tmp_path):
    work = work_of(tmp_path)
    one, prompt = WorkStep.decode(1, 100), WorkStep.prefill(100)

    assert work.best_s(one, LIMITS) == (work.weight_bytes + 100 * 1024) / 10e9
    assert work.bound(one, LIMITS) == "read bandwidth"
    # Each token sees those before it and itself; 2 layers of 4 heads of 32, q·k and p·v.
    pairs, flop_per_pair = 5050, 2 * 4 * 32 * 4
    products = work.body_weights * 100 + work.head_weights
    assert work.best_s(prompt, LIMITS) == (2 * products + pairs * flop_per_pair) / 200e9
    assert work.bound(prompt, LIMITS) == "bf16 GEMM peak"


def test_weights_are_read_once_for_all_sequences_and_the_cache_for_each(tmp_path):
    work = work_of(tmp_path)
    one, many = work.num_bytes(WorkStep.decode(1, 50)), work.num_bytes(WorkStep.decode(64, 50))
    assert many - one == 63 * 50 * 1024


def test_a_peak_that_was_not_measured_bounds_nothing(tmp_path):
    work = work_of(tmp_path, quantization="int8")
    assert math.isinf(work.peak(LIMITS))
    assert work.bound(WorkStep.prefill(4096), LIMITS) == "read bandwidth"


def test_every_shape_is_a_model_of_about_the_size_in_its_name(tmp_path):
    sizes = {"135m": 0.135, "360m": 0.36, "0.5b": 0.5, "1.5b": 1.5, "3b": 3.2, "8b": 8.0}
    assert {*sizes, "tiny"} == set(SHAPES)
    for name, billions in sizes.items():
        work = work_of(tmp_path, name)
        total = work.body_weights + work.head_weights
        if name == "8b":
            total += work.head_weights  # an embedding of its own
        assert 0.9 < total / 1e9 / billions < 1.1, name
