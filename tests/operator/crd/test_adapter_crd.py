"""LLMAdapter before a real API server, and its parser, which says the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import AdapterSpec, LLMAdapter
from tests.fakes.apiserver import ADAPTER_CRD_FILE, ApiError
from tests.fakes.quick_yaml import read_yaml
from tests.operator.crd.test_shape import walk

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

GOOD: dict[str, Any] = {"deployment": "smollm2", "uri": "file:///adapters/tax"}


def body(spec: dict[str, Any], namespace: str = "default") -> dict[str, Any]:
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMAdapter",
        "metadata": {"name": "tax", "namespace": namespace},
        "spec": spec,
    }


BAD = {
    "no deployment": ({"uri": "hf://a/b"}, "deployment"),
    "no uri": ({"deployment": "smollm2"}, "uri"),
    "another scheme": ({**GOOD, "uri": "pvc://claim/tax"}, "must start with one of hf://"),
    "a relative path": ({**GOOD, "uri": "file://tax"}, "file:///ABSOLUTE/PATH"),
    "a way out": ({**GOOD, "uri": "file:///adapters/../etc"}, "must not have .. in its path"),
    "a name": ({**GOOD, "name": "no spaces please"}, "letters, digits and"),
    "a flag": ({**GOOD, "pinned": "often"}, "pinned"),
}


def test_the_parser_fills_in_what_is_left_out():
    adapter = LLMAdapter.parse(body(GOOD))
    assert (adapter.deployment, adapter.adapter) == (
        "smollm2", AdapterSpec("tax", "file:///adapters/tax"),
    )  # fmt: skip
    assert adapter.adapter.lora_path == "/adapters/tax"
    named = LLMAdapter.parse(body({**GOOD, "name": "org/Tax-v2", "pinned": True}))
    assert named.adapter == AdapterSpec("org/Tax-v2", "file:///adapters/tax", pinned=True)


@pytest.mark.parametrize("case", BAD)
def test_the_parser_refuses(case: str):
    spec, message = BAD[case]
    with pytest.raises(SpecInvalid, match=message):
        LLMAdapter.parse(body(spec))


@pytest.mark.parametrize("broken", [None, 1, {}, {"spec": 5}, {"kind": "LLMAdapter"}])
def test_whatever_it_is_the_parser_says_so(broken: Any):
    with pytest.raises(SpecInvalid):
        LLMAdapter.parse(broken)


@pytest.mark.cluster
def test_it_is_stored_with_its_defaults(apiserver: ApiServer, namespace: str):
    stored = apiserver.create(body(GOOD, namespace))
    assert stored["spec"] == {**GOOD, "pinned": False}
    assert LLMAdapter.parse_stored(stored).adapter == LLMAdapter.parse(body(GOOD)).adapter


@pytest.mark.cluster
@pytest.mark.parametrize("case", BAD)
def test_the_api_server_refuses(case: str, apiserver: ApiServer, shared_namespace: str):
    spec, message = BAD[case]
    with pytest.raises(ApiError, match=message):
        apiserver.create(body(spec, shared_namespace), dry_run=True)


@pytest.mark.cluster
def test_its_deployment_stays(apiserver: ApiServer, namespace: str):
    stored = apiserver.create(body(GOOD, namespace))
    with pytest.raises(ApiError, match="cannot change; create another LLMAdapter"):
        apiserver.patch(stored, {"spec": {"deployment": "other"}})
    apiserver.patch(stored, {"spec": {"uri": "hf://org/tax", "pinned": True}})


def test_every_field_is_described_and_bounded():
    crd = read_yaml(ADAPTER_CRD_FILE.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, field in walk(schema):
        assert field.get("description") or path == "metadata" or path.endswith("[]"), path
        if field.get("type") == "string" and "enum" not in field:
            assert "maxLength" in field or "format" in field, path
        if field.get("type") == "array":
            assert "maxItems" in field, path
