"""A real API server takes what the chart renders, and its rights are enough and no more."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster import rbac
from octavo_operator.desired import desired_objects
from octavo_operator.desired.group import worker_deployment
from octavo_operator.process import LEASE_NAME
from tests.charts.combinations import COMBINATIONS
from tests.fakes.apiserver import ApiError
from tests.fakes.chart import one
from tests.fakes.deployments import make_deployment, with_images

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.apiserver import ApiServer
    from tests.fakes.chart import Chart

pytestmark = pytest.mark.cluster
Object = dict[str, Any]
OPERATOR = "system:serviceaccount:octavo-system:octavo-operator"
ROUTER = "system:serviceaccount:octavo-system:octavo-router"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
OWN_RULES = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


@pytest.fixture(scope="module")
def taken() -> set[str]:
    """Most combinations leave most objects as they are: once is enough."""
    return set()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_api_server_takes_all_of_it(
    apiserver: ApiServer, chart: Chart, taken: set[str], name: str
):
    """With unknown fields refused, in a namespace that enforces `restricted`, without a warning:
    of Deployments the pods' security is judged, too."""
    apiserver.warnings.clear()
    for body in chart.objects(COMBINATIONS[name]):
        if (text := json.dumps(body)) not in taken:
            apiserver.apply(body, dry_run=True)
            taken.add(text)
    assert apiserver.warnings == []


@pytest.mark.parametrize("name", ["defaults", "everything", "placed"])
def test_pods_pass_the_restricted_level(apiserver: ApiServer, chart: Chart, name: str):
    """Of each Deployment one pod, as its controller would make it, and the one of `helm test`."""
    apiserver.warnings.clear()
    made = []
    for body in chart.objects(COMBINATIONS[name]):
        if body["kind"] == "Deployment":
            template = body["spec"]["template"]
            metadata = {**template["metadata"], "name": body["metadata"]["name"]}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **template}
            body["metadata"] = {**metadata, "namespace": "octavo-system"}
        if body["kind"] == "Pod":
            apiserver.create(body, dry_run=True)
            made.append(body["metadata"]["name"])
    assert made == ["octavo-operator", "octavo-router", "octavo-test"]
    assert apiserver.warnings == []


def test_a_pod_that_may_do_more_is_refused_there(apiserver: ApiServer, chart: Chart):
    """So the test above can fail."""
    values = {"containerSecurityContext": {"allowPrivilegeEscalation": True}}
    (pod,) = (body for body in chart.objects(values) if body["kind"] == "Pod")
    with pytest.raises(ApiError, match="restricted"):
        apiserver.create(pod, dry_run=True)


def test_the_crds_are_taken(apiserver: ApiServer, chart: Chart):
    crds = [b for b in chart.objects({}, crds=True) if b["kind"] == "CustomResourceDefinition"]
    assert len(crds) == 2
    for crd in crds:
        apiserver.apply(crd, dry_run=True)


class Rights:
    """What was applied of a release's RBAC, and who may do what by it."""

    def __init__(self, server: ApiServer, objects: list[Object]) -> None:
        self._server = server
        self.objects = [
            body
            for body in objects
            if "rbac.authorization.k8s.io" in body["apiVersion"] or body["kind"] == "ServiceAccount"
        ]
        self._last = f"last-{secrets.token_hex(4)}"  # those of an earlier one may be seen yet
        self.objects += last_rights(self._last)

    def __enter__(self) -> Rights:
        for body in self.objects:
            self._server.apply(body)
        deadline = time.monotonic() + 120  # on a starved machine, too
        while not all(
            self.allows(self._last, "get", "octavo.dev", resource, "team-a")
            for resource in ("clustered", "namespaced")
        ):
            assert time.monotonic() < deadline, "the rights are not in force"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        for body in self.objects:
            self._server.delete(body)

    def allows(
        self, user: str, verb: str, group: str, resource: str, namespace: str, name: str = ""
    ) -> bool:
        plural, _, subresource = resource.partition("/")
        attributes = {
            "verb": verb, "group": group, "resource": plural, "subresource": subresource,
            "namespace": namespace, "name": name,
        }  # fmt: skip
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user,
                "groups": ["system:serviceaccounts", "system:authenticated"],
                "resourceAttributes": {k: v for k, v in attributes.items() if v},
            },
        }
        return bool(self._server.request("POST", REVIEWS, review)["status"]["allowed"])

    def rules(self, user: str, namespace: str) -> list[Object]:
        """All that it may do there with resources, by the API server's own list of them."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        # As that user: a service account brings its groups along.
        status = self._server.request("POST", OWN_RULES, review, user=user)["status"]
        assert not status["incomplete"], status
        return list(status["resourceRules"])


def last_rights(name: str) -> list[Object]:
    """One of each kind: the API server sees each kind's objects in their order, so once these
    are in force, all changes before them are, deletions too."""
    api = "rbac.authorization.k8s.io"
    objects: list[Object] = []
    for prefix, resource in (("Cluster", "clustered"), ("", "namespaced")):
        metadata: Object = {"name": name} | ({} if prefix else {"namespace": "team-a"})
        kind = f"{prefix}Role"
        rule = {"apiGroups": ["octavo.dev"], "resources": [resource], "verbs": ["get"]}
        objects += [
            {"apiVersion": f"{api}/v1", "kind": kind, "metadata": metadata, "rules": [rule]},
            {
                "apiVersion": f"{api}/v1", "kind": f"{kind}Binding", "metadata": metadata,
                "roleRef": {"apiGroup": api, "kind": kind, "name": name},
                "subjects": [{"kind": "User", "name": name, "apiGroup": api}],
            },
        ]  # fmt: skip
    return objects


def needed(served: str) -> Iterator[tuple[str, str, str, str, str]]:
    """(verb, group, resource, namespace, name) of everything that the operator's code calls."""
    for rule in rbac.SERVED:
        for verb in rule.verbs:
            yield verb, rule.kind.group, rule.resource, served, ""
    for rule in (*rbac.leading(LEASE_NAME, "octavo-operator"), *rbac.ROUTERS):
        for verb in rule.verbs:
            name = rule.names[0] if rule.names else ""
            yield verb, rule.kind.group, rule.resource, "octavo-system", name


ROUTER_CALLS = [
    (verb, group, resource)
    for group, resource in (("", "pods"), ("", "services"), ("discovery.k8s.io", "endpointslices"))
    for verb in ("list", "watch")
]
ROUTER_CALLS += [(verb, "octavo.dev", "llmdeployments") for verb in ("get", "list")]


def test_the_rights_for_all_namespaces_are_enough(apiserver: ApiServer, chart: Chart):
    with Rights(apiserver, chart.objects({})) as rights:
        assert [call for call in needed("team-a") if not rights.allows(OPERATOR, *call)] == []
        for verb, group, resource in ROUTER_CALLS:
            assert rights.allows(ROUTER, verb, group, resource, "team-a")
            assert rights.allows(ROUTER, verb, group, resource, "")


def test_the_rights_for_some_namespaces_are_enough_there_and_none_elsewhere(
    apiserver: ApiServer, chart: Chart
):
    objects = chart.objects({"operator": {"watchNamespaces": ["team-a"]}})
    with Rights(apiserver, objects) as rights:
        assert [call for call in needed("team-a") if not rights.allows(OPERATOR, *call)] == []
        elsewhere = [call for call in needed("team-b") if call[3] == "team-b"]
        assert [call for call in elsewhere if rights.allows(OPERATOR, *call)] == []
        for verb, group, resource in ROUTER_CALLS:
            assert rights.allows(ROUTER, verb, group, resource, "team-a")
            assert not rights.allows(ROUTER, verb, group, resource, "team-b")


@pytest.mark.parametrize("switched_off", ["enabled", "readDeployments"])
def test_without_the_page_routers_may_not_read_deployments(
    apiserver: ApiServer, chart: Chart, switched_off: str
):
    objects = chart.objects({"router": {"console": {switched_off: False}}})
    with Rights(apiserver, objects) as rights:
        for verb in ("get", "list"):
            assert not rights.allows(ROUTER, verb, "octavo.dev", "llmdeployments", "team-a")
        assert rights.allows(ROUTER, "list", "", "pods", "team-a")


FORBIDDEN = [
    ("get", "", "secrets", ""), ("list", "", "secrets", ""), ("get", "", "secrets", "api-keys"),
    ("create", "", "pods", ""), ("delete", "", "pods", ""), ("create", "", "pods/exec", ""),
    ("create", "", "pods/portforward", ""), ("delete", "", "persistentvolumeclaims", ""),
    ("create", "", "serviceaccounts/token", ""), ("get", "", "nodes", ""),
    ("list", "", "namespaces", ""), ("patch", "", "nodes", ""),
    ("create", "rbac.authorization.k8s.io", "rolebindings", ""),
    ("create", "rbac.authorization.k8s.io", "clusterroles", ""),
    ("update", "apiextensions.k8s.io", "customresourcedefinitions", ""),
    ("create", "admissionregistration.k8s.io", "validatingwebhookconfigurations", ""),
    ("delete", "octavo.dev", "llmdeployments", ""), ("create", "octavo.dev", "llmdeployments", ""),
    ("get", "coordination.k8s.io", "leases", "another"), ("impersonate", "", "users", ""),
]  # fmt: skip


def test_neither_operator_nor_routers_may_do_what_they_need_not(apiserver: ApiServer, chart: Chart):
    with Rights(apiserver, chart.objects({})) as rights:
        for verb, group, resource, name in FORBIDDEN:
            for namespace in ("octavo-system", "team-a", ""):
                for user in (OPERATOR, ROUTER):
                    call = (user, verb, group, resource, namespace, name)
                    assert not rights.allows(*call), call
        assert not rights.allows(ROUTER, "patch", "octavo.dev", "llmdeployments", "team-a")
        assert not rights.allows(ROUTER, "watch", "octavo.dev", "llmdeployments", "team-a")
        assert not rights.allows(ROUTER, "patch", "", "services", "team-a")
        default = "system:serviceaccount:octavo-system:default"
        assert not rights.allows(default, "list", "", "pods", "team-a")


def test_roles_have_no_wildcards(chart: Chart):
    for name in ("defaults", "two namespaces"):
        for body in chart.objects(COMBINATIONS[name]):
            for rule in body.get("rules", ()):
                assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])


def test_who_edits_a_namespace_may_edit_its_llmdeployments(apiserver: ApiServer, chart: Chart):
    """The roles are for aggregation; the controller that does it does not run here."""
    objects = chart.objects({})
    edit = one(objects, "ClusterRole", "octavo-octavo-system-llmdeployments-edit")
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "jane", "namespace": "team-a"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                    "name": edit["metadata"]["name"]},
        "subjects": [{"kind": "User", "name": "jane", "apiGroup": "rbac.authorization.k8s.io"}],
    }  # fmt: skip
    with Rights(apiserver, [*objects, binding]) as rights:
        assert rights.allows("jane", "create", "octavo.dev", "llmdeployments", "team-a")
        assert rights.allows("jane", "patch", "octavo.dev", "llmdeployments/scale", "team-a")
        assert not rights.allows("jane", "patch", "octavo.dev", "llmdeployments/status", "team-a")
        assert not rights.allows("jane", "create", "octavo.dev", "llmdeployments", "team-b")


def claiming(name: str, namespace: str = "team-a", **claims: str) -> Object:
    """A Service that claims model names."""
    metadata: Object = {"name": name, "namespace": namespace}
    if "routing" in claims:
        metadata["annotations"] = {"octavo.dev/routing": claims["routing"]}
    if "deployment" in claims:
        metadata["labels"] = {"octavo.dev/deployment": claims["deployment"]}
    spec = {"selector": {"app": "x"}, "ports": [{"port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


class TestAdmissionPolicy:
    """Of the tenant `octavo-operator`, a user who may edit Services."""

    @pytest.fixture
    def tenant(self, apiserver: ApiServer, chart: Chart) -> Iterator[ApiServer]:
        objects = [
            body for body in chart.objects({}) if body["kind"].startswith("ValidatingAdmission")
        ]
        api = "rbac.authorization.k8s.io"
        meta = {"name": "tenant", "namespace": "team-a"}
        verbs = ["get", "create", "update", "patch", "delete"]
        rule = {"apiGroups": [""], "resources": ["services"], "verbs": verbs}
        role = {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": [rule]}
        binding = {
            "apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": meta,
            "subjects": [{"kind": "User", "name": "octavo-operator", "apiGroup": api}],
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "tenant"},
        }  # fmt: skip
        for body in (*objects, role, binding):
            apiserver.apply(body)
        deadline = time.monotonic() + 120  # on a starved machine, too
        # Until the API server has seen the role, it refuses by that: not the policy's refusal.
        while refusal(apiserver, claiming("plain")) or not refuses(
            apiserver, claiming("probe", routing="{}")
        ):
            assert time.monotonic() < deadline, "the role or the policy is not in force"
            time.sleep(0.05)
        yield apiserver
        for body in (*objects, binding, role):
            apiserver.delete(body)

    def test_a_tenant_claims_no_model_names(self, tenant: ApiServer):
        assert refuses(tenant, claiming("a", routing='{"names": ["victim"]}'))
        assert refuses(tenant, claiming("a", deployment="victim"))
        assert not refuses(tenant, claiming("plain"))

    def test_a_service_of_the_operators_is_not_changed_by_others(self, tenant: ApiServer):
        mine = tenant.create(claiming("model", routing='{"names": ["m"]}', deployment="m"))
        try:
            path, kind = tenant.path_of(mine), "application/merge-patch+json"
            for change, is_allowed in (
                ({"metadata": {"annotations": {"team": "a"}}}, True),
                ({"metadata": {"annotations": {"octavo.dev/routing": "{}"}}}, False),
                ({"metadata": {"labels": {"octavo.dev/deployment": None}}}, False),
            ):
                try:
                    tenant.request(
                        "PATCH", path, change, content_type=kind, token=tenant.user_token
                    )
                except ApiError as error:
                    assert not is_allowed, error
                else:
                    assert is_allowed, change
        finally:
            tenant.delete(mine)

    def test_who_may_claim_names_may(self, tenant: ApiServer):
        api = "rbac.authorization.k8s.io"
        role = {"apiVersion": f"{api}/v1", "kind": "Role",
                "metadata": {"name": "tenant", "namespace": "team-a"}}  # fmt: skip
        claim = {"apiGroups": ["octavo.dev"], "resources": ["modelnames"], "verbs": ["claim"]}
        stored = tenant.get(role)
        tenant.patch(role, {"rules": [*stored["rules"], claim]})
        deadline = time.monotonic() + 120  # on a starved machine, too
        while refuses(tenant, claiming("a", routing='{"names": ["mine"]}')):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def refuses(server: ApiServer, body: Object) -> bool:
    """Whether the policy does."""
    error = refusal(server, body)
    assert error is None or "modelnames.octavo.dev" in str(error)
    return error is not None


def refusal(server: ApiServer, body: Object) -> ApiError | None:
    try:
        path = server.path_of(body, named=False)
        server.request("POST", path, body, token=server.user_token, dryRun="All")
    except ApiError as error:
        assert error.status == 403, error
        return error
    return None


def a_worker() -> Object:
    """As the operator makes it: it belongs to a pod of an LLMDeployment."""
    spec = {"group": {"size": 2, "secretRef": {"name": "between"}}}
    (engine,) = (
        each
        for each in desired_objects(make_deployment(spec), with_images())
        if each["kind"] == "Deployment"
    )
    engine["metadata"]["namespace"] = "team-a"
    leader = {"metadata": {"name": "leader", "uid": "u"}, "status": {"podIP": "10.0.0.7"}}
    return worker_deployment(engine, leader, 1)


def test_the_operator_may_change_only_what_belongs_to_an_llmdeployment(
    apiserver: ApiServer, chart: Chart
):
    """Its rights are for kinds; the policy is for objects, and for its account alone."""
    objects = chart.objects({})
    policy = [body for body in objects if body["kind"].startswith("ValidatingAdmissionPolicy")]
    account = "/api/v1/namespaces/octavo-system/serviceaccounts/octavo-operator/token"
    theirs: Object = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "b"},
              "metadata": {"name": "theirs", "namespace": "team-a"}}  # fmt: skip
    owner = {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "name": "m", "uid": "u",
             "controller": True, "blockOwnerDeletion": False}  # fmt: skip
    ours = {**theirs, "metadata": {**theirs["metadata"], "name": "ours"}}
    ours["metadata"]["ownerReferences"] = [owner]
    worker = a_worker()
    unmarked = {**worker, "metadata": {**worker["metadata"], "labels": {}}}
    with Rights(apiserver, objects):
        requested = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = apiserver.request("POST", account, requested)["status"]["token"]
        apiserver.create(theirs)
        for body in policy:
            apiserver.apply(body)

        def change(body: Object, method: str) -> None:
            patch = {"data": {"a": "c"}} if method == "PATCH" else None
            kind = "application/merge-patch+json"
            path = apiserver.path_of(body)
            apiserver.request(method, path, patch, content_type=kind, token=token)

        def is_denied() -> bool:
            try:
                change(theirs, "PATCH")
            except ApiError as error:
                return "only what belongs to an LLMDeployment" in error.message
            return False

        try:
            deadline = time.monotonic() + 30  # policies take effect a moment after they are stored
            while not is_denied():
                assert time.monotonic() < deadline
                time.sleep(0.2)
            with pytest.raises(ApiError, match="only what belongs"):
                change(theirs, "DELETE")
            other = {**theirs, "metadata": {**theirs["metadata"], "name": "other"}}
            with pytest.raises(ApiError, match="only what belongs"):
                apiserver.request("POST", apiserver.path_of(other, named=False), other, token=token)
            apiserver.request("POST", apiserver.path_of(ours, named=False), ours, token=token)
            change(ours, "PATCH")
            change(ours, "DELETE")
            workers = apiserver.path_of(worker, named=False)
            with pytest.raises(ApiError, match="only what belongs"):
                apiserver.request("POST", workers, unmarked, token=token)
            apiserver.request("POST", workers, worker, token=token)
            apiserver.request("DELETE", apiserver.path_of(worker), token=token)
            apiserver.delete(theirs)  # by others
        finally:
            for body in policy:
                apiserver.delete(body)
