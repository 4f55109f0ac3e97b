"""A replica of several pods: the model is divided between them, and one of them serves."""

from __future__ import annotations

import base64
import threading
from typing import TYPE_CHECKING, Any

import openai

from e2e.models import Model, real
from e2e.traffic import stream_text

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl


def divided(space: Kubectl, **spec: Any) -> Model:
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
    return Model(space, real("divided", engine=engine, group=group, **spec))


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
