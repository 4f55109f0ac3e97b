"""Recordings of steps: what is in them, and that a viewer can draw them."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo import cli
from octavo_engine.config import SimConfig
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError, InvalidRequest
from octavo_engine.grammar.normal import regex_spec
from octavo_engine.profile import StepProfile
from octavo_engine.server.settings import ServerSettings
from octavo_engine.state.batch import ScheduledBatch
from octavo_engine.state.outputs import EngineStats, SequenceOutput
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.simulated import simulating

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.simulated import Simulated

SIM = SimConfig(time_scale=0.0)


class Clock:
    """A microsecond later whenever it is read."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns


def check(trace: dict[str, Any]) -> None:
    """Slices nest, and what begins on a request's track ends there."""
    steps = [e for e in trace["traceEvents"] if e.get("name") == "step"]
    for event in trace["traceEvents"]:
        assert event["ph"] in "XCMbe"
        if event["ph"] == "X" and event["name"] not in ("step", "send"):
            begin, end = event["ts"], event["ts"] + event["dur"]
            assert any(s["ts"] <= begin and end <= s["ts"] + s["dur"] + 1e-6 for s in steps)
    open_phases: dict[str, str] = {}
    for event in sorted(
        (e for e in trace["traceEvents"] if e["ph"] in "be"), key=lambda e: e["ts"]
    ):
        if event["ph"] == "b":
            assert event["id"] not in open_phases
            open_phases[event["id"]] = event["name"]
        else:
            assert open_phases.pop(event["id"]) == event["name"]
    assert open_phases == {}


def is_operation(name: str) -> bool:
    return name.startswith(("linear", "attention", "rms_norm", "embedding", "select_rows", "glu"))


def phases(trace: dict[str, Any], request_id: str) -> list[str]:
    return [e["name"] for e in trace["traceEvents"] if e["ph"] == "b" and e["id"] == request_id]


def test_every_step_and_every_request_has_its_track(tmp_path: Path):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM("sim", device="sim", sim=SIM, max_num_seqs=2) as llm:
        llm.start_profile()
        llm.generate([[1] * 40, [2] * 5, [3] * 6], params, use_tqdm=False)
        llm.stop_profile(tmp_path / "p.json")
        steps_before = llm._engine.profile
        llm.generate([[4]], params, use_tqdm=False)
    assert steps_before is None
    trace = json.loads((tmp_path / "p.json").read_text())
    check(trace)
    steps = [e["args"] for e in trace["traceEvents"] if e.get("name") == "step"]
    assert len(steps) == trace["otherData"]["steps"]
    assert sum(step["tokens"] for step in steps) == 40 + 5 + 6 + 3 * 3
    assert sum(step["admitted"] for step in steps) == 3
    assert max(step["sequences"] for step in steps) == 2
    for request in ("1.0", "2.0", "3.0"):
        assert phases(trace, request) == ["queue", "prefill", "decode"]
    names = {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert names == {"step", "schedule", "inputs", "execute", "results", "update", "report"}


@pytest.mark.slow
def test_a_real_model_tells_forward_masks_and_sampling_apart(tmp_path: Path):
    params = SamplingParams(max_tokens=6, temperature=0, grammar=regex_spec("[a-z]{4}"))
    with LLM("demo://smollm2", kv_cache_memory_bytes=1 << 25, max_model_len=128) as llm:
        llm.start_profile()
        (result,) = llm.generate("One word:", params, use_tqdm=False)
        llm.stop_profile(tmp_path / "p.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))
    check(trace)
    spent: dict[str, float] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spent[event["name"]] = spent.get(event["name"], 0.0) + event["dur"]
    assert {"forward", "mask", "sample"} <= set(spent)
    assert spent["forward"] > spent["schedule"]
    operations = {name: time for name, time in spent.items() if " heads, layer " in name}
    assert len(operations) == 30  # a layer each
    assert (
        0.5
        < sum(time for name, time in spent.items() if is_operation(name)) / spent["forward"]
        <= 1
    )
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    forwards = [e for e in events if e["name"] == "forward"]
    for event in events:
        if is_operation(event["name"]):
            assert any(f["ts"] <= event["ts"] + 1e-3 and event["ts"] + event["dur"]
                       <= f["ts"] + f["dur"] + 1e-3 for f in forwards), event  # fmt: skip
    product = next(e for e in events if e["name"].startswith("linear 576→960"))
    assert product["args"]["flops"] == 2 * 576 * 960 * product["args"]["rows"]
    assert product["args"]["weight_bytes"] > 576 * 960 // 2
    assert result.outputs[0].text not in json.dumps(trace)


def test_what_is_too_much_is_not_kept(tmp_path: Path):
    profile = StepProfile(Clock(), max_events=6)
    for _ in range(9):
        profile.start_step()
        profile.laps.mark("schedule")
        profile.end_step(ScheduledBatch(), [], EngineStats())
        profile.sent()
    profile.waits("late")
    profile.leave("late")
    profile.write(tmp_path / "p.json")
    trace = json.loads((tmp_path / "p.json").read_text())
    check(trace)
    assert len(trace["traceEvents"]) < 15
    assert trace["otherData"] == {"steps": 9, "is_truncated": True}


def test_operations_leave_room_for_the_steps_after_them(tmp_path: Path):
    profile = StepProfile(Clock(), max_events=40)
    for _ in range(6):
        profile.start_step()
        profile.laps.inside += [("linear", 1, 2, {"rows": 1})] * 8
        profile.laps.mark("forward")
        profile.end_step(ScheduledBatch(), [], EngineStats())
    profile.write(tmp_path / "p.json")
    trace = json.loads((tmp_path / "p.json").read_text())
    names = [e["name"] for e in trace["traceEvents"]]
    assert (names.count("step"), names.count("linear")) == (6, 16)
    assert trace["otherData"] == {"steps": 6, "is_truncated": False}


def test_a_request_that_ran_before_and_one_that_is_aborted(tmp_path: Path):
    profile = StepProfile(Clock())
    profile.waits("a")
    profile.leave("a")
    profile.leave("a")
    profile.start_step()
    profile.laps.mark("schedule")
    output = SequenceOutput(request_id="unknown", token_ids=[1], finish_reason="stop")
    profile.end_step(ScheduledBatch(), [output], EngineStats())
    profile.waits("b")
    assert profile.write(tmp_path / "p.json") > 0
    check(json.loads((tmp_path / "p.json").read_text()))


def test_what_cannot_be_written_or_was_not_begun_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written"):
        StepProfile().write(tmp_path / "nowhere" / "p.json")
    with LLM("sim", device="sim", sim=SIM) as llm, pytest.raises(InvalidRequest, match="start_pro"):
        llm.stop_profile(tmp_path / "p.json")


# ── over HTTP ──


def post(server: Simulated, path: str) -> httpx.Response:
    return httpx.post(server.url + path, timeout=30)


def test_a_server_records_between_two_calls(tmp_path: Path):
    settings = ServerSettings(dev_mode=True, profile_dir=str(tmp_path))
    with simulating(settings=settings) as server:
        assert post(server, "/stop_profile").status_code == 400
        assert post(server, "/start_profile").status_code == 200
        body = {"prompt": "secret", "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        reported = post(server, "/stop_profile").json()
        assert post(server, "/stop_profile").status_code == 400
        assert server.core.profile is None
    (file,) = tmp_path.iterdir()
    assert reported["file"] == str(file)
    trace = json.loads(gzip.decompress(file.read_bytes()))
    check(trace)
    assert reported["events"] == len(trace["traceEvents"])
    assert trace["otherData"]["steps"] == 5
    assert sum(e["name"] == "send" for e in trace["traceEvents"]) == 5
    assert "secret" not in json.dumps(trace)


def test_a_folder_that_is_not_there_is_the_server_s_answer(tmp_path: Path):
    settings = ServerSettings(dev_mode=True, profile_dir=str(tmp_path / "nowhere"))
    with simulating(settings=settings) as server:
        assert post(server, "/start_profile").status_code == 200
        refused = post(server, "/stop_profile")
    assert refused.status_code == 400
    assert "cannot be written" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_benchmarks_record_what_they_measure(kind: str, tmp_path: Path, capsys: Any):
    file = tmp_path / "p.json"
    sizes = ("--input-len", "8", "--output-len", "3", "--json", "-", "--profile", str(file))
    few = ("--num-iters", "1") if kind == "latency" else ("--num-prompts", "2")
    flags = ("--model", "m", "--device", "sim", "--sim-time-scale", "0")
    assert cli.main(("bench", kind, *sizes, *few, *flags)) == 0, capsys.readouterr().err
    trace = json.loads(file.read_text())
    check(trace)
    assert trace["otherData"]["steps"] == 3
