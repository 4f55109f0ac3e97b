"""Each rule of the CRD with a spec it accepts and one it refuses, before a real API server.

The same table goes through LLMDeployment.parse: what the server accepts the operator accepts, and
what it refuses nobody gets past the parser on a laptop either.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import LLMDeployment
from tests.fakes.apiserver import CRD_FILE, ApiError, ApiServer
from tests.fakes.quick_yaml import read_yaml
from tests.fakes.rule_cases import CASES, TRANSITIONS, Case, cache, claim, model


def body(spec: dict[str, Any], *, name: str = "case", namespace: str = "x") -> dict[str, Any]:
    spec = {"model": {"uri": "demo://smollm2"}, **copy.deepcopy(spec)}
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }


@pytest.mark.cluster
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_the_api_server_accepts_the_good_and_refuses_the_bad(
    case: Case, apiserver: ApiServer, shared_namespace: str
):
    stored = apiserver.create(body(case.good, namespace=shared_namespace), dry_run=True)
    # Defaults filled in by the server are the parser's own.
    assert spec_of(stored) == spec_of(body(case.good, namespace=shared_namespace))
    with pytest.raises(ApiError) as refused:
        apiserver.create(body(case.bad, namespace=shared_namespace), dry_run=True)
    assert refused.value.status in (400, 422)
    assert case.message in refused.value.message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_the_parser_does_the_same(case: Case):
    LLMDeployment.parse(body(case.good))
    with pytest.raises(SpecInvalid):
        LLMDeployment.parse(body(case.bad))


@pytest.mark.cluster
@pytest.mark.parametrize(("first", "good", "bad", "message"), TRANSITIONS)
def test_a_claim_is_not_changed_under_its_pods(
    first: dict[str, Any], good: dict[str, Any], bad: dict[str, Any], message: str,
    apiserver: ApiServer, namespace: str,
):  # fmt: skip
    stored = apiserver.create(body(first, namespace=namespace))
    with pytest.raises(ApiError, match=message):
        apiserver.patch(stored, {"spec": bad})
    apiserver.patch(stored, {"spec": good})


@pytest.mark.cluster
def test_a_claim_may_be_given_up(apiserver: ApiServer, namespace: str):
    stored = apiserver.create(body(claim(size="10Gi"), namespace=namespace))
    apiserver.patch(stored, {"spec": cache(kind="EmptyDir", size="1Gi")})


@pytest.mark.cluster
def test_a_name_must_fit_into_a_label(apiserver: ApiServer, shared_namespace: str):
    apiserver.create(body({}, name="a" * 63, namespace=shared_namespace), dry_run=True)
    with pytest.raises(ApiError, match="at most 63 characters: it becomes a label"):
        apiserver.create(body({}, name="a" * 64, namespace=shared_namespace), dry_run=True)


@pytest.mark.cluster
def test_names_that_clients_use_are_of_one_thing(apiserver: ApiServer, shared_namespace: str):
    adapter = {"adapters": [{"name": "lora", "uri": "hf://org/lora"}]}
    apiserver.create(body(model(aliases=["b"]), namespace=shared_namespace), dry_run=True)
    for spec, message in (
        (model(aliases=["case"]), "must differ from the served name, which is metadata.name"),
        ({**adapter, **model(servedName="lora")}, "must have names unlike the names of the model"),
        ({**adapter, **model(aliases=["lora"])}, "must have names unlike the names of the model"),
    ):
        with pytest.raises(ApiError, match=message):
            apiserver.create(body(spec, namespace=shared_namespace), dry_run=True)
        with pytest.raises(SpecInvalid):
            LLMDeployment.parse(body(spec))


def test_every_rule_has_a_case():
    """A message of the CRD that no case provokes is a rule nobody has seen work."""
    crd = read_yaml(CRD_FILE.read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    messages = {rule["message"] for rule in rules_in(schema)}
    seen = [case.message for case in CASES] + [message for *_, message in TRANSITIONS]
    missing = {message for message in messages if not any(text in message for text in seen)}
    # Durations share their form; each has bounds of its own.
    assert {message for message in missing if not message.startswith("must be from ")} == set()


def rules_in(schema: Any) -> list[dict[str, str]]:
    if isinstance(schema, list):
        return [rule for item in schema for rule in rules_in(item)]
    if not isinstance(schema, dict):
        return []
    own = list(schema.get("x-kubernetes-validations", ()))
    return own + [rule for item in schema.values() for rule in rules_in(item)]


def spec_of(stored: dict[str, Any]) -> LLMDeployment:
    """Without what only the server knows."""
    metadata = {key: stored["metadata"][key] for key in ("name", "namespace")}
    return LLMDeployment.parse({**stored, "metadata": metadata})
