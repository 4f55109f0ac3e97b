"""Routes behind --dev-mode: sleep, caches, settings; and that they are not there without it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octavo_engine.server.admin.dev import public_environment
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running

DEV = (
    ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"), ("POST", "/reset_mm_cache"), ("POST", "/reset_encoder_cache"),
    ("GET", "/server_info"), ("POST", "/collective_rpc"), ("POST", "/start_profile"),
    ("POST", "/stop_profile"), ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"),
    ("GET", "/get_world_size"), ("POST", "/update_weights"),
)  # fmt: skip


@pytest.fixture
def server():
    with running(FakeEngine(), ServerSettings(dev_mode=True, api_keys=("secret",))) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client(headers={"authorization": "Bearer secret"}) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), DEV)
def test_without_the_switch_they_are_not_there(method, path):
    with running() as server, server.client() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")


def test_a_sleeping_server_refuses_work_until_woken(server, client):
    work = {"prompt": "a", "max_tokens": 1}
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}

    assert client.post("/sleep?level=1").status_code == 200
    refused = client.post("/v1/completions", json=work)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert refused.headers["retry-after"] == "5"
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert client.get("/health").status_code == 200

    assert client.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert client.post("/v1/completions", json=work).status_code == 200
    assert server.engine.sleeps == [True, False]
    assert client.post("/sleep?level=2").status_code == 200
    assert server.engine.sleep_levels == [1, 1, 2]
    client.post("/wake_up").raise_for_status()


@pytest.mark.parametrize(
    ("query", "param"), [("level=3", "level"), ("level=x", "level"), ("mode=odd", "mode")]
)
def test_odd_ways_to_sleep_are_refused(client, query, param):
    answer = client.post(f"/sleep?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}


def test_the_prefix_cache_is_reset_while_nothing_runs(server, client):
    assert client.post("/reset_prefix_cache").status_code == 200
    assert server.engine.num_resets == 1
    server.engine.stats.num_running = 1
    assert client.post("/reset_prefix_cache").status_code == 400
    assert server.engine.num_resets == 1


@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache"])
def test_caches_that_are_not_there_are_empty(client, path):
    assert client.post(path).status_code == 200


def test_settings_are_told_without_secrets(client, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "hidden")
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    reported = client.get("/server_info?config_format=json").json()
    text = client.get("/server_info").json()

    assert reported["config"]["scheduler"]["max_num_batched_tokens"] > 0
    assert reported["server_config"]["api_keys"] == "(set, not shown)"
    assert reported["model"]["max_model_len"] == 256
    assert reported["env"] == {"OCTAVO_MAX_NUM_SEQS": "7"}
    assert 'model="fake"' in text["config"]
    assert "secret" not in str(reported) + str(text)
    assert client.get("/server_info?config_format=xml").status_code == 400


def test_secrets_of_the_environment_stay_in_it():
    environ = {
        "OCTAVO_HUB_TOKEN": "t", "OCTAVO_MAX_TOKENS": "5", "OCTAVO_API_KEY": "k", "HOME": "/",
    }  # fmt: skip
    assert public_environment(environ) == {"OCTAVO_MAX_TOKENS": "5"}


def test_workers_cannot_be_called(client):
    answer = client.post("/collective_rpc", json={"method": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")


def test_falling_asleep_ends_what_runs_with_what_it_has():
    engine = FakeEngine(hold_after=2)
    with running(engine, ServerSettings(dev_mode=True)) as server, server.client() as client:
        answers: list[dict[str, Any]] = []

        def work() -> None:
            body = {"prompt": "a", "max_tokens": 9}
            with server.client() as other:
                answers.append(other.post("/v1/completions", json=body).json())

        thread = threading.Thread(target=work)
        thread.start()
        server.wait_for(engine.holding)
        assert client.post("/sleep?mode=abort").status_code == 200
        thread.join(60)
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    assert engine.sleeps == [True]


def test_ranks_hold_the_weights_together(server, client):
    server.engine.config = server.engine.config.replace(tensor_parallel_size=2, device="cpu")
    assert client.get("/get_world_size").json() == {"world_size": 2}


def test_one_process_holds_the_weights_and_nobody_replaces_them(client):
    assert client.get("/get_world_size").json() == {"world_size": 1}
    for path in ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
                 "/finish_weight_update", "/release_kv_cache_memory"):  # fmt: skip
        answer = client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_implemented")
