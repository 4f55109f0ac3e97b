"""Models that see and hear on the cluster: pictures and sounds in chat, through a router.

The models are tiny and random, and come in ConfigMaps. What their answers say means nothing: that
they follow what was sent, and that what was sent before is found again, does.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from PIL import Image

from e2e.cluster import images
from e2e.models import Model, real
from tests.engine.speech.test_decode import wav
from tests.fakes.seeing import data_url, encoded, write_seeing_model

if TYPE_CHECKING:
    from pathlib import Path

    from openai.types.chat import ChatCompletion

    from e2e.cluster.choose import Cluster
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

FOLDER = "/model"
DECODING = "engine-cpu-media"  # the image with decoders of pictures
RATE = 16_000
QUESTION = {"type": "text", "text": "tell me more of this"}


def model_files(name: str, folder: Path) -> dict[str, Any]:
    """A ConfigMap with a tiny model."""
    paths = sorted(write_seeing_model(folder / name, name).iterdir())
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-files"},
        "binaryData": {path.name: base64.b64encode(path.read_bytes()).decode() for path in paths},
    }


def with_files(name: str, **engine: Any) -> dict[str, Any]:
    """An LLMDeployment whose pods have that ConfigMap in a folder."""
    mount = {"name": "files", "mountPath": FOLDER, "readOnly": True}
    template = {
        "spec": {
            "containers": [{"name": "engine", "volumeMounts": [mount]}],
            "volumes": [{"name": "files", "configMap": {"name": f"{name}-files"}}],
        }
    }
    body = real(name, replicas=2, engine=engine, podTemplate=template)
    body["spec"]["model"]["uri"] = f"file://{FOLDER}"
    return body


def deployed(space: Kubectl, name: str, folder: Path, **engine: Any) -> Model:
    space.apply(model_files(name, folder))
    model = Model(space, with_files(name, **engine))
    model.await_settled(2)
    return model


def picture(colour: str, **fields: Any) -> dict[str, Any]:
    url = data_url(encoded(Image.new("RGB", (80, 60), colour)))
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def sound(seed: int, **fields: Any) -> dict[str, Any]:
    noise = np.random.default_rng(seed).normal(0.0, 0.1, 4800).astype(np.float32)
    data = base64.b64encode(wav(noise, RATE)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, **fields}


def ask(platform: Platform, model: Model, *parts: Any) -> ChatCompletion:
    messages: Any = [{"role": "user", "content": [*parts, QUESTION]}]
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model=model.name, messages=messages, temperature=0, max_tokens=5, logprobs=True
        )


def said(answer: ChatCompletion) -> list[float]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    return [token.logprob for token in logprobs.content]


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def check_answers(platform: Platform, model: Model, first: Any, other: Any, named: Any) -> None:
    """What is sent again is found where it is, by its uuid too; another one is not taken for it."""
    answer = ask(platform, model, first)
    assert said(ask(platform, model, other)) != said(answer)
    num_tokens = answer.usage.prompt_tokens if answer.usage is not None else 0

    def is_found() -> bool:
        again = ask(platform, model, first)
        assert said(again) == said(answer)
        return cached(again) == num_tokens - 1

    model.until(is_found, "cached prompt", 30)
    by_name = ask(platform, model, named)
    assert (said(by_name), cached(by_name)) == (said(answer), num_tokens - 1)


def test_sounds_in_chat(platform: Platform, space: Kubectl, tmp_path: Path) -> None:
    """With the plain image, which reads WAV."""
    model = deployed(space, "qwen2audio", tmp_path, dtype="float32")
    named = {"type": "input_audio", "uuid": "noise"}
    check_answers(platform, model, sound(1, uuid="noise"), sound(2), named)
    with pytest.raises(openai.BadRequestError, match="this model takes no pictures"):
        ask(platform, model, picture("red"))


@pytest.mark.image(DECODING)
def test_pictures_in_chat(
    platform: Platform, node: Cluster, space: Kubectl, tmp_path: Path
) -> None:
    node.load((DECODING,))
    image = images.reference(DECODING)
    model = deployed(space, "llava", tmp_path, dtype="float32", image=image)
    named = {"type": "image_url", "uuid": "square"}
    check_answers(platform, model, picture("red", uuid="square"), picture("blue"), named)
