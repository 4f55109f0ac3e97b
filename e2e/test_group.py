"""A replica of several pods: the model is divided between them, and one of them serves."""

from __future__ import annotations

import base64
import json
import threading
from typing import TYPE_CHECKING, Any

import openai

from e2e.models import Model, real
from e2e.test_adapters import adapter_files, adapter_of, with_files
from e2e.traffic import stream_text

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl


def divided(space: Kubectl, name: str = "divided", **spec: Any) -> Model:
    secret = base64.b64encode(b"of one group, and of nobody else").decode()
    space.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "between"},
            "data": {"secret": secret},
        }
    )
    group = {"size": 2, "secretRef": {"name": "between"}}
    engine = {"device": "cpu", "kvCacheMemory": "64Mi"}
    return Model(space, real(name, engine=engine, group=group, **spec))


def part(model: Model, component: str) -> list[dict[str, Any]]:
    label = "app.kubernetes.io/component"
    return [pod for pod in model.pods() if pod["metadata"]["labels"][label] == component]


def test_a_worker_is_lost_under_a_stream_and_no_token(platform: Platform, space: Kubectl) -> None:
    model = divided(space, replicas=2)
    model.await_settled(2)
    assert (len(part(model, "engine")), len(part(model, "worker"))) == (2, 2)
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        whole = stream_text(client, model.name)
        started, text = threading.Event(), list[str]()
        streaming = threading.Thread(target=stream_text, args=(client, model.name, started, text))
        streaming.start()
        assert started.wait(60), "no token came"
        # Of both groups: one of them computes the stream.
        for pod in part(model, "worker")[:1]:
            platform.kill(space.namespace, pod["metadata"]["name"])
        streaming.join(120)
    assert not streaming.is_alive()
    assert "".join(text) == whole
    model.await_settled(2)

    model.patch(replicas=1)
    model.await_settled(1)
    model.until(lambda: len(part(model, "worker")) == 1, "worker of one group alone", 60)


def test_the_pods_of_each_group_are_kept_from_others(space: Kubectl) -> None:
    """That groups form shows that their own policies let them; that they are all that does is by
    their labels."""
    model = divided(space, "apart", replicas=2)
    model.await_settled(2)
    policies = json.loads(space("get", "networkpolicies", "--output=json"))["items"]
    selectors = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    groups = [selector for selector in selectors if "octavo.dev/leader" in selector]
    assert len(groups) == 2
    pods = model.pods()
    assert len(pods) == 4
    for selector in groups:
        found = [pod for pod in pods if selector.items() <= pod["metadata"]["labels"].items()]
        assert sorted(pod["metadata"]["labels"]["octavo.dev/rank"] for pod in found) == ["0", "1"]


def test_an_adapter_is_loaded_by_all_pods_of_a_group(platform: Platform, space: Kubectl) -> None:
    space.apply(adapter_files(width=576))
    name = "divided-adapter"  # for clients: names are of all namespaces
    model = divided(space, "adapted-group", lora={"maxLoras": 2}, podTemplate=with_files())
    model.await_settled(1)
    before = {pod["metadata"]["uid"] for pod in model.pods()}
    space.apply(adapter_of(model, name))
    space.wait(f"llmadapter/{name}", "condition=Loaded")
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        plain, adapted = stream_text(client, model.name), stream_text(client, name)
    assert adapted and adapted != plain
    assert {pod["metadata"]["uid"] for pod in model.pods()} == before
