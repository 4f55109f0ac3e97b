"""The command line: help is instant, mistakes are one sentence, every flag has one home."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from octavo import cli
from octavo.commands import doctor
from octavo.options import flags
from octavo_engine.config import EngineConfig
from octavo_engine.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


COMMANDS = [["serve"], ["chat"], ["complete"], ["doctor"], ["bench"], ["bench", "throughput"],
            ["bench", "latency"], ["bench", "serve"]]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(capsys, command):
    code, out, _ = run(capsys, *command, "--help")

    assert code == 0
    assert out.startswith(f"usage: octavo {' '.join(command)} ")


def test_the_overview_names_every_command(capsys):
    for argv in ([], ["--help"]):
        code, out, _ = run(capsys, *argv)
        assert code == 0
        assert all(f"\n  {name} " in out for name in cli.COMMANDS)
        assert out.index("octavo run smollm2") < out.index("octavo serve") < out.index("--version")


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version")[1].startswith("octavo 0.")


def test_an_unknown_command_is_guessed_at(capsys):
    assert run(capsys, "srve") == (2, "", "octavo: there is no command srve; did you mean serve?\n")
    assert run(capsys, "frobnicate")[0] == 2


@pytest.mark.parametrize("command", ["serve", "chat", "run", "complete"])
def test_a_short_name_that_no_model_has_is_refused_with_what_is_near(capsys, command):
    code, _, err = run(capsys, command, "qwen3:0.7b")
    assert (code, err.count("\n")) == (2, 1)
    assert "qwen3:0.7b is not in the catalogue (did you mean qwen3:1.7b?)" in err


def test_help_imports_neither_engine_nor_server():
    code = (
        "import sys; from octavo import cli; cli.main([]);"
        "print([m for m in sys.modules if m.startswith(('octavo_engine', 'numpy', 'asyncio'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a.yaml"), "a.yaml: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_what_this_machine_refuses_is_one_sentence(capsys, monkeypatch, error, said):
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "main", fail)
    assert run(capsys, "doctor") == (2, "", f"octavo: {said}\n")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*_: object) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(doctor, "main", fail)
    with pytest.raises(ConnectionResetError):
        cli.main(["doctor"])


def test_folders_and_files_that_may_not_be_read_are_one_sentence(capsys, monkeypatch, tmp_path):
    """As another user's: root may read all, so it is only said."""

    def refuse(path: Path, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Path, "iterdir", refuse)
    expected = (2, "", f"octavo: {tmp_path}: Permission denied\n")
    assert run(capsys, "up", "-f", str(tmp_path)) == expected
    (tmp_path / "a.yaml").write_text("")
    monkeypatch.setattr(Path, "open", refuse)
    expected = (2, "", f"octavo: {tmp_path / 'a.yaml'}: Permission denied\n")
    assert run(capsys, "up", "-f", str(tmp_path / "a.yaml")) == expected


def test_stdin_that_is_no_text_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\xff")))
    assert run(capsys, "up", "-f", "-") == (2, "", "octavo: stdin is not UTF-8 text\n")


# ── other people's servers ──


@contextmanager
def other_server(status: int, content_type: str, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


PAGE = b"<!DOCTYPE html><html><body><h1>Not here</h1></body></html>"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "content_type", "body", "said"),
    [
        (404, "text/html; charset=utf-8", PAGE, "answered 404 with text/html, not with JSON"),
        (200, "text/html", PAGE, "answered 200 with text/html, not with JSON"),
        (502, "text/plain", b"Bad Gateway\n", "answered 502: Bad Gateway"),
        (503, "text/plain", b"\x1b[2Jx", "answered 503 with text/plain, not with JSON"),
        (500, "application/json", b"", "answered 500 with nothing, not with JSON"),
        (200, "text/event-stream", b"data: <p>\n\n", "is none of the OpenAI API: '<p>'"),
        (200, "text/event-stream", b"data: [1]\n\n", "is none of the OpenAI API: '[1]'"),
        (400, "application/json", b'{"error": {"message": "No."}}', "answered 400: No."),
    ],
)
def test_a_page_for_browsers_is_not_an_answer(capsys, status, content_type, body, said):
    with other_server(status, content_type, body) as url:
        code, out, err = run(capsys, "chat", "m", "--url", url, "-p", "hi")
    assert (code, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1 and "<html>" not in err


def test_a_server_without_a_list_of_models_is_one_sentence(capsys):
    with other_server(200, "text/html", PAGE) as url:
        code, _, err = run(capsys, "chat", "--url", url, "-p", "hi")
    assert (code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize("url", ["http://x:99999", "http://[::1", "ftp://x", "http://"])
def test_a_url_that_is_none_is_one_sentence(capsys, url):
    code, out, err = run(capsys, "chat", "m", "--url", url, "-p", "hi")
    assert (code, out) == (1, "")
    assert err == f"octavo: {url} is not the URL of a server; expected http://HOST:PORT\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "demo://none"], "demo://none is unknown; there is demo://smollm2, demo://minilm"),
        (["up", "demo://smollm2", "--port", "99999"], "--port must be between 0 and 65535"),
        (["complete", "/no/such/folder", "-p", "hi"], "/no/such/folder does not exist"),
    ],
)
def test_what_another_try_cannot_help_ends_before_anything_starts(
    capsys, monkeypatch, tmp_path, argv, message
):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    code, out, err = run(capsys, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


# ── the table of flags ──


def paths(kind, prefix: str = "") -> set[str]:
    result: set[str] = set()
    for field in dataclasses.fields(kind):
        inner = flags._hints(kind)[field.name]
        path = prefix + field.name
        result |= paths(inner, path + ".") if dataclasses.is_dataclass(inner) else {path}
    return result


def test_every_setting_has_a_flag_and_every_flag_a_setting():
    assert {flag.path for flag in flags.ENGINE_FLAGS} == paths(EngineConfig) - flags.DERIVED
    assert {flag.path for flag in flags.SERVER_FLAGS} == paths(ServerSettings)


def test_no_two_flags_share_a_name():
    names = [flag.flag for flag in (*flags.ENGINE_FLAGS, *flags.SERVER_FLAGS)]
    assert len(names) == len(set(names))


def config(capsys, *argv: str) -> dict[str, str]:
    """What --print-config says, by flag: value and source."""
    code, out, err = run(capsys, "serve", *argv, "--print-config")
    assert code == 0, err
    lines = [line for line in out.splitlines() if " = " in line]
    return dict(line.removeprefix("# ").split(" = ", 1) for line in lines)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


def test_flags_beat_environment_beats_file_beats_default(capsys, monkeypatch, tmp_path):
    file = tmp_path / "octavo.toml"
    file.write_text(
        'max-num-seqs = 1\nmax_queue = 2\nport = 3\nhost = "file"\nserved-model-name = ["a", "b"]\n'
        'kv-cache-memory-bytes = "2GiB"\nenable-prefix-caching = false\n'
    )
    monkeypatch.setenv("OCTAVO_MAX_QUEUE", "20")
    monkeypatch.setenv("OCTAVO_PORT", "30")
    monkeypatch.setenv("OCTAVO_VLLM_METRICS", "1")

    shown = config(capsys, "m", "--config", str(file), "--port", "300")

    assert shown["port"] == "300  # flag"
    assert shown["max-queue"] == "20  # OCTAVO_MAX_QUEUE"
    assert shown["max-num-seqs"] == "1  # config file"
    assert shown["max-num-batched-tokens"] == "2048  # default"
    assert shown["served-model-name"] == '["a", "b"]  # config file'
    assert shown["kv-cache-memory-bytes"] == f"{2 * 2**30}  # config file"
    assert shown["enable-prefix-caching"] == "false  # config file"
    assert shown["vllm-metrics"] == "true  # OCTAVO_VLLM_METRICS"
    assert shown["model"] == '"m"  # flag'


def test_the_file_may_be_named_by_the_environment(capsys, monkeypatch, tmp_path):
    file = tmp_path / "octavo.toml"
    file.write_text("seed = 7\n")
    monkeypatch.setenv("OCTAVO_CONFIG", str(file))

    assert config(capsys)["seed"] == "7  # config file"


def test_print_config_gives_back_what_it_was_given(capsys, tmp_path):
    first = config(
        capsys, "m", "--max-num-seqs", "9", "--no-enable-prefix-caching", "--max-body-bytes", "1MiB"
    )
    file = tmp_path / "again.toml"
    run_out = run(capsys, "serve", "m", "--max-num-seqs", "9", "--no-enable-prefix-caching",
                  "--max-body-bytes", "1MiB", "--print-config")[1]  # fmt: skip
    file.write_text(run_out)

    again = config(capsys, "--config", str(file))

    def values(shown):
        return {name: text.partition("  #")[0] for name, text in shown.items()}

    assert values(again) == values(first)


@pytest.mark.parametrize(
    ("text", "tokens"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 2**20), ("512", 512)]
)
def test_numbers_of_tokens_take_units_as_vllm_s_do(capsys, text, tokens):
    assert config(capsys, "m", "--max-model-len", text)["max-model-len"] == f"{tokens}  # flag"


def test_sizes_take_units(capsys):
    shown = config(capsys, "m", "--kv-cache-memory-bytes", "1TiB")
    assert shown["kv-cache-memory-bytes"] == f"{2**40}  # flag"


def test_keys_are_never_shown(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret1,secret2")
    out = run(capsys, "serve", "--print-config")[1]

    assert "secret" not in out
    assert "api-key = (2 set, not shown)  # OCTAVO_API_KEY" in out


@pytest.mark.parametrize(
    ("argv", "env", "file", "message"),
    [
        (["--max-num-seqs", "x"], {}, "", "--max-num-seqs: must be a whole number; got 'x'"),
        (["--max-num-seqs", "1.5"], {}, "", "must be a whole number; got '1.5'"),
        (["--device", "tpu"], {}, "", "invalid choice: 'tpu'"),
        (["--no-such-flag"], {}, "", "unrecognized arguments: --no-such-flag"),
        (["--max-num-seq", "1"], {}, "", "unrecognized arguments: --max-num-seq"),
        (["--prot"], {}, "", "unrecognized arguments: --prot; did you mean --port?"),
        (["--prot", "1", "demo://smollm2"], {}, "", "unrecognized arguments: --prot; did you mean"),
        (["--kv-cache-memory-bytes", "2furlongs"], {}, "", "such as 512MiB"),
        (["--max-model-len", "8q"], {}, "", "must be a whole number, such as 8k; got '8q'"),
        (["--max-num-seqs", "8k"], {}, "", "must be a whole number; got '8k'"),
        (["a", "--model", "b"], {}, "", "octavo: two models are given: a and --model b"),
        (["--max-num-seqs", "0"], {}, "", "octavo: --max-num-seqs must be at least 1; got 0"),
        (["--port", "70000"], {}, "", "octavo: --port must be between 0 and 65535; got 70000"),
        ([], {"OCTAVO_PORT": "x"}, "", "octavo: OCTAVO_PORT must be a whole number; got 'x'"),
        ([], {"OCTAVO_DEVICE": "tpu"}, "", "octavo: OCTAVO_DEVICE must be one of auto, cpu, cuda"),
        ([], {"OCTAVO_VLLM_METRICS": "maybe"}, "", "octavo: OCTAVO_VLLM_METRICS must be 1 or 0"),
        ([], {}, "prot = 1", "octavo: the config file has an unknown key prot; did you mean port?"),
        ([], {}, "port = [1]", "octavo: config file: port must be a single value"),
        ([], {}, 'vllm-metrics = "yes"', "octavo: config file: vllm-metrics must be true or false"),
        ([], {}, "port = ", "is not valid TOML"),
        (["--config", "/no/such/file"], {}, "", "octavo: --config /no/such/file: No such file"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_sentence_and_exit_code_2(
    capsys, monkeypatch, tmp_path, argv, env, file, message
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if file:
        (tmp_path / "f.toml").write_text(file)
        argv = [*argv, "--config", str(tmp_path / "f.toml")]

    code, out, err = run(capsys, "serve", *argv, "--print-config")

    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


# ── doctor ──


def test_the_doctor_speaks_to_people_and_machines(capsys, monkeypatch):
    # Torch takes seconds to import; whether it is there is told without.
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = run(capsys, "doctor", "--json")
    machine = json.loads(out)
    monkeypatch.setattr(
        doctor, "examine", lambda: [doctor.MachineFinding(**finding) for finding in machine]
    )
    out = run(capsys, "doctor")[1]

    names = [finding["name"] for finding in machine]
    assert {"octavo", "python", "extension", "memory", "demo model", "torch"} <= set(names)
    assert all(any(line[2:].startswith(name) for line in out.splitlines()) for name in names)
    assert code == int(any(finding["state"] == "missing" for finding in machine))


def test_what_is_missing_comes_with_advice(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))

    missing = [*doctor._packages(), doctor._accelerator()]
    assert [finding.state for finding in missing] == ["optional", "optional"]
    assert all(finding.advice for finding in missing)


def test_a_missing_extension_is_said_not_raised(monkeypatch):
    import octavo_engine

    monkeypatch.setitem(sys.modules, "octavo_engine._native", None)
    monkeypatch.delattr(octavo_engine, "_native", raising=False)

    (finding,) = doctor._extension()
    assert finding.state == "missing"
    assert "pip install" in finding.advice


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [1,\n b: }{", "line 2: is not valid YAML: expected the node content"),
        (b"- 1", "must be a mapping; got a list"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_a_router_names_the_file_that_it_cannot_read(tmp_path, capsys, content, says):
    file = tmp_path / "router.yaml"
    file.write_bytes(content)
    assert cli.main(("router", "--config", str(file))) == cli.EXIT_SETTINGS
    assert capsys.readouterr().err.startswith(f"octavo: --config: {file}: {says}")
