"""Scaling, down to zero: the first request wakes the model, and is held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import openai

from e2e.models import Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

AWAKE_WITHIN_S = 60.0


def test_kubectl_scale_goes_up_and_down_without_a_failed_request(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("scaled"))
    model.await_settled()
    with Traffic(platform.base_url, model.name) as traffic:
        for replicas in (3, 1):
            space("scale", "llmdeployment", model.name, f"--replicas={replicas}")
            model.await_settled(replicas)
            traffic.await_answers(10)
    traffic.assert_unbroken()
    assert len(model.pods()) == 1


def test_an_idle_model_has_no_pods_and_the_first_request_wakes_it(
    platform: Platform, space: Kubectl
) -> None:
    scaling = {"maxReplicas": 1, "scaleToZero": {"after": "10s"}}
    model = Model(space, simulated("sleeper", autoscaling=scaling))
    model.await_settled()
    model.until(lambda: not model.pods(), "rest", 60)
    model.until(lambda: model.condition("Ready")["reason"] == "ScaledToZero", "reason for it", 15)
    began_at = time.monotonic()
    with openai.OpenAI(
        base_url=platform.base_url, api_key="none", max_retries=0, timeout=AWAKE_WITHIN_S
    ) as client:
        answer = client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "Wake up."}], max_tokens=4
        )
    print(f"Awake and answered after {time.monotonic() - began_at:.1f} s")
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert len(model.pods()) == 1
