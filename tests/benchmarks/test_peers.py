"""The engine beside its peers: simulators stand in for the servers that are not installed here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.peers import contenders, models, picture, run
from benchmarks.peers.bounds import best_rate
from benchmarks.peers.contenders import CONTENDERS, WITH_RANKS, Contender
from benchmarks.servers import NotReady, Server, free_port
from octavo import LLM, SamplingParams
from octavo.measure.machine_limits import MachineLimits
from octavo.measure.shapes import SHAPES
from octavo.measure.work import ModelWork
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.config import EngineConfig
from octavo_engine.weights.bfloat16 import to_bfloat16
from octavo_engine.weights.gguf import GGUFFile
from octavo_engine.weights.gguf_checkpoint import GGUFCheckpoint
from octavo_engine.weights.safetensors import SafetensorsCheckpoint
from octavo_engine.weights.source import ModelFiles, resolve_model
from tests.fakes.process import environment

pytestmark = pytest.mark.slow

LIMITS = MachineLimits(2, 10.0, {"float32": 100.0})
# Steps of 2 ms: on a machine that does much else, too, the tokens do not all come at once.
TINY = run.Scenario("few", 2, 4, 12, 32, ("out_tok_s", "ttft_ms", "tpot_ms"))


def simulator(name, *, scale="1", is_ours=False, form="bf16"):
    return Contender(
        name, form,
        (sys.executable, "-m", "octavo.cli", "serve", "--device", "sim", "--port", "{port}",
         "--sim-vocab-size", "49152", "--served-model-name", "smollm2",
         "--sim-time-scale", scale),
        env=environment(), ready="/ready", is_ours=is_ours,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LOGS", tmp_path)
    monkeypatch.setattr(run, "end_cleanly_on_sigterm", lambda: None)  # the test runner's own


def test_servers_take_turns_and_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    missing = Contender("gone", "bf16", ("{peers}/gone/bin/gone",))
    broken = Contender(
        "broken", "bf16", (sys.executable, "-c", "raise SystemExit('Error: no AVX')")
    )
    chosen = (simulator("octavo", is_ours=True), missing, broken, simulator("peer", scale="8"))
    monkeypatch.setattr(contenders, "CONTENDERS", chosen)
    monkeypatch.setattr(run, "SCENARIOS", (TINY,))
    monkeypatch.setattr(run, "measure_limits", lambda: LIMITS)
    file = tmp_path / "out.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "run",
            "--rounds",
            "2",
            "--peers",
            str(tmp_path),
            "--json",
            str(file),
            "--plot",
            str(tmp_path / "peers.png"),
        ],
    )

    assert run.main() == 0

    out, log = capsys.readouterr()
    document = json.loads(file.read_text())
    assert [server["name"] for server in document["servers"]] == ["octavo", "peer"]
    assert all(len(server["runs"]["few"]) == 2 for server in document["servers"])
    assert (
        "gone is not there; benchmarks/peers/setup.sh installs it" in document["failures"]["gone"]
    )
    assert "it ended with 1: Error: no AVX" in document["failures"]["broken"]
    assert "Not compared:" in out
    ours, peers = document["servers"]
    assert ours["octavo_is"] == {"few": {"out_tok_s": None, "ttft_ms": None, "tpot_ms": None}}
    assert peers["octavo_is"]["few"]["tpot_ms"] > 1  # a slower clock
    turns = [line.split(", ")[2].split(":")[0] for line in log.splitlines() if "round" in line]
    assert turns == ["octavo", "peer", "peer", "octavo"]


def test_an_advantage_is_above_one_where_octavo_is_better():
    ours = run.Standing(simulator("octavo", is_ours=True), None)  # type: ignore[arg-type]
    theirs = run.Standing(simulator("peer"), None)  # type: ignore[arg-type]
    other = run.Standing(simulator("other form", form="4-bit"), None)  # type: ignore[arg-type]
    ours.runs["few"] = [{"out_tok_s": v, "ttft_ms": 10.0} for v in (300.0, 90.0, 310.0)]
    theirs.runs["few"] = [{"out_tok_s": 150.0, "ttft_ms": 40.0}]
    all_of = [ours, theirs, other]

    assert run.advantage(theirs, all_of, "few", "out_tok_s") == 2.0  # of medians
    assert run.advantage(theirs, all_of, "few", "ttft_ms") == 4.0
    assert run.advantage(ours, all_of, "few", "out_tok_s") is None
    assert run.advantage(other, all_of, "few", "out_tok_s") is None
    assert "| peer | 150 | 2.00 x | 40 | 4.00 x | - |  |" in run.report(
        LIMITS, [], [TINY], {}, 1
    ) + "\n".join(
        f"| {s.contender.name} | "
        + " | ".join(run._cell(s, all_of, "few", f) for f in TINY.figures) + " |"
        for s in all_of
    )  # fmt: skip


def test_a_server_that_stands_still_uses_no_core_and_answers_when_it_goes_on(tmp_path):
    port = free_port()
    contender = simulator("octavo")
    with Server.start(
        contender.start_command(port, tmp_path), port=port, log=tmp_path / "log", ready="/ready",
        env=contender.env,
    ) as server:  # fmt: skip
        standing = run.Standing(contender, server)
        server.pause()
        before = server.cpu_s()
        assert not server_answers(server)
        assert server.cpu_s() == before
        server.resume()
        figures, error = run.measure(standing, TINY, "seed")
        assert (error, figures["out_tok_s"] > 0) == ("", True)
        assert server.memory().total_bytes > server.memory().anonymous_bytes / 2 > 1 << 20
        process = server.process
        server.pause()  # it must end all the same
    assert process.returncode in (0, -signal.SIGTERM, -signal.SIGKILL)


def server_answers(server):
    from benchmarks.servers import _answers

    return _answers(server.url + "/ready")


def test_requests_that_fail_are_no_figures(tmp_path):
    port = free_port()
    command = simulator("octavo").start_command(port, tmp_path)
    with Server.start(
        command, port=port, log=tmp_path / "log", ready="/ready", env=environment()
    ) as server:
        too_long = run.Scenario("long", 1, 1, 100_000, 2, ())
        figures, error = run.measure(run.Standing(simulator("octavo"), server), too_long, "seed")
    assert (figures, error) == ({}, "1 x http 400")


def test_a_server_that_does_not_get_ready_is_ended(tmp_path):
    with pytest.raises(NotReady, match=r"not ready after 0 s; it said last: nothing"):
        Server.start(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            port=free_port(), log=tmp_path / "log", within_s=0.2,
        )  # fmt: skip


def test_every_contender_names_what_is_not_installed(tmp_path):
    for contender in (*CONTENDERS, *WITH_RANKS):
        missing = contender.missing(tmp_path)
        assert missing.startswith(str(tmp_path)), contender.name
        words = contender.start_command(8123, tmp_path)
        assert "8123" in words
        assert not [word for word in words if "{" in word]


RPC_SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1])))
while True:
    client, _ = listener.accept()
    client.sendall(f"{len(os.sched_getaffinity(0))} {sys.argv[-1]}".encode())
    client.close()
"""
LLAMA_SERVER = """
import os, signal, socket, sys
print(*sys.argv[1:])
for address in sys.argv[sys.argv.index("--rpc") + 1].split(","):
    host, port = address.split(":")
    print(socket.create_connection((host, int(port))).recv(100).decode())
sys.stdout.flush()
os.killpg(0, signal.SIGTERM)
"""


def test_llama_cpp_is_started_over_servers_with_cores_of_their_own(tmp_path):
    programs = tmp_path / "llamaserver" / "bin"
    programs.mkdir(parents=True)
    for name, text in zip(contenders.LLAMA_PROGRAMS, (LLAMA_SERVER, RPC_SERVER), strict=True):
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)
    arguments = [str(tmp_path), "2", "-m", "a.gguf", "--port", "1"]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.llama_rpc", *arguments],
        stdout=subprocess.PIPE, text=True, env=environment(), timeout=60, start_new_session=True,
    )  # fmt: skip
    given, *servers = ended.stdout.splitlines()
    assert given.startswith("-m a.gguf --port 1 --rpc 127.0.0.1:")
    assert given.endswith(" -ngl 999")
    cores = len(os.sched_getaffinity(0))
    own = [max(1, (cores + 1) // 2), max(1, cores // 2)]
    assert servers == [f"{count} {count}" for count in own]


def four_bit_model(path):
    """A Llama of one layer, as small as blocks of 32 numbers let it be."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["a", "b"])
    rng = np.random.default_rng(1)
    for name, shape in (
        ("token_embd", (96, 64)), ("blk.0.attn_q", (64, 64)), ("blk.0.attn_k", (32, 64)),
        ("blk.0.ffn_down", (64, 128)),
    ):  # fmt: skip
        kind = gguf.GGMLQuantizationType.Q4_1
        values = rng.standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", rng.standard_normal(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_models_of_all_peers_hold_the_same_numbers(tmp_path):
    source = four_bit_model(tmp_path / "small.gguf")
    file = GGUFFile(source)
    models.write_safetensors(file, tmp_path / "model.safetensors")
    models.write_gguf(source, tmp_path / "bf16.gguf")

    original, again = GGUFCheckpoint(file), GGUFCheckpoint(GGUFFile(tmp_path / "bf16.gguf"))
    written = SafetensorsCheckpoint.open(tmp_path)
    words = GGUFFile(tmp_path / "bf16.gguf").metadata["tokenizer.ggml.tokens"]
    assert list(words) == ["a", "b"]
    assert set(written.names()) == set(original.names()) == set(again.names())
    for name, shape in (
        ("model.embed_tokens.weight", (96, 64)),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64)),  # whose rows GGUF permutes
        ("model.layers.0.mlp.down_proj.weight", (64, 128)),
        ("model.norm.weight", (64,)),
    ):
        truth = to_float32(original.read(name, shape))
        rounded = to_bfloat16(truth)
        np.testing.assert_array_equal(written.read(name, shape).data.view(np.uint16),
                                      rounded.reshape(-1))  # fmt: skip
        theirs = to_float32(again.read(name, shape))
        expected = truth if len(shape) == 1 else (rounded.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(theirs, expected.reshape(shape))


def test_the_large_model_is_the_same_in_all_forms_and_runs(tmp_path):
    """Small, in the place of a large one: its answers are equal in bf16 from both files."""
    config = models.LARGE | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    small = models.FORMS["smollm2"]
    (tmp_path / small.q4).symlink_to(resolve_model(models.SOURCE).path)
    models._write_tokenizer(tmp_path / small.q4, tmp_path / small.safetensors)
    models.write_random(tmp_path, "large", config)

    answers = []
    for name in models.FORMS["large"][:2]:
        with LLM(str(tmp_path / name), device="cpu", kv_cache_memory_bytes=1 << 20) as llm:
            (output,) = llm.generate(
                [[5, 6, 7]],
                SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
                use_tqdm=False,
            )
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    with LLM(str(tmp_path / models.FORMS["large"].q4), kv_cache_memory_bytes=1 << 20) as llm:
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)) == 1


def test_no_server_is_faster_than_the_machine(tmp_path):
    config = SHAPES["135m"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    numbers = 134_515_008  # of SmolLM2-135M, embedding and head one matrix
    files = ModelFiles("", tmp_path, "safetensors", config, {})
    work = ModelWork.of(EngineConfig(load_format="dummy"), files, kv_bytes_per_token=23_040)
    machine = MachineLimits(2, 10.0, {"bf16": 100.0})

    alone = run.Scenario("alone", 1, 1, 32, 128, ("tpot_ms", "tok_s"))
    assert best_rate(alone, work, machine) == pytest.approx(
        10e9 / (2 * numbers + 96 * 23_040), rel=0.01
    )
    prompt = run.Scenario("prompt", 1, 1, 1024, 2, ("prompt_tok_s",))
    in_layers = 2 * (numbers - 49_152 * 576) + 4 * 30 * 576 * 1025 / 2
    assert best_rate(prompt, work, machine) == pytest.approx(100e9 / in_layers, rel=0.01)
    many = run.Scenario("many", 32, 32, 256, 128, ("out_tok_s",))
    assert best_rate(many, work, machine) < 32 * best_rate(alone, work, machine)


def test_the_picture_has_a_bar_for_each_server_and_a_line_for_each_limit(tmp_path):
    document = {
        "scenarios": [{"name": "few", "figures": ["ttft_ms", "out_tok_s"]}],
        "servers": [
            {"name": "octavo bf16", "form": "bf16", "runs": {"few": [{"out_tok_s": 90.0}]}},
            {"name": "octavo 4-bit", "form": "4-bit", "runs": {"few": [{"out_tok_s": 200.0}]}},
            {"name": "peer", "form": "bf16", "runs": {}},
        ],
        "bounds": {"bf16": {"few": 100.0}, "8-bit": {"few": 150.0}},
    }
    path = tmp_path / "peers.svg"
    picture.draw(path, document)
    text = path.read_text()
    assert text.count(f"stroke: {picture.LIMIT}") == 1  # no server has 8 bits
    assert text.count(f"fill: {picture.OURS}") == 2


def test_servers_end_with_whoever_measures_them(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from benchmarks.servers import *;"
        "end_cleanly_on_sigterm(); Path(sys.argv[1]).touch(); port = free_port();"
        "command = [sys.executable, '-m', 'http.server', '--bind', '127.0.0.1', str(port)];"
        "server = Server.start(command, port=port, log=Path(sys.argv[1]), ready='/');"
        "server.pause();\n"
        "with server: print(server.process.pid, flush=True); time.sleep(60)"
    )
    measuring = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    assert measuring.stdout is not None
    with measuring:
        pid = int(measuring.stdout.readline())
        measuring.terminate()
        assert measuring.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()
