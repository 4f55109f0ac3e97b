"""`kv_transfer_params` over HTTP: a prompt computed by one engine is fetched by another."""

import json

import httpx
import pytest

from octavo_engine.config import SimConfig
from tests.fakes.simulated import CONFIG, simulating

KEEP = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
PROMPT = "one two three four " * 16
CHAT = {"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
TEXT = {"model": "sim", "prompt": PROMPT, "temperature": 0}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


def config(role, **extra):
    transfer = {"kv_connector": "OctavoConnector", "kv_role": role, "kv_port": 0, **extra}
    # Computing takes longer here than any connection does.
    slow = SimConfig(kv_blocks=256, prefill_token_ms=2.0)
    return CONFIG.replace(kv_transfer_config=json.dumps(transfer), sim=slow)


def ask(server, path, body, **more):
    answer = httpx.post(server.url + path, json={**body, **more}, timeout=30)
    return answer.status_code, answer.json()


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), PATHS)
def test_the_answer_says_where_the_cache_lies_and_another_engine_fetches_it(path, body):
    with (
        simulating(config("kv_producer", engine_id="first")) as first,
        simulating(config("kv_consumer")) as second,
    ):
        status, answer = ask(first, path, body, max_tokens=1, kv_transfer_params=KEEP)
        where = answer["kv_transfer_params"]
        assert status == 200
        assert where == {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "first",
            "remote_request_id": answer["id"], "remote_block_ids": None,
            "remote_host": "127.0.0.1", "remote_port": where["remote_port"],
        }  # fmt: skip
        _, alone = ask(first, path, body, max_tokens=8)
        assert alone["kv_transfer_params"] is None
        status, answer = ask(second, path, body, max_tokens=8, kv_transfer_params=where)
        assert status == 200
        assert answer["choices"] == alone["choices"]
        assert answer["kv_transfer_params"] is None
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 304
        text = httpx.get(second.url + "/metrics").text
        assert 'octavo_kv_tier_hit_blocks_total{model_name="sim",tier="peer"} ' in text.replace(
            'engine="0",', ""
        )
        for server in (first, second):
            server.check_idle()


def refusal(server, **fields):
    status, answer = ask(server, "/v1/completions", TEXT, max_tokens=2, kv_transfer_params=fields)
    assert status == 400
    assert answer["error"]["param"] == "kv_transfer_params"
    return answer["error"]["message"]


@pytest.mark.slow
def test_fields_that_make_no_sense_are_refused():
    fetch = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}
    with simulating(config("kv_consumer")) as server:
        assert "needs an engine" in refusal(server, do_remote_decode=True)
        assert "remote_port must be" in refusal(server, **{**fetch, "remote_port": 0})
        assert "remote_port must be" in refusal(server, **{**fetch, "remote_port": True})
        assert "remote_host must be" in refusal(server, **{**fetch, "remote_host": None})
        assert "remote_host must be" in refusal(server, **{**fetch, "remote_host": "a\n"})
        assert "must be true or false" in refusal(server, do_remote_prefill="yes")
        status, answer = ask(server, "/v1/completions", TEXT, kv_transfer_params=[1])
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
        # What changes nothing passes.
        assert ask(server, "/v1/completions", TEXT, kv_transfer_params={})[0] == 200
        # Nobody is there: the prompt is computed.
        assert ask(server, "/v1/completions", TEXT, kv_transfer_params=fetch)[0] == 200
    with simulating(config("kv_producer")) as server:
        assert "kv_role kv_consumer" in refusal(server, **fetch)


def test_without_a_connector_the_field_is_not_supported():
    with simulating() as server:
        status, answer = ask(server, "/v1/completions", TEXT, kv_transfer_params=KEEP)
    assert (status, answer["error"]["code"]) == (400, "not_supported")
