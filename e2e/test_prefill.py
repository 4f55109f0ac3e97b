"""Prompts are computed by pods of their own; without these the pods that answer compute them."""

from __future__ import annotations

import base64
import itertools
from typing import TYPE_CHECKING, Any

import openai

from e2e.models import Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

NUMBERS = itertools.count(1)
LONG = "one two three four " * 80  # more than routing.prefill_min_tokens


def split(space: Kubectl, **spec: Any) -> Model:
    secret = base64.b64encode(b"of both sides, and of nobody else").decode()
    space.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "kv"},
            "data": {"secret": secret},
        }
    )
    return Model(space, simulated("split", prefill={"secretRef": {"name": "kv"}}, **spec))


def side(model: Model, component: str) -> list[dict[str, Any]]:
    label = "app.kubernetes.io/component"
    return [pod for pod in model.pods() if pod["metadata"]["labels"][label] == component]


def ask(platform: Platform, model: Model) -> int:
    """A long prompt that nobody has sent before; how many of its tokens were not computed where it
    was answered."""
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model.name,
            messages=[{"role": "user", "content": f"{next(NUMBERS)} {LONG}"}],
            max_tokens=4,
        )
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 4
    details = usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def test_a_long_prompt_comes_from_the_prefill_pod(platform: Platform, space: Kubectl) -> None:
    model = split(space)
    model.await_settled()
    assert model.status()["prefill"]["routableReplicas"] == 1
    assert ask(platform, model) > 256
    (pod,) = side(model, "prefill")
    platform.kill(space.namespace, pod["metadata"]["name"])
    ask(platform, model)  # is answered whether or not somebody else can compute it
    model.until(lambda: ask(platform, model) > 256, "prefill pod again", 90)


def test_both_sides_roll_over_without_a_failed_request(platform: Platform, space: Kubectl) -> None:
    model = split(space, replicas=2)
    model.await_settled(2)
    (old,) = model.revisions()
    with Traffic(platform.base_url, model.name) as traffic:
        model.patch(engine={"maxNumSeqs": 32})
        model.await_settled(2)
        traffic.await_answers(10)
    traffic.assert_unbroken()
    (new,) = model.revisions()
    assert new != old
    assert (len(side(model, "engine")), len(side(model, "prefill"))) == (2, 1)
    assert ask(platform, model) > 256
    model.patch(prefill=None)
    model.await_settled(2)
    model.until(lambda: not side(model, "prefill"), "leaving prefill pods", 60)
