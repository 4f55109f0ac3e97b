"""Engine pods die and nodes are drained; streams go on elsewhere, from the very next token."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import openai

from e2e.cluster.layout import NODE_NAME
from e2e.models import Model, real, simulated
from e2e.traffic import Traffic, stream_text

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl


def test_killed_engines_break_no_stream(platform: Platform, space: Kubectl) -> None:
    model = Model(space, simulated("mortal", replicas=3))
    model.await_settled(3)
    with Traffic(platform.base_url, model.name, clients=6, tokens=64) as traffic:
        traffic.await_answers(6)
        for pod in model.pods()[:2]:
            platform.kill(space.namespace, pod["metadata"]["name"])
            traffic.await_answers(6)
        model.await_settled(3)
        traffic.await_answers(6)
    traffic.assert_unbroken()
    restarts = [pod["status"]["containerStatuses"][0]["restartCount"] for pod in model.pods()]
    assert sorted(restarts) == [0, 1, 1]


def test_the_real_model_s_story_continues_word_for_word(platform: Platform, space: Kubectl) -> None:
    model = Model(space, real("smollm2", replicas=2))
    model.await_settled(2)
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        whole = stream_text(client, model.name)
        started, text = threading.Event(), list[str]()
        streaming = threading.Thread(target=stream_text, args=(client, model.name, started, text))
        streaming.start()
        assert started.wait(60), "no token came"
        (busy,) = [pod for pod in model.pods() if is_busy(pod)]
        platform.kill(space.namespace, busy["metadata"]["name"])
        streaming.join(90)
    assert not streaming.is_alive()
    assert "".join(text) == whole


def is_busy(pod: dict[str, Any]) -> bool:
    url = f"http://{pod['status']['podIP']}:8000/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    running = [line for line in lines if line.partition("{")[0].endswith("num_requests_running")]
    assert running, "the engine does not say how many requests it runs"
    return any(float(line.rpartition(" ")[2]) > 0 for line in running)


def test_a_drained_node_keeps_as_many_engines_as_the_budget_says(
    platform: Platform, space: Kubectl
) -> None:
    """There is no other node: nothing replaces the first pod, so that the second has to stay."""
    model = Model(space, simulated("drained", replicas=2))
    model.await_settled(2)
    words = ("--pod-selector=octavo.dev/deployment=drained", "--delete-emptydir-data")
    try:
        with Traffic(platform.base_url, model.name) as traffic:
            traffic.await_answers(10)
            done = space.attempt("drain", NODE_NAME, *words, "--timeout=15s")
            assert done.returncode != 0
            assert "disruption budget" in done.stderr
            assert len(running(model)) == 1
            traffic.await_answers(10)
            space("uncordon", NODE_NAME)
            model.await_settled(2)
            traffic.await_answers(10)
        traffic.assert_unbroken()
    finally:
        space("uncordon", NODE_NAME)


def running(model: Model) -> list[str]:
    pods = [pod for pod in model.pods() if pod["status"]["phase"] == "Running"]
    return [json.dumps(pod["metadata"]["name"]) for pod in pods]
