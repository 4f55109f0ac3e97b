"""KV blocks on a claim outlive their pod: what one computed, its successor reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from e2e.models import Model, simulated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

PROMPT = "one two three four " * 80


@pytest.fixture
def claim(space: Kubectl, tmp_path: Path) -> Iterator[str]:
    """On a folder of the node, which all pods may write to."""
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    name = f"kv-{space.namespace}"
    size = {"storage": "1Gi"}
    space.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
    )
    space.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "kv"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": name,
                "resources": {"requests": size},
            },
        }
    )
    yield "kv"
    space("delete", "persistentvolume", name, "--wait=false")


def test_a_prompt_is_found_after_its_pod_was_replaced(
    platform: Platform, space: Kubectl, claim: str
) -> None:
    tiers = {"shared": {"existingClaim": claim, "size": "512Mi"}}
    model = Model(space, simulated("stored", engine={"kvTiers": tiers}))
    model.await_settled()
    assert num_cached(platform, model) == 0
    assert num_cached(platform, model) > 256
    (old,) = model.pods()
    space("delete", "pod", old["metadata"]["name"])  # it writes what it has before it ends
    model.await_settled()
    (new,) = model.pods()
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert num_cached(platform, model) > 256


def num_cached(platform: Platform, model: Model) -> int:
    """Tokens of the prompt that were not computed."""
    with openai.OpenAI(base_url=platform.base_url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": PROMPT}], max_tokens=4
        )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0
