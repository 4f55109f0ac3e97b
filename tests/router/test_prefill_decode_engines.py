"""Prefill and decode apart as users run it: two engines and a router as processes."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.fakes.process import serving
from tests.fakes.router_process import routing

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.process import ServeProcess
    from tests.fakes.router_process import RouterProcess

pytestmark = pytest.mark.slow

FLAGS = ("m", "--served-model-name", "sim", "--sim-kv-blocks", "4096")
CHAT = "/v1/chat/completions"


def transfer(role: str) -> tuple[str, str]:
    config = {"kv_connector": "OctavoConnector", "kv_role": role, "kv_port": 0}
    return "--kv-transfer-config", json.dumps(config)


def body(number: int, **more: Any) -> dict[str, Any]:
    content = f"{number} " + "one two three four " * 60
    messages = [{"role": "user", "content": content}]
    return {"model": "sim", "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def content_of(answer: httpx.Response) -> str:
    if answer.headers["content-type"].startswith("application/json"):
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


def peer_blocks(engine: ServeProcess) -> int:
    text = httpx.get(engine.url + "/metrics").text
    match = re.search(r'octavo_kv_tier_hit_blocks_total\{[^}]*tier="peer"[^}]*\} ([\d.]+)', text)
    assert match
    return int(float(match[1]))


def prompts(router: RouterProcess) -> dict[str, int]:
    text = router.client.get("/metrics").text
    found = re.findall(r'handed_over_prompts_total\{.*outcome="(\w+)".*\} ([\d.]+)', text)
    return {outcome: int(float(count)) for outcome, count in found if float(count)}


def test_prompts_are_computed_by_one_engine_and_answered_by_another(tmp_path: Path):
    file = tmp_path / "router.yaml"
    with (
        serving(*FLAGS, *transfer("kv_producer")) as prefill,
        serving(*FLAGS, *transfer("kv_consumer")) as decode,
        serving(*FLAGS) as alone,
    ):
        file.write_text(
            "routing: {policy: prefill-decode}\n"
            "discovery:\n  upstreams:\n"
            f'    - {{url: "{prefill.url}", role: prefill}}\n'
            f'    - {{url: "{decode.url}", role: decode}}\n'
        )
        with routing("--config", str(file)) as router:
            router.until(lambda: set(router.states().values()) == {"ready"})
            for number, stream in enumerate((False, True, False, True)):
                asked = body(number, stream=stream)
                answer = router.client.post(CHAT, json=asked)
                assert answer.status_code == 200
                assert content_of(answer) == content_of(
                    httpx.post(alone.url + CHAT, json=asked, timeout=30)
                )
            assert prompts(router) == {"ok": 4}
            blocks = peer_blocks(decode)
            assert blocks >= 4 * (60 * 19 // 16)
            prefill.signal(signal.SIGKILL)
            prefill.wait()
            for number, stream in enumerate((False, True), start=4):
                asked = body(number, stream=stream)
                answer = router.client.post(CHAT, json=asked)
                assert answer.status_code == 200
                assert content_of(answer) == content_of(
                    httpx.post(alone.url + CHAT, json=asked, timeout=30)
                )
            assert peer_blocks(decode) == blocks
