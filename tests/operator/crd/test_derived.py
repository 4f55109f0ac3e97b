"""The files that are made from the CRD are those that would be made now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo_operator.crd.__main__ import CRDS, derived
from octavo_operator.crd.json_schema import json_schema
from tests.fakes.quick_yaml import read_yaml

ROOT = Path(__file__).parents[3]
PAGE = Path("docs/llmdeployment.md")


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    loaded: dict[str, Any] = read_yaml((ROOT / CRDS[0]).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("source", CRDS, ids=str)
def test_files_are_current(source: Path):
    files = derived(read_yaml((ROOT / source).read_text(encoding="utf-8")))
    assert len(files) == 2
    for path, text in files.items():
        is_current = (ROOT / path).read_text(encoding="utf-8") == text
        assert is_current, f"{path} is old: run python -m octavo_operator.crd"


def test_json_schema_names_the_version(crd: dict[str, Any]):
    schema = json_schema(crd)
    assert schema["properties"]["apiVersion"]["const"] == "octavo.dev/v1alpha1"
    assert schema["properties"]["kind"]["const"] == "LLMDeployment"
    assert schema["required"] == ["apiVersion", "kind", "metadata", "spec"]


def test_json_schema_refuses_unknown_fields(crd: dict[str, Any]):
    spec = json_schema(crd)["properties"]["spec"]
    assert spec["additionalProperties"] is False
    assert spec["properties"]["engine"]["additionalProperties"] is False
    # A map of anybody's keys stays one.
    arguments = spec["properties"]["engine"]["properties"]["args"]
    assert arguments["additionalProperties"]["type"] == ["integer", "string"]


def test_json_schema_has_no_kubernetes_words(crd: dict[str, Any]):
    assert "x-kubernetes" not in json.dumps(json_schema(crd))


def test_json_schema_tells_the_rules(crd: dict[str, Any]):
    rollout = json_schema(crd)["properties"]["spec"]["properties"]["rollout"]
    assert rollout["description"].endswith(
        "Canary needs strategy: Canary; set it, or leave canary out."
    )


def test_null_stays_possible_where_the_api_has_it(crd: dict[str, Any]):
    spec = json_schema(crd)["properties"]["spec"]["properties"]
    assert spec["autoscaling"]["type"] == ["object", "null"]
    assert spec["cache"]["type"] == "object"


def test_page_has_a_section_for_every_object(crd: dict[str, Any]):
    page = derived(crd)[PAGE]
    for section in ("spec.model", "spec.rollout.canary.steps[]", "status.conditions[]"):
        assert f"# {section}\n" in page
    assert "| `uri` | string | *required* |" in page
    assert "| `drainTimeout` | duration | `2m` |" in page
