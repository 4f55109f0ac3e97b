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
    prefill = {"secretRef": {"name": "kv"}, **spec.pop("prefill", {})}
    return Model(space, simulated("split", prefill=prefill, **spec))


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


def test_pods_change_sides_without_a_restart_or_a_failed_request(
    platform: Platform, space: Kubectl
) -> None:
    flip = {"targets": {"ttft": "10s", "tpot": "10s"}, "minPrefill": 1, "minDecode": 1}
    model = split(space, replicas=2, prefill={"replicas": 1, "flip": flip})
    model.await_settled(2)
    pods = running_pods(model)
    with Traffic(platform.base_url, model.name) as traffic:
        # A limit is enforced at once, whatever the load is: all of them are to answer.
        model.patch(prefill={"flip": {"minPrefill": 0, "minDecode": 3}})
        model.until(lambda: num_on_side(model, "decode") == 3, "pods that all answer", 60)
        traffic.await_answers(10)
        model.patch(prefill={"flip": {"minPrefill": 2, "minDecode": 1}})
        model.until(lambda: num_on_side(model, "prefill") == 2, "two pods that compute", 60)
        traffic.await_answers(10)
    traffic.assert_unbroken()
    assert running_pods(model) == pods, "a pod was replaced or restarted"
    counts = model.status()["prefill"]["flip"]
    assert (counts["answering"], counts["computing"]) == (1, 2)
    model.until(lambda: ask(platform, model) > 256, "prompt from the other side", 60)


def num_on_side(model: Model, side: str) -> int:
    return sum(pod["metadata"]["labels"].get("octavo.dev/side") == side for pod in model.pods())


def running_pods(model: Model) -> dict[str, int]:
    """The restarts of each, by UID."""
    return {
        pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"]
        for pod in model.pods()
    }
