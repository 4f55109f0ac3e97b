"""The API server and the parser are of one mind, on specs that nobody thought of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings

from octavo_operator.desired import desired_objects
from octavo_operator.errors import SpecInvalid
from octavo_operator.spec import LLMDeployment
from tests.fakes.apiserver import ApiError
from tests.fakes.deployments import make_body, with_images
from tests.fakes.random_specs import spec_schema, specs

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster
SHARED_SERVER = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def placed(spec: dict[str, Any], namespace: str) -> dict[str, Any]:
    body = make_body(spec)
    return {**body, "metadata": {"name": "random", "namespace": namespace}}


@settings(SHARED_SERVER, max_examples=150)
@given(specs(spec_schema()))
def test_both_accept_or_both_refuse(
    apiserver: ApiServer, shared_namespace: str, spec: dict[str, Any]
):
    body = placed(spec, shared_namespace)
    try:
        stored = apiserver.create(body, dry_run=True)
    except ApiError as error:
        assert error.status in (400, 422)
        with pytest.raises(SpecInvalid):
            LLMDeployment.parse(body)
        return
    deployment = LLMDeployment.parse({**stored, "metadata": body["metadata"]})
    assert deployment == LLMDeployment.parse(body)


@settings(SHARED_SERVER, max_examples=40)
@given(specs(spec_schema()))
def test_what_is_made_of_an_accepted_spec_is_accepted(
    apiserver: ApiServer, shared_namespace: str, spec: dict[str, Any]
):
    try:
        deployment = LLMDeployment.parse(placed({**spec, "replicas": 1}, shared_namespace))
        objects = desired_objects(deployment, with_images())
    except SpecInvalid:
        return
    for body in objects:
        body["metadata"]["ownerReferences"][0]["uid"] = "00000000-0000-0000-0000-000000000001"
        apiserver.apply(body, dry_run=True)
