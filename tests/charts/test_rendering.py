"""What the chart renders: for many values, and refused where the values cannot work."""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, ROUTER_COMPONENT
from octavo_operator.cli import PREFIX, add_options, read_settings, read_values
from octavo_router.config.load import all_flags, load_config
from tests.charts.combinations import (
    COMBINATIONS,
    DIGEST,
    EPP,
    GATEWAY,
    ISSUER,
    KEYS,
    PRODUCTION,
    TLS,
)
from tests.fakes.chart import CHART, NOTES, Chart, RenderError, laid_over, nested, one

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Object = dict[str, Any]


def pods(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """(metadata, spec) of every pod."""
    for body in objects:
        if body["kind"] == "Deployment":
            template = body["spec"]["template"]
            yield template["metadata"], template["spec"]
        elif body["kind"] == "Pod":
            yield body["metadata"], body["spec"]


def container(objects: list[Object], name: str) -> Object:
    (found,) = (c for _, spec in pods(objects) for c in spec["containers"] if c["name"] == name)
    return dict(found)


KUBECONFIG = """
clusters: [{name: a, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: a, user: {token: t}}]
contexts: [{name: a, context: {cluster: a, user: a, namespace: octavo-system}}]
current-context: a
"""


@pytest.mark.parametrize("name", COMBINATIONS)
def test_what_is_rendered_fits_together(chart: Chart, name: str, tmp_path: Path):
    """Selectors find pods, names found in one place exist in another, and flags are known."""
    objects = chart.objects(COMBINATIONS[name])
    kinds = {(body["kind"], body["metadata"]["name"]) for body in objects}
    keys = [(b["kind"], b["metadata"].get("namespace"), b["metadata"]["name"]) for b in objects]
    assert len(keys) == len(set(keys)), "one object twice"
    # One that cannot be called would keep a cluster from its own work; CRDs and policies judge.
    assert not [kind for kind, _ in kinds if "Webhook" in kind]
    labels = [metadata["labels"] for metadata, _ in pods(objects)]
    for body in objects:
        for selector in _selectors(body):
            assert any(selector.items() <= each.items() for each in labels), (
                body["kind"],
                selector,
            )
    for metadata, spec in pods(objects):
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "octavo"
        ports = {p["name"] for c in spec["containers"] for p in c.get("ports", ())}
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        for each in spec["containers"]:
            assert {mount["name"] for mount in each.get("volumeMounts", ())} <= volumes
            for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
                assert probe not in each or each[probe]["httpGet"]["port"] in ports
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in kinds
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    _check_operator(container(objects, "operator"), tmp_path / "kubeconfig")
    _check_router(objects)


def _selectors(body: Object) -> Iterator[dict[str, str]]:
    spec = body.get("spec", {})
    selector = spec.get("selector")
    if body["kind"] == "Service":
        yield selector
    elif body["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        yield selector["matchLabels"]
    elif body["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]


def _check_operator(found: Object, kubeconfig: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    variables = {v["name"]: "x" for v in found["env"] if v["name"].startswith(PREFIX)}
    values = read_values(parser.parse_args(found["args"]), variables)
    values["router-tls-ca"] = ""  # a file of the pod
    values["kubeconfig"] = str(kubeconfig)  # the pod's own identity is not here
    _, settings, run = read_settings(values, {})
    assert found["ports"][0]["containerPort"] == run.port
    assert settings.router.namespace == "octavo-system"


def _check_router(objects: list[Object]) -> None:
    found = container(objects, "router")
    flags = {flag.name: flag.variable for flag in all_flags()}
    args = {arg.removeprefix("--").partition("=")[0] for arg in found["args"]}
    assert args <= {*flags, "config"}
    ours = {v["name"] for v in found["env"] if v["name"].startswith("OCTAVO_")}
    assert ours <= set(flags.values())
    assert found["ports"][0]["containerPort"] == 8080
    config = _router_config(objects)
    assert config.server.port == 8080
    (spec,) = (s for _, s in pods(objects) if s["containers"][0]["name"] == "router")
    assert spec["terminationGracePeriodSeconds"] > config.server.drain_timeout_s
    paths = [mount["mountPath"] for mount in found["volumeMounts"]]
    for file in (config.server.tls_cert, config.flow.keys_file, config.epp.tls_key):
        assert not file or any(file.startswith(path) for path in paths)


def _router_config(objects: list[Object]) -> Any:
    name = one(objects, "Deployment", _name(objects, "router"))["metadata"]["name"]
    text = one(objects, "ConfigMap", name)["data"]["router.yaml"]
    return load_config(text=text)


def _name(objects: list[Object], component: str) -> str:
    (name,) = (
        body["metadata"]["name"]
        for body in objects
        if body["kind"] == "Deployment" and body["metadata"]["labels"][COMPONENT_LABEL] == component
    )
    return str(name)


def test_defaults_are_two_routers_and_an_operator_that_serves_all_namespaces(chart: Chart):
    objects = chart.objects({})
    router = one(objects, "Deployment", "octavo-router")
    assert router["spec"]["replicas"] == 2
    assert router["spec"]["template"]["metadata"]["labels"][COMPONENT_LABEL] == ROUTER_COMPONENT
    config = _router_config(objects)
    assert config.discovery.kubernetes.enabled
    assert config.discovery.kubernetes.namespaces == ("*",)
    assert config.flow.hold_timeout_s == 30
    assert {b["metadata"]["name"] for b in objects if b["kind"] == "NetworkPolicy"} == {
        "octavo-operator", "octavo-router", "octavo-test",
    }  # fmt: skip
    assert not [body for body in objects if body["kind"] in ("Ingress", "Secret", "HTTPRoute")]
    assert one(objects, "Service", "octavo-router")["spec"]["type"] == "ClusterIP"


def test_roles_are_for_the_named_namespaces_and_nothing_is_cluster_wide(chart: Chart):
    values = {
        "operator": {"watchNamespaces": ["team-a", "team-b"]},
        "rbac": {"aggregate": False},
        "admissionPolicy": {"enabled": False},
    }
    objects = chart.objects(values)
    wide = ("Cluster", "ValidatingAdmission")
    assert not [body for body in objects if body["kind"].startswith(wide)]
    roles = {
        (b["metadata"]["namespace"], b["metadata"]["name"]) for b in objects if b["kind"] == "Role"
    }
    assert roles == {
        ("octavo-system", "octavo-operator"),
        ("team-a", "octavo-operator-served"), ("team-b", "octavo-operator-served"),
        ("team-a", "octavo-router"), ("team-b", "octavo-router"),
    }  # fmt: skip
    assert "--namespaces=team-a,team-b" in container(objects, "operator")["args"]
    assert _router_config(objects).discovery.kubernetes.namespaces == ("team-a", "team-b")
    served = one(objects, "NetworkPolicy", "octavo-router")["spec"]["egress"][2]["to"][0]
    assert served["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]


def test_the_admission_policy_is_for_the_namespaces_that_are_served(chart: Chart):
    name = "octavo-octavo-system-modelnames"
    binding = one(chart.objects({}), "ValidatingAdmissionPolicyBinding", name)
    assert "matchResources" not in binding["spec"]
    values = {"operator": {"watchNamespaces": ["team-a", "team-b"]}}
    binding = one(chart.objects(values), "ValidatingAdmissionPolicyBinding", name)
    selector = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert selector == [
        {
            "key": "kubernetes.io/metadata.name",
            "operator": "In",
            "values": ["team-a", "team-b"],
        }
    ]
    account = {"operator": {"serviceAccount": {"name": "other"}}}
    policy = one(chart.objects(account), "ValidatingAdmissionPolicy", name)
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"].endswith('!= "system:serviceaccount:octavo-system:other"')


def test_images_are_named_by_registry_tag_and_digest(chart: Chart):
    def images(values: Object) -> dict[str, str]:
        objects = chart.objects(values)
        args = dict(a.split("=", 1) for a in container(objects, "operator")["args"])
        found = {name: container(objects, name)["image"] for name in ("operator", "router", "test")}
        return found | {"cpu": args["--cpu-image"], "cuda": args["--cuda-image"]}

    on_the_nodes = {"images": {"registry": "", "pullPolicy": "Never"}}
    assert images(on_the_nodes) == {
        "operator": "octavo/operator:0.1.0", "router": "octavo/router:0.1.0",
        "test": "octavo/router:0.1.0",
        "cpu": "octavo/engine-cpu:0.1.0", "cuda": "octavo/engine-cuda:0.1.0",
    }  # fmt: skip
    assert images(COMBINATIONS["images each their own"]) == {
        "operator": f"registry.example.com/octavo/operator@{DIGEST}",
        "router": "other.example.com/octavo/router:2",
        "test": "other.example.com/octavo/router:2",
        "cpu": f"cpu.example.com/octavo/engine-cpu@{DIGEST}",
        "cuda": "registry.example.com/octavo/engine-cuda:0.1.0",
    }
    offline = images(COMBINATIONS["air-gapped"])
    assert all(image.startswith("registry.local:5000/") for image in offline.values())
    assert offline["cuda"] == "registry.local:5000/mirror/engine-cuda:1"


def test_nothing_is_rendered_without_a_registry(chart: Chart):
    """A name without one is a public registry's, where anybody may own it."""
    with pytest.raises(RenderError, match=r"images\.registry is not set.* images\.pullPolicy"):
        chart.files({"images": {"registry": ""}})
    own = {"image": {"repository": "mirror.example.com/octavo/any"}}
    parts = {"operator": own, "router": own, "engines": {"cpu": own, "cuda": own}}
    assert chart.files({"images": {"registry": ""}, **parts}), "the names have one of their own"
    parts["engines"] = {"cpu": own}
    with pytest.raises(RenderError, match="nodes would pull octavo/engine-cuda"):
        chart.files({"images": {"registry": ""}, **parts})
    assert chart.files({"images": {"registry": ""}, "global": {"imageRegistry": "a.example"}})


def test_pull_secrets_reach_engines_as_names(chart: Chart):
    def args(values: Object) -> list[str]:
        found: list[str] = container(chart.objects(values), "operator")["args"]
        return [arg for arg in found if arg.startswith("--image-pull-secrets")]

    assert args({}) == []
    secrets = [{"name": "one"}, {"name": "two"}]
    assert args({"global": {"imagePullSecrets": secrets}}) == ["--image-pull-secrets=one,two"]


def test_engines_take_the_users_that_the_cluster_assigns(chart: Chart):
    """OpenShift refuses pods that name one."""
    args = container(chart.objects(COMBINATIONS["OpenShift"]), "operator")["args"]
    assert "--engine-user=none" in args
    assert not [arg for arg in container(chart.objects({}), "operator")["args"] if "user" in arg]


def test_gateways_that_send_to_engines_are_let_in(chart: Chart):
    args = container(chart.objects(COMBINATIONS["endpoint picker"]), "operator")["args"]
    (found,) = (arg for arg in args if arg.startswith("--engine-clients="))
    assert json.loads(found.partition("=")[2]) == [
        {"namespaceSelector": {"matchLabels": {"a": "gateways"}}}
    ]


def test_the_operator_knows_the_deployment_that_its_lease_goes_with(chart: Chart):
    for values in ({}, {"fullnameOverride": "llm"}):
        objects = chart.objects(values)
        (name,) = (
            body["metadata"]["name"] for body in objects
            if body["kind"] == "Deployment" and body["metadata"]["name"].endswith("-operator")
        )  # fmt: skip
        assert f"--deployment={name}" in container(objects, "operator")["args"]
        rules = [
            rule for body in objects if body["kind"] == "Role" for rule in body["rules"]
            if rule["resources"] == ["deployments"]
        ]  # fmt: skip
        assert rules == [
            {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get"],
             "resourceNames": [name]}
        ]  # fmt: skip


def test_a_changed_configuration_replaces_the_routers_pods_and_a_new_chart_does_not(chart: Chart):
    def template(values: Object) -> Object:
        return dict(one(chart.objects(values), "Deployment", "octavo-router")["spec"]["template"])

    assert template({}) == template({"operator": {"workers": 3}})
    assert template({}) != template({"router": {"config": {"routing": {"policy": "random"}}}})
    assert "helm.sh/chart" not in json.dumps(template({}))


def test_operator_and_routers_read_the_same_token(chart: Chart):
    def reference(values: Object) -> Object:
        objects = chart.objects(values)
        found = []
        for name in ("operator", "router"):
            (variable,) = (
                v for v in container(objects, name)["env"] if v["name"].endswith("TOKEN")
            )
            found.append(variable["valueFrom"]["secretKeyRef"])
        assert found[0] == found[1]
        return dict(found[0])

    assert reference({}) == {"name": "octavo-router-state", "key": "token", "optional": True}
    assert reference(KEYS) == {"name": "octavo-router-state", "key": "token", "optional": False}
    made = one(chart.objects(KEYS), "Secret", "octavo-router-state")
    assert len(made["data"]["token"]) == 64  # 48 characters, in base64
    own = COMBINATIONS["keys and their own token"]
    assert reference(own) == {"name": "state", "key": "t", "optional": False}
    assert not [body for body in chart.objects(own) if body["kind"] == "Secret"]


REFUSED: dict[str, Object] = {
    "router.service.type": {"router": {"service": {"type": "LoadBalancer"}}},
    "Ingress or HTTPRoute": {"ingress": {"enabled": True}},
    "requires? no API keys|require no API keys": GATEWAY,
    "httpRoute.parentRefs": laid_over(KEYS, {"httpRoute": {"enabled": True}}),
    "inferencePools need router.epp.enabled": {
        "inferencePools": [{"name": "a", "deployment": "b"}]
    },
    "keep it out: say who it is in engines.clients": laid_over(
        EPP, {"inferencePools": [{"name": "a", "deployment": "b"}]}
    ),
    "is no name in inferencePools": laid_over(EPP, {"httpRoute": {"inferencePool": "a"}}),
    "would count everything twice": {"monitoring": {"podMonitor": True, "serviceMonitor": True}},
    "minReplicas is above maxReplicas": {
        "router": {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}
    },
    "must stay 8080": {"router": {"config": {"server": {"port": 9000}}}},
    "set router.replicas": {"router": {"config": {"server": {"workers": 2}}}},
    "router.stateToken.existingSecret": {"router": {"config": {"server": {"state_token": "x"}}}},
    "router.adminKey.existingSecret": {"router": {"config": {"server": {"admin_key": "x"}}}},
    "would take /metrics away": {"router": {"config": {"server": {"admin_port": 9100}}}},
    "reached from other pods: set router.adminKey": {"router": {"adminPort": 9100}},
    "is the port of something else": {
        "router": {"adminPort": 8080, "adminKey": {"existingSecret": "admin-key"}}
    },
    "router.engineKey.existingSecret": {"router": {"config": {"discovery": {"engine_key": "x"}}}},
    "engines require a key that routers must show": {
        "engines": {"apiKey": {"secretName": "engine-key"}}
    },
    "set router.engineTLS.existingSecret": {"engines": {"tls": {"secretName": "engine-tls"}}},
    "with engines.tls.secretName they serve HTTPS": laid_over(
        COMBINATIONS["endpoint picker"],
        laid_over(TLS, {"engines": {"tls": {"secretName": "engine-tls"}}}),
    ),
    "would make no certificate": {"certManager": {"issuer": {"name": "authority"}}},
    "clientCertificates needs TLS": {"engines": {"tls": {"clientCertificates": True}}},
    "set router.engineTLS.clientSecret": laid_over(
        TLS, {"engines": {"tls": {"secretName": "engine-tls", "clientCertificates": True}}}
    ),
    "would both fill the same Secrets": laid_over(
        laid_over(TLS, ISSUER), {"generatedCertificates": {"enabled": True}}
    ),
    "generatedCertificates.enabled would make no": {"generatedCertificates": {"enabled": True}},
    "set operator.watchNamespaces": laid_over(
        PRODUCTION, {"generatedCertificates": {"enabled": True}}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_values_that_cannot_work_are_refused_with_a_sentence(chart: Chart, message: str):
    with pytest.raises(RenderError, match=message):
        chart.files(REFUSED[message])


def volume(objects: list[Object], name: str, mounted: str) -> Object:
    """The Secret's part of a volume of the container `name`, found by where it is mounted."""
    (spec,) = (spec for _, spec in pods(objects) if spec["containers"][0]["name"] == name)
    (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == mounted)
    (found,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
    assert mount.get("readOnly") and "subPath" not in mount, "it would never be renewed"
    return dict(found["secret"])


def test_in_production_every_connection_is_encrypted_and_every_door_has_a_key(chart: Chart):
    objects = chart.objects(PRODUCTION)
    config = _router_config(objects)
    operator = container(objects, "operator")
    router = container(objects, "router")
    # clients to routers
    assert config.server.tls_cert and config.server.tls_key
    assert volume(objects, "router", "/etc/octavo/tls")["secretName"] == "octavo-router-tls"
    assert all(router[p]["httpGet"]["scheme"] == "HTTPS" for p in ("livenessProbe", "startupProbe"))
    # the operator to routers
    assert "--router-scheme=https" in operator["args"]
    assert "--router-tls-ca=/etc/octavo/router-ca/ca.crt" in operator["args"]
    # routers to engines
    assert "--engine-tls-secret=octavo-engine-tls" in operator["args"]
    assert config.discovery.tls_ca == "/etc/octavo/engine-ca/ca.crt"
    assert volume(objects, "router", "/etc/octavo/engine-ca")["items"] == [
        {"key": "ca.crt", "path": "ca.crt"}
    ]
    # and engines know routers by theirs
    name = "octavo-router.octavo-system.svc"
    assert f"--engine-client-names={name}" in operator["args"]
    assert config.discovery.tls_cert == "/etc/octavo/engine-client/tls.crt"
    assert config.discovery.tls_key == "/etc/octavo/engine-client/tls.key"
    shown = volume(objects, "router", "/etc/octavo/engine-client")
    assert shown["secretName"] == "octavo-router-client-tls"
    assert {item["path"] for item in shown["items"]} == {"tls.crt", "tls.key"}
    # keys: of tenants, of the administrator, of engines, of the operator
    assert config.flow.keys_file and not config.server.open_state
    names = {v["name"]: v.get("valueFrom", {}).get("secretKeyRef") for v in router["env"]}
    assert names["OCTAVO_ROUTER_ADMIN_KEY"] == {"name": "octavo-admin-key", "key": "key"}
    assert config.server.admin_port, "/debug and /metrics are where clients are"
    assert names["OCTAVO_ROUTER_ENGINE_KEY"] == {"name": "octavo-engine-key", "key": "key"}
    assert names["OCTAVO_ROUTER_STATE_TOKEN"]["optional"] is False
    assert "--engine-key-secret=octavo-engine-key" in operator["args"]
    # tenants, and the rest of the defaults that must stay as they are
    assert config.flow.cache_scope == "tenant"
    kinds = {body["kind"] for body in objects}
    assert {"NetworkPolicy", "ValidatingAdmissionPolicy", "PodDisruptionBudget"} <= kinds
    assert not [body for body in objects if body["kind"] == "Secret"], "made by us, it would change"


def test_administrators_of_routers_have_a_port_that_no_client_reaches(chart: Chart):
    """Its Service is for the scraper; NetworkPolicies let in nobody else, and the key is needed."""
    monitored = {"monitoring": {"serviceMonitor": True}}
    objects = chart.objects(laid_over(PRODUCTION, monitored))
    ports = {port["name"]: port["containerPort"] for port in container(objects, "router")["ports"]}
    admin = _router_config(objects).server
    assert (admin.admin_host, admin.admin_port) == ("0.0.0.0", ports["admin"])
    assert ports["admin"] != ports["http"]
    services = {
        body["metadata"]["name"]: {port["targetPort"] for port in body["spec"]["ports"]}
        for body in objects
        if body["kind"] == "Service"
    }
    assert services["octavo-router"] == {"http"}
    assert services["octavo-router-admin"] == {"admin"}
    (monitor,) = (
        body for body in objects
        if body["kind"] == "ServiceMonitor" and body["metadata"]["name"] == "octavo-router"
    )  # fmt: skip
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("admin", "https")
    assert endpoint["authorization"]["credentials"]["name"] == "octavo-admin-key"
    (policy,) = (
        body["spec"] for body in objects
        if body["kind"] == "NetworkPolicy" and body["metadata"]["name"] == "octavo-router"
    )  # fmt: skip
    (rule,) = (
        one for one in policy["ingress"] if {"port": "admin", "protocol": "TCP"} in one["ports"]
    )
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    others = [one for one in policy["ingress"] if one is not rule]
    assert peer not in [each for one in others for each in one["from"]]


def test_the_settings_of_production_reach_engine_pods(chart: Chart, tmp_path: Path):
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(container(chart.objects(PRODUCTION), "operator")["args"])
    values = read_values(args, {}) | {
        "router-tls-ca": "", "kubeconfig": str(tmp_path / "kubeconfig"),
    }  # fmt: skip
    _, settings, _ = read_settings(values, {})
    assert settings.engine_tls_secret == "octavo-engine-tls"
    assert settings.engine_client_names == ("octavo-router.octavo-system.svc",)
    assert (settings.engine_key_secret, settings.engine_key_name) == ("octavo-engine-key", "key")


def test_cert_manager_fills_the_secrets_that_pods_mount(chart: Chart):
    objects = chart.objects(laid_over(PRODUCTION, ISSUER))
    made = [body for body in objects if body["kind"] == "Certificate"]
    certificates = {
        (body["metadata"]["namespace"], body["spec"]["secretName"]): body["spec"]["dnsNames"]
        for body in made
    }
    # Only the routers' second one opens engines: not theirs for clients, nor that of an engine.
    assert [body["spec"]["secretName"] for body in made
            if "client auth" in body["spec"]["usages"]] == ["octavo-router-client-tls"]  # fmt: skip
    assert certificates == {
        ("octavo-system", "octavo-router-tls"): [
            "octavo-router.octavo-system.svc",
            "octavo-router.octavo-system.svc.cluster.local",
            "octavo-router.octavo-system",
            "llm.example.com",
        ],
        ("octavo-system", "octavo-router-client-tls"): ["octavo-router.octavo-system.svc"],
        ("team-a", "octavo-engine-tls"): ["*.team-a.svc"],
        ("team-b", "octavo-engine-tls"): ["*.team-b.svc"],
    }
    assert not [body for body in chart.objects(PRODUCTION) if body["kind"] == "Certificate"]


def test_the_authority_of_engines_may_be_another_one_than_that_of_routers(chart: Chart):
    objects = chart.objects(COMBINATIONS["engines of another authority"])
    secret = volume(objects, "router", "/etc/octavo/engine-ca")
    assert (secret["secretName"], secret["items"][0]["key"]) == ("engine-ca", "root.pem")


def test_two_releases_do_not_meet(chart: Chart):
    """In two namespaces: nothing that is cluster-wide has the same name but what must be one."""
    values = {"operator": {"watchNamespaces": ["team-a"]}}
    first = chart.objects(values, release="octavo", namespace="one")
    second = chart.objects(
        {"operator": {"watchNamespaces": ["team-b"]}}, release="octavo", namespace="two"
    )
    names = [
        {(b["kind"], b["metadata"].get("namespace"), b["metadata"]["name"]) for b in objects}
        for objects in (first, second)
    ]
    assert names[0] & names[1] == set()


@pytest.mark.parametrize("name", ["llmdeployments.octavo.dev", "llmadapters.octavo.dev"])
def test_the_crds_are_ours_and_stay(chart: Chart, name: str):
    text = (CHART.parents[1] / f"crds/{name}.yaml").read_text()
    source = yaml.load(text, yaml.CSafeLoader)

    def rendered(values: dict[str, Any]) -> dict[str, Any]:
        (found,) = (
            body
            for body in chart.objects(values, crds=True)
            if "Definition" in body["kind"] and body["metadata"]["name"] == name
        )
        return found

    found = rendered({})
    assert found["spec"] == source["spec"]
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in rendered({"crds": {"keep": False}})["metadata"]


HOSTILE = (
    "a: b",
    "{{ fail }}",
    'x"y',
    "it's",
    "# no comment",
    "- item",
    "&anchor",
    "a\nb: c",
    "true",
)


def values_full_of(text: str) -> Object:
    return laid_over(
        COMBINATIONS["everything"],
        {
            "commonLabels": {"note": text},
            "images": {"registry": text, "tag": text},
            "alerts": {"runbookURL": text, "labels": {"note": text}, "namespace": text},
            "dashboards": {"annotations": {"note": text}, "namespace": text},
            "ingress": {"className": text, "hosts": [text], "annotations": {"note": text}},
            "httpRoute": {"hostnames": [text], "annotations": {"note": text}},
            "monitoring": {"namespace": text, "interval": text, "labels": {"note": text}},
            "inferencePools": [{"name": "a", "deployment": text}],
            "operator": {"priorityClassName": text, "extraArgs": [text],
                         "podAnnotations": {"note": text}, "nodeSelector": {"note": text},
                         "serviceAccount": {"name": text}},
            "router": {
                "config": {"health": {"canary_prompt": text}}, "priorityClassName": text,
                "apiKeys": {"existingSecret": text, "secretKey": text},
                "stateToken": {"existingSecret": text, "secretKey": text},
                "adminKey": {"existingSecret": text, "secretKey": text},
                "engineKey": {"existingSecret": text, "secretKey": text},
                "engineTLS": {"existingSecret": text, "caKey": text},
                "tls": {"existingSecret": text, "caKey": text}, "epp": {"tlsSecret": text},
                "service": {"type": "LoadBalancer", "loadBalancerClass": text,
                            "annotations": {"note": text}},
                "serviceAccount": {"name": text},
            },
            "test": {"apiKeySecret": text, "apiKeySecretKey": text},
        },
    )  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(chart: Chart, text: str):
    """Whatever a string holds, it changes no structure (the API server judges its value)."""

    def shape(objects: list[Object]) -> list[tuple[str, ...]]:
        return [(body["kind"], *sorted(body["metadata"])) for body in objects]

    objects = chart.objects(values_full_of(text))
    assert shape(objects) == shape(chart.objects(values_full_of("text")))
    assert _router_config(objects).health.canary_prompt == text
    args = container(objects, "operator")["args"]
    assert args[-1] == text
    assert f"--monitoring-namespace={text}" in args
    rule = one(objects, "PrometheusRule", "octavo")["spec"]["groups"][0]["rules"][0]
    assert rule["labels"]["note"] == text


def test_notes_name_the_next_commands(chart: Chart):
    notes = chart.files({})[NOTES]
    assert "kubectl apply -n octavo-system -f - <<END" in notes
    sample = notes.partition("<<END\n")[2].partition("\n  END")[0]
    assert yaml.safe_load(sample)["spec"] == {"model": {"uri": "demo://smollm2"}}
    assert "curl http://127.0.0.1:8080/v1/chat/completions" in notes
    assert "Everybody who reaches the routers may use them" in notes
    guarded = chart.files(
        laid_over(COMBINATIONS["keys and tls"], nested("operator.watchNamespaces", ["team-a"]))
    )[NOTES]
    assert "authorization: Bearer $OCTAVO_API_KEY" in guarded
    assert "curl -k https://127.0.0.1:8080" in guarded
    assert "kubectl apply -n team-a" in guarded


def test_helm_lints_without_a_warning(helm: str):
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
