"""TLS and API keys of engine pods where the settings name Secrets, and nothing of it otherwise."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest

from octavo.options.settings import add_engine_options, add_server_options, serve_settings
from octavo_engine.protocol.kubernetes import TLS_NAME_ANNOTATION
from octavo_operator.desired import desired_objects
from octavo_operator.desired.pod import pod_template
from octavo_operator.desired.revision import revision_of
from octavo_operator.errors import SettingsInvalid
from octavo_operator.settings import POD_MONITOR, SERVICE_MONITOR, OperatorSettings
from tests.fakes.deployments import make_deployment, with_images

TLS = with_images(OperatorSettings(engine_tls_secret="engine-tls"))
KEY = with_images(OperatorSettings(engine_key_secret="engine-key", engine_key_name="k"))
PLAIN = with_images()


def template(settings: OperatorSettings, **spec: Any) -> dict[str, Any]:
    return pod_template(make_deployment(spec), settings, "rev")


def engine(settings: OperatorSettings, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = template(settings, **spec)["spec"]["containers"][0]
    return found


def test_engines_serve_https_with_the_secret_of_their_namespace():
    pod = template(TLS)
    container = pod["spec"]["containers"][0]
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "tls")
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "tls")
    assert volume["secret"]["secretName"] == "engine-tls"
    assert volume["secret"]["defaultMode"] == 0o440
    files = {item["path"] for item in volume["secret"]["items"]}
    for flag in ("--ssl-certfile", "--ssl-keyfile"):
        (value,) = (a.partition("=")[2] for a in container["args"] if a.startswith(f"{flag}="))
        folder, _, name = value.rpartition("/")
        assert (folder, name in files) == (mount["mountPath"], True)
    assert mount["readOnly"] and "subPath" not in mount, "a renewed certificate must reach it"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_routers_learn_the_name_in_the_certificate_from_each_pod():
    annotations = template(TLS)["metadata"]["annotations"]
    assert annotations[TLS_NAME_ANNOTATION] == "smollm2.models.svc"
    service = next(o for o in desired_objects(make_deployment(), TLS) if o["kind"] == "Service")
    assert service["metadata"]["name"] == "smollm2"


@pytest.mark.parametrize("kind", [POD_MONITOR, SERVICE_MONITOR])
def test_prometheus_checks_the_certificate(kind: str):
    settings = replace(TLS, capabilities=frozenset((kind,)))
    (body,) = (o for o in desired_objects(make_deployment(), settings) if "Monitor" in o["kind"])
    key = "podMetricsEndpoints" if kind == POD_MONITOR else "endpoints"
    (endpoint,) = body["spec"][key]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "ca": {"secret": {"name": "engine-tls", "key": "ca.crt"}},
        "serverName": "smollm2.models.svc",
    }


def test_engines_require_the_key_unless_the_spec_has_one():
    reference = {"secretKeyRef": {"name": "engine-key", "key": "k"}}
    variable = {"name": "OCTAVO_API_KEY", "valueFrom": reference}
    assert variable in engine(KEY)["env"]
    own = {"name": "OCTAVO_API_KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
    for spec in ({"env": [own]}, {"args": {"api-key-file": "/run/keys"}}):
        assert variable not in engine(KEY, engine=spec)["env"]


def test_without_the_settings_pods_are_as_they_were():
    pod = template(PLAIN)
    text = str(pod)
    assert "ssl-certfile" not in text and "OCTAVO_API_KEY" not in text and "HTTPS" not in text
    assert TLS_NAME_ANNOTATION not in pod["metadata"]["annotations"]


def test_pods_are_replaced_when_they_begin_to_speak_tls_and_names_of_revisions_stay_otherwise():
    found = {revision_of(make_deployment(), settings) for settings in (PLAIN, TLS, KEY)}
    assert len(found) == 3
    other = replace(PLAIN, engine_key_name="unused")
    assert revision_of(make_deployment(), other) == revision_of(make_deployment(), PLAIN)


@pytest.mark.parametrize(
    "wrong", [{"engine_tls_secret": "No Secret"}, {"engine_key_secret": "-"},
              {"engine_key_name": "a/b"}, {"engine_client_names": ("a",)},
              {"engine_client_names": ("a b",), "engine_tls_secret": "engine-tls"}],
)  # fmt: skip
def test_what_names_no_secret_or_client_is_refused(wrong: dict[str, Any]):
    with pytest.raises(SettingsInvalid, match=next(iter(wrong))):
        OperatorSettings(**wrong)


def test_engines_take_only_clients_whose_certificates_have_the_names():
    """As the engine itself reads the flags: a name that it ignored would let everybody in."""
    settings = replace(TLS, engine_client_names=("router.svc", "spiffe://cluster/router"))
    pod = template(settings)
    container = pod["spec"]["containers"][0]
    flags = [a for a in container["args"] if a.startswith(("--ssl-", "--admin-"))]
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_server_options(parser)
    _, served, _ = serve_settings(parser.parse_args(["m", *flags]), {})
    assert served.ssl_client_names == ("router.svc", "spiffe://cluster/router")
    assert served.client_certificates == "protected", "the kubelet's probes have no certificate"
    assert served.admin_port and served.admin_host == "127.0.0.1", "administration is open to pods"
    assert served.admin_port not in [port["containerPort"] for port in container["ports"]]
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "tls")
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "tls")
    files = {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
    assert {served.ssl_certfile, served.ssl_keyfile, served.ssl_ca_certs} == files
    deployment = make_deployment()
    assert revision_of(deployment, settings) != revision_of(deployment, TLS)
    assert "--ssl-ca-certs" not in str(template(TLS))


def test_the_keys_for_files_on_disk_are_a_secret_of_the_spec():
    spec = {"engine": {"encryption": {"secretRef": {"name": "disk-keys"}}}}
    pod = template(PLAIN, **spec)
    container = pod["spec"]["containers"][0]
    (flag,) = (a for a in container["args"] if a.startswith("--encryption-key-file="))
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "encryption")
    (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "encryption")
    assert volume["secret"]["secretName"] == "disk-keys"
    (item,) = volume["secret"]["items"]
    assert flag == f"--encryption-key-file={mount['mountPath']}/{item['path']}"
    deployment = make_deployment(spec)
    assert revision_of(deployment, PLAIN) != revision_of(make_deployment(), PLAIN)
