"""LLMDeployments to test with: the samples that users see, and specs built field by field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo_operator.settings import OperatorSettings
from octavo_operator.spec import LLMDeployment
from tests.fakes.quick_yaml import read_all_yaml

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"
UID = "00000000-0000-0000-0000-000000000001"
CPU_IMAGE = "registry.example.com/octavo/engine-cpu:0.1.0"
CUDA_IMAGE = "registry.example.com/octavo/engine-cuda:0.1.0"


def with_images(settings: OperatorSettings | None = None) -> OperatorSettings:
    """As every administrator must name them: the operator has no default for them."""
    settings = settings or OperatorSettings()
    images = replace(
        settings.images,
        cpu=settings.images.cpu or CPU_IMAGE,
        cuda=settings.images.cuda or CUDA_IMAGE,
    )
    return replace(settings, images=images)


def sample_bodies() -> dict[str, dict[str, Any]]:
    """By name: the file's, and the object's where a file has several."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(SAMPLES.glob("*.yaml")):
        bodies = [body for body in read_all_yaml(path.read_text("utf-8")) if body]
        for body in bodies:
            name = path.stem if len(bodies) == 1 else f"{path.stem}-{body['metadata']['name']}"
            found[name] = body
    return found


def make_body(spec: dict[str, Any] | None = None, *, name: str = "smollm2") -> dict[str, Any]:
    """A valid object in namespace `models`; `spec` fields take the place of the minimal ones."""
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": "models", "uid": UID, "generation": 1},
        "spec": {"model": {"uri": "demo://smollm2"}, **(spec or {})},
    }


def make_deployment(spec: dict[str, Any] | None = None, *, name: str = "smollm2") -> LLMDeployment:
    return LLMDeployment.parse(make_body(spec, name=name))
