"""Records of running servers: they come and go with their processes, however these end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import pytest

from octavo import cli
from octavo.local.home import Home
from octavo.models.servers import LOADING, SERVING, ServerRecord, resident_bytes, running_servers


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


def test_a_record_lives_as_long_as_the_server(home):
    record = ServerRecord(home, "http://127.0.0.1:8000", ["smollm2"])
    with record:
        (server,) = running_servers(home)
        assert (server.pid, server.state, server.models) == (os.getpid(), LOADING, ("smollm2",))
        record.ready(("smollm2", "default"))
        (server,) = running_servers(home)
        assert (server.state, server.models) == (SERVING, ("smollm2", "default"))
        assert resident_bytes(server.pid) > 10**6
    assert running_servers(home) == []


def test_a_killed_process_and_a_later_one_with_its_number_are_no_servers(home):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with ServerRecord(home, "http://127.0.0.1:8000", ["smollm2"]):
        (path,) = (home.path / "servers").iterdir()
        fields = json.loads(path.read_text())
        for number, change in enumerate(({"pid": gone.pid}, {"began": "1"}, {"began": ""})):
            (path.parent / f"other{number}.json").write_text(json.dumps(fields | change))
        (path.parent / "broken.json").write_text("{")
        assert [server.pid for server in running_servers(home)] == [os.getpid()]
        assert list(path.parent.iterdir()) == [path]


def test_a_home_that_cannot_be_written_keeps_no_records(tmp_path):
    (tmp_path / "file").write_text("")
    home = Home(tmp_path / "file" / "home")
    with ServerRecord(home, "http://127.0.0.1:8000", ["smollm2"]) as record:
        record.ready(("smollm2",))


def test_without_servers_it_is_said_how_to_start_one(home, monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_HOME", str(home.path))
    assert cli.main(("ps",)) == 0
    assert "octavo serve smollm2" in capsys.readouterr().out


@pytest.mark.slow
def test_ps_shows_a_server(home, monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_HOME", str(home.path))
    server = subprocess.Popen(
        [sys.executable, "-m", "octavo.cli", "serve", "--device", "sim", "--port", "0",
         "--served-model-name", "modelled"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stderr is not None
    try:
        assert any("Ready" in line for line in server.stderr)
        assert cli.main(("ps", "--json")) == 0
        ((shown,), up) = json.loads(capsys.readouterr().out).values()
        assert up is None
        assert (shown["pid"], shown["models"], shown["state"]) == (
            server.pid, ["modelled"], SERVING
        )  # fmt: skip
        with urllib.request.urlopen(f"{shown['url']}/ready") as answer:
            assert answer.status == 200
        load = shown["load"]
        assert load["models"] == ["modelled"]
        assert (load["running"], load["waiting"], load["kv_usage"]) == (0, 0, 0.0)
        assert cli.main(("ps",)) == 0
        out = capsys.readouterr().out
        assert "modelled" in out
        assert " 0 running, KV 0% " in out
    finally:
        server.terminate()
        server.stderr.close()
        server.wait()
    assert running_servers(home) == []
