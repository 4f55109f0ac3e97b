"""An LLMAdapter comes and goes under traffic: no pod is replaced, and no request fails."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import openai

from e2e.models import Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

NAME = "legal-adapter"  # for clients: names are of all namespaces
FOLDER = "/adapters/legal"


def test_an_adapter_comes_and_goes_and_no_pod_is_replaced(
    platform: Platform, space: Kubectl
) -> None:
    space.apply(adapter_files())
    model = Model(
        space, simulated("adapted", replicas=2, lora={"maxLoras": 2}, podTemplate=with_files())
    )
    model.await_settled(2)
    before = uids(model)
    with Traffic(platform.base_url, model.name, clients=3, tokens=8) as traffic:
        traffic.await_answers(6)
        space.apply(adapter_of(model, NAME))
        space.wait(f"llmadapter/{NAME}", "condition=Loaded")
        with Traffic(platform.base_url, NAME, clients=3, tokens=8) as adapted:
            adapted.await_answers(20)
        adapted.assert_unbroken()
        (listed,) = model.status()["adapters"]
        assert (listed["name"], listed["resource"], listed["phase"]) == (NAME, NAME, "Loaded")
        assert set(listed["pods"]) <= {pod["metadata"]["name"] for pod in model.pods()}
        space("delete", "llmadapter", NAME)
        model.until(lambda: not is_served(platform, NAME), "end of the adapter", 60)
        traffic.await_answers(6)
    traffic.assert_unbroken()
    assert uids(model) == before
    assert "adapters" not in model.status()


def uids(model: Model) -> set[str]:
    return {pod["metadata"]["uid"] for pod in model.pods()}


def is_served(platform: Platform, name: str) -> bool:
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        try:
            client.completions.create(model=name, prompt="a", max_tokens=1)
        except openai.NotFoundError:
            return False
        return True


def adapter_of(model: Model, name: str) -> dict[str, Any]:
    """An LLMAdapter with the files that its pods have."""
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMAdapter",
        "metadata": {"name": name},
        "spec": {"deployment": model.name, "uri": f"file://{FOLDER}"},
    }


def adapter_files(width: int = 16) -> dict[str, Any]:
    """A ConfigMap with an adapter of rank 1 of one layer of that many columns and outputs, large
    enough to change what the demo's model says."""
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    size = 4 * width
    tensors = {
        f"{prefix}.lora_A.weight": {
            "dtype": "F32", "shape": [1, width], "data_offsets": [0, size]
        },
        f"{prefix}.lora_B.weight": {
            "dtype": "F32", "shape": [width, 1], "data_offsets": [size, 2 * size]
        },
    }  # fmt: skip
    header = json.dumps(tensors).encode()
    values = struct.pack(f"<{2 * width}f", *(math.sin(i) for i in range(2 * width)))
    weights = struct.pack("<Q", len(header)) + header + values
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none",
              "target_modules": ["q_proj"]}  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "legal-files"},
        "data": {"adapter_config.json": json.dumps(config)},
        "binaryData": {"adapter_model.safetensors": base64.b64encode(weights).decode()},
    }


def with_files() -> dict[str, Any]:
    """Engine pods that have them in a folder."""
    mount = {"name": "legal", "mountPath": FOLDER, "readOnly": True}
    return {
        "spec": {
            "containers": [{"name": "engine", "volumeMounts": [mount]}],
            "volumes": [{"name": "legal", "configMap": {"name": "legal-files"}}],
        }
    }
