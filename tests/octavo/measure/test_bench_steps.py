"""`octavo bench steps`: the whole way, on a model of a megabyte."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from octavo import plotting
from octavo.commands import bench_latency, bench_throughput
from octavo.measure import batch_limits, limits, roofline, study
from octavo.measure.machine_limits import MachineLimits
from octavo.measure.shapes import SHAPES, write_shape
from octavo.measure.steps import Stepper
from octavo.measure.work import ModelWork, WorkStep
from octavo_engine.config import EngineConfig
from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError
from octavo_engine.weights.source import resolve_model
from tests.fakes.process import environment
from tests.octavo.measure.no_words import write_tokenizer

LIMITS = MachineLimits(
    2, read_gb_s=10.0, gemm_gflop_s={"float32": 100.0, "bf16": 200.0, "int8": 400.0}
)
SIZES = study.StudySizes(
    batch_sizes=(1, 3), context_len=24, prompt_len=40, long_context_len=200, num_steps=4
)
KV_BYTES = 8 << 20


def config_of(tmp_path, **settings):
    write_shape("tiny", tmp_path)
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", kv_cache_memory_bytes=KV_BYTES, **settings
    )
    return study.roomy(config, SIZES)


def refused(*argv):
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli", "bench", *argv],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_study_has_every_step_beside_its_limit(tmp_path, capsys):
    found = study.measure(config_of(tmp_path), SIZES, name="tiny", limits=LIMITS)

    assert found.long_context is not None
    lines = [*found.decode, found.prompt, found.long_context]
    assert [line.what for line in lines] == ["decode 1", "decode 3", "prompt", "decode 1 at 200"]
    assert [line.num_tokens for line in lines] == [1, 3, 40, 1]
    assert all(line.seconds > 0 and line.of_limit > 0 for line in lines)
    # The greater share is the limit that a step meets first.
    shares = [max(line.of_bandwidth, line.of_peak or 0.0) for line in lines]
    assert shares == pytest.approx([line.of_limit for line in lines])
    document = json.loads(json.dumps(study.as_json(found)))
    assert document["decode"][1]["of_limit"] == found.decode[1].of_limit
    assert document["form"] == "bf16"
    study.show(found)
    assert "decode 3" in capsys.readouterr().out


def test_only_steps_count_in_which_every_sequence_gets_one_token(tmp_path, monkeypatch):
    engine, info = build_engine(config_of(tmp_path))
    sizes = []
    step = engine.step

    def recorded():
        report = step()
        assert report.stats is not None
        sizes.append(report.stats.step_tokens)
        return report

    monkeypatch.setattr(engine, "step", recorded)
    try:
        timed = Stepper(engine, info).decode(5, 30, 4)
    finally:
        engine.close()

    assert sizes[0] > 5  # prompts
    assert sizes[-6:] == [5] * 6  # two to warm up, four that count
    assert timed.step.num_tokens == 5
    assert 24 <= timed.step.num_kv_tokens / 5 <= 30
    assert not engine.has_work  # nothing is left for the next measurement


def test_what_waits_is_measured_and_not_refused():
    config = EngineConfig(model="any")
    assert math.isfinite(config.scheduler.queue_timeout_s)
    assert study.roomy(config, SIZES).scheduler.queue_timeout_s == math.inf


def test_prompts_are_new_to_the_cache(tmp_path):
    engine, info = build_engine(config_of(tmp_path))
    try:
        Stepper(engine, info).prefill(64, 2)
        stats = engine.stats()
    finally:
        engine.close()
    assert (stats.prompt_tokens, stats.prompt_tokens_cached) == (3 * 64, 0)


def test_a_shape_may_be_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SHAPES["tiny"]))
    (tmp_path / "out").mkdir()
    write_shape(str(path), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == SHAPES["tiny"]


def test_a_wrong_shape_is_one_sentence_that_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"--shape huge is not known; give one of tiny, 135m"):
        write_shape("huge", tmp_path)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(SHAPES["tiny"] | {"hidden_size": -1}))
    with pytest.raises(ConfigError, match=r"bad\.json: .*hidden_size"):
        write_shape(str(path), tmp_path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold an object"):
        write_shape(str(path), tmp_path)


def test_a_shape_alone_means_its_steps_and_excludes_a_model():
    error = refused("--shape", "tiny", "--model", "demo://smollm2", "--num-iters", "1")
    assert error == "octavo: --shape makes a model up; leave --model out\n"


def test_the_simulator_has_no_steps_to_measure():
    error = refused("steps", "--device", "sim")
    assert error == "octavo: --device sim: single steps are measured on auto, cpu and cuda only\n"


@pytest.mark.slow
def test_the_roofline_is_a_picture_of_every_form(tmp_path):
    points = (("decode 1", 1.0, 9.0), ("decode 8", 8.0, 60.0), ("prompt", 300.0, 150.0))
    series = [study.Series("m, bf16", "bf16", points), study.Series("m, 4-bit", "int8", points)]
    for ending in plotting.ENDINGS:
        path = tmp_path / f"roof{ending}"
        roofline.draw(path, LIMITS, series)
        assert path.stat().st_size > 5000
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf; got roof\.gif"):
        plotting.require(tmp_path / "roof.gif")


def test_a_narrower_type_is_at_least_as_fast_as_the_one_it_widens_to(monkeypatch):
    monkeypatch.setattr(limits, "_best_s", lambda work: 1.0)
    numpy_peak = 2 * limits.MATRIX**3 / 1e9
    monkeypatch.setattr(limits, "_torch_peaks", lambda: {"float32": 30.0, "bf16": 5.0})
    assert limits._gemm_peaks() == {"float32": 30.0, "bf16": 30.0}
    monkeypatch.setattr(limits, "_torch_peaks", dict)
    monkeypatch.setattr(limits, "_multiplies_bf16", lambda: True)
    assert limits._gemm_peaks() == {"float32": numpy_peak}  # bf16's is not known without torch


@pytest.mark.parametrize(
    ("command", "flags", "count"),
    [(bench_latency, ("--batch-size", "3", "--num-iters", "1"), 3),
     (bench_throughput, ("--num-prompts", "3"), 3)],
)  # fmt: skip
def test_other_benches_stand_beside_the_limits_too(tmp_path, monkeypatch, command, flags, count):
    monkeypatch.setattr(limits, "measure_limits", lambda: LIMITS)
    write_shape("tiny", tmp_path)
    write_tokenizer(tmp_path)
    file = tmp_path / "figures.json"
    sizes = ("--input-len", "10", "--output-len", "5", "--kv-cache-memory-bytes", "8MiB")
    argv = [str(tmp_path), "--load-format", "dummy", *flags, *sizes, "--json", str(file)]
    assert command.main("bench", argv) == 0

    figures = json.loads(file.read_text())
    config = config_of(tmp_path)
    work = ModelWork.of(config, resolve_model(str(tmp_path)), kv_bytes_per_token=2 * 2 * 2 * 64)
    best_s = count * work.best_s(WorkStep.prefill(10), LIMITS)
    best_s += 4 * work.best_s(WorkStep.decode(count, 12), LIMITS)
    assert figures["limit_s"] == pytest.approx(best_s)
    assert figures["machine"] == LIMITS.describe()
    assert 0 < figures["percent_of_limit"] < 100
    both = figures["percent_of_bandwidth"], figures["percent_of_peak_flops"]
    assert 0 < max(both) <= figures["percent_of_limit"] <= sum(both)


def test_more_sequences_than_fit_at_once_come_in_waves(tmp_path):
    work = ModelWork.of(config_of(tmp_path), resolve_model(str(tmp_path)), kv_bytes_per_token=512.0)
    sizes = {"input_len": 8, "output_len": 3}
    two = batch_limits.batch_best(work, LIMITS, count=8, at_once=4, **sizes)
    one = batch_limits.batch_best(work, LIMITS, count=4, at_once=4, **sizes)
    assert two == pytest.approx([2 * seconds for seconds in one])
    assert one.seconds >= max(one.reading_s, one.multiplying_s)
