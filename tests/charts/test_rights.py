"""What each component's token may do: the table of docs/security.md, the chart and a real API
server say the same.

Red when: a right is added to the chart and not to the page; the API server allows an account
anything that is not in the table, or denies what is.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from charts.sources.rights import PAGE, Right, put_into, rights
from tests.charts.test_on_api_server import OPERATOR, ROUTER, Rights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.apiserver import ApiServer
    from tests.fakes.chart import Chart

VERBS = (
    "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection",
)  # fmt: skip
# Verbs that are no request's, but decide what a request may contain.
SPECIAL = (
    ("impersonate", "", "users"), ("impersonate", "", "groups"),
    ("impersonate", "", "serviceaccounts"), ("bind", "rbac.authorization.k8s.io", "clusterroles"),
    ("escalate", "rbac.authorization.k8s.io", "clusterroles"),
    ("bind", "rbac.authorization.k8s.io", "roles"),
    ("escalate", "rbac.authorization.k8s.io", "roles"),
    ("approve", "certificates.k8s.io", "signers"), ("sign", "certificates.k8s.io", "signers"),
    ("use", "policy", "podsecuritypolicies"), ("claim", "octavo.dev", "modelnames"),
)  # fmt: skip
STRANGER = "system:serviceaccount:team-b:nobody-knows-it"
ENGINE = "system:serviceaccount:team-a:smollm2"
USERS = {"operator": OPERATOR, "router": ROUTER}


def test_the_page_has_the_rights_of_the_chart(chart: Chart):
    text = Path(PAGE).read_text(encoding="utf-8")
    assert text == put_into(text, rights(chart.objects({})))


def test_a_right_more_changes_the_page(chart: Chart):
    """So the test above can fail."""
    text = Path(PAGE).read_text(encoding="utf-8")
    found = rights(chart.objects({}))
    assert text != put_into(text, {*found, Right("router", "get", "", "secrets", "")})
    assert text != put_into(text, {right for right in found if right.resource != "events"})


def test_no_token_is_mounted_but_by_operator_and_routers(chart: Chart):
    mounts = {}
    for body in chart.objects({}):
        if body["kind"] in ("Deployment", "Pod"):
            spec = (
                body["spec"]["template"]["spec"] if body["kind"] == "Deployment" else body["spec"]
            )
            mounts[body["metadata"]["name"]] = spec["automountServiceAccountToken"]
        if body["kind"] == "ServiceAccount":
            assert body["automountServiceAccountToken"] is False
    assert mounts == {"octavo-operator": True, "octavo-router": True, "octavo-test": False}


def served(apiserver: ApiServer) -> Iterator[tuple[str, str]]:
    """(group, resource) of all that the API server serves, subresources included."""
    found: set[tuple[str, str]] = set()
    places = [("", "/api/v1")]
    for group in apiserver.request("GET", "/apis")["groups"]:
        version = group["preferredVersion"]["groupVersion"]
        places.append((group["name"], f"/apis/{version}"))
    for group_name, path in places:
        for resource in apiserver.request("GET", path)["resources"]:
            found.add((group_name, resource["name"]))
    yield from sorted(found)


def allowed(
    live: Rights, user: str, questions: list[tuple[str, str, str]], namespace: str
) -> set[tuple[str, str, str]]:
    return {
        (verb, group, resource)
        for verb, group, resource in questions
        if live.allows(user, verb, group, resource, namespace)
    }


def in_table(found: set[Right], component: str, namespace: str) -> set[tuple[str, str, str]]:
    """Without a name, since a question without one is about all objects."""
    return {
        (right.verb, right.group, right.resource)
        for right in found
        if right.component == component and not right.name
        and right.namespace in ("", namespace)
    }  # fmt: skip


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("watched", [[], ["team-a"]], ids=["all namespaces", "one namespace"])
def test_every_verb_on_every_resource_is_allowed_where_the_table_has_it_and_nowhere_else(
    apiserver: ApiServer, chart: Chart, watched: list[str]
):
    objects: list[dict[str, Any]] = chart.objects({"operator": {"watchNamespaces": watched}})
    found = rights(objects)
    everything = [(verb, group, name) for group, name in served(apiserver) for verb in VERBS]
    # Some kinds that we write are of others, and not served here.
    ours = {(right.verb, right.group, right.resource) for right in found}
    questions = sorted({*everything, *SPECIAL, *ours})
    assert ("get", "", "secrets") in questions and ("create", "", "pods/exec") in questions
    with Rights(apiserver, objects) as live:
        for namespace in ("team-a", "team-b", "octavo-system", ""):
            # What Kubernetes lets every account do: ask who it is, and what it may do.
            rules = live.rules(STRANGER, namespace or "no-such-namespace")
            assert live.rules(ENGINE, namespace or "no-such-namespace") == rules
            everybody = {
                (verb, group, resource)
                for rule in rules
                for verb, group, resource in product(
                    rule["verbs"], rule["apiGroups"], rule["resources"]
                )
            }
            assert {group for _, group, _ in everybody} == {
                "authentication.k8s.io", "authorization.k8s.io",
            }  # fmt: skip
            for component, user in USERS.items():
                expected = in_table(found, component, namespace)
                assert allowed(live, user, questions, namespace) == (expected | everybody), (
                    component,
                    namespace,
                )


@pytest.mark.cluster
def test_rights_on_named_objects_are_for_these_alone(apiserver: ApiServer, chart: Chart):
    objects = chart.objects({})
    named = [right for right in rights(objects) if right.name]
    assert {right.name for right in named} == {"octavo-operator"}
    with Rights(apiserver, objects) as live:
        for right in named:
            call = (right.verb, right.group, right.resource, right.namespace)
            assert live.allows(USERS[right.component], *call, right.name)
            if right.resource == "leases":  # Deployments may be read where they are served
                assert not live.allows(USERS[right.component], *call, "another")
