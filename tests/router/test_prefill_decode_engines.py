"""Prefill and decode apart as users run it: two engines and a router as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from octavo_engine.protocol.endpoints import KV_PORT, STATE_PATH
from octavo_engine.protocol.state import State
from octavo_operator.decide.autoscale import LoadSignals
from octavo_operator.desired import kv_transfer
from octavo_operator.routers.poller import RouterDemand
from tests.fakes.deployments import make_deployment
from tests.fakes.kv_transfer_flags import transfer
from tests.fakes.process import serving
from tests.fakes.router_process import routing

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment
    from tests.fakes.process import ServeProcess
    from tests.fakes.router_process import RouterProcess

pytestmark = pytest.mark.slow

FLAGS = ("m", "--served-model-name", "sim", "--sim-kv-blocks", "4096")
CHAT = "/v1/chat/completions"


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
    return counter(engine, "octavo_kv_tier_hit_blocks_total", 'tier="peer"')


def counter(engine: ServeProcess, name: str, label: str) -> int:
    text = httpx.get(engine.url + "/metrics").text
    match = re.search(rf"{name}\{{[^}}]*{label}[^}}]*\}} ([\d.]+)", text)
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
                requested = body(number, stream=stream)
                answer = router.client.post(CHAT, json=requested)
                assert answer.status_code == 200
                assert content_of(answer) == content_of(
                    httpx.post(alone.url + CHAT, json=requested, timeout=30)
                )
            assert prompts(router) == {"ok": 4}
            blocks = peer_blocks(decode)
            assert blocks >= 4 * (60 * 19 // 16)
            prefill.signal(signal.SIGKILL)
            prefill.wait()
            for number, stream in enumerate((False, True), start=4):
                requested = body(number, stream=stream)
                answer = router.client.post(CHAT, json=requested)
                assert answer.status_code == 200
                assert content_of(answer) == content_of(
                    httpx.post(alone.url + CHAT, json=requested, timeout=30)
                )
            assert peer_blocks(decode) == blocks


def test_prompts_that_wait_for_the_prefill_engine_are_the_operators_signal(tmp_path: Path):
    """And after them there is none, whatever the engine that answers still generates."""
    file = tmp_path / "router.yaml"
    with (
        serving(*FLAGS, *transfer("kv_producer"), "--sim-prefill-token-ms", "2") as prefill,
        serving(*FLAGS, *transfer("kv_consumer")) as decode,
    ):
        file.write_text(
            "routing: {policy: prefill-decode}\n"
            "discovery:\n  upstreams:\n"
            f'    - {{url: "{prefill.url}", role: prefill}}\n'
            f'    - {{url: "{decode.url}", role: decode}}\n'
        )
        with routing("--config", str(file)) as router, ThreadPoolExecutor(4) as clients:
            router.until(lambda: set(router.states().values()) == {"ready"})
            answers = [
                clients.submit(router.client.post, CHAT, json=body(number)) for number in range(4)
            ]
            router.until(lambda: prefill_load(router, prefill).in_flight == 4)
            router.until(lambda: (prefill_load(router, prefill).queued_tokens or 0) > 1000)
            assert [answer.result().status_code for answer in answers] == [200] * 4
            found = prompts(router)
            assert sum(found.values()) == 4 and found.keys() <= {"ok", "answered_first"}
            router.until(lambda: prefill_load(router, prefill) == idle())


def prefill_load(router: RouterProcess, prefill: ServeProcess) -> LoadSignals:
    """As the operator reads it from this router."""
    state = msgspec.json.decode(router.client.get(STATE_PATH).content, type=State)
    demand = RouterDemand(time.monotonic)
    demand.expect(["router"])
    demand.learn("router", state)
    (engine,) = (one for one in state.endpoints if one.url == prefill.url)
    return demand.prefill_signals(engine.pool, serving=1, pods={engine.id})


def idle() -> LoadSignals:
    return LoadSignals(serving=1, queued_tokens=0, in_flight=0, is_known=True, is_complete=True)


def test_pods_of_an_llmdeployment_are_a_pair_within_one_revision(tmp_path: Path):
    """The flags that the operator gives them, over an address that is not loopback's own."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    deployment = make_deployment({"prefill": {"secretRef": {"name": "kv"}}})

    def flags(side: LLMDeployment) -> tuple[str, ...]:
        (flag,) = kv_transfer.arguments(side)
        for of_pod, here in (
            ("$(OCTAVO_POD_IP)", "127.0.0.2"),
            ("/run/octavo/kv/secret", str(secret)),
            (f'"kv_port": {KV_PORT}', '"kv_port": 0'),
        ):
            flag = flag.replace(of_pod, here)
        return (*FLAGS, flag)

    with (
        serving(*flags(deployment.prefill_side())) as prefill,
        serving(*flags(deployment)) as decode,
    ):
        blocks = []
        for number, (revision, outcomes) in enumerate((("r1", {"ok": 1}), ("r2", {}))):
            file = tmp_path / f"{revision}.yaml"
            file.write_text(
                "routing: {policy: prefill-decode}\n"
                "discovery:\n  upstreams:\n"
                f'    - {{url: "{prefill.url}", role: prefill, revision: r1}}\n'
                f'    - {{url: "{decode.url}", revision: {revision}}}\n'
            )
            with routing("--config", str(file)) as router:
                router.until(partial(all_are_ready, router))
                answer = router.client.post(CHAT, json=body(number))
                assert answer.status_code == 200
                assert content_of(answer)
                assert prompts(router) == outcomes
            blocks.append(peer_blocks(decode))
        assert blocks[0] == blocks[1] > 60


@pytest.mark.parametrize("accident", [signal.SIGSTOP, signal.SIGKILL])
def test_an_engine_lost_before_its_blocks_are_fetched_costs_a_computation(
    accident: signal.Signals,
):
    keep = {"do_remote_decode": True}
    with (
        serving(*FLAGS, *transfer("kv_both")) as first,
        serving(*FLAGS, *transfer("kv_both")) as second,
    ):
        with first.client() as client:
            where = client.post(CHAT, json=body(1, max_tokens=1, kv_transfer_params=keep)).json()[
                "kv_transfer_params"
            ]
            wanted = content_of(client.post(CHAT, json=body(1)))
        # The core is a process of its own, which ends with the server.
        for pid in (first.process.pid, *children_of(first.process.pid)):
            os.kill(pid, accident)
        try:
            with second.client() as client:
                began_at = time.monotonic()
                answer = client.post(CHAT, json=body(1, kv_transfer_params=where))
            assert content_of(answer) == wanted
            assert time.monotonic() - began_at < 10
            assert peer_blocks(second) == 0
            failed = "octavo_kv_tier_failures_total", 'reason="peer_failed"'
            while counter(second, *failed) != 1:  # the statistics follow a step
                assert time.monotonic() - began_at < 10
                with second.client() as client:
                    client.post(CHAT, json=body(2, max_tokens=1))
        finally:
            if accident is signal.SIGSTOP:
                for pid in (first.process.pid, *children_of(first.process.pid)):
                    os.kill(pid, signal.SIGCONT)


def all_are_ready(router: RouterProcess) -> bool:
    return set(router.states().values()) == {"ready"}


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]
