"""The production values on the cluster: TLS between all parts, keys at every door.

It comes after the tests that share the plain installation: engines that began without TLS would be
replaced.
"""

from __future__ import annotations

import base64
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from e2e import written
from e2e.helm import CHART, NAMESPACE, RELEASE
from e2e.kubectl import Kubectl
from e2e.models import Model, simulated
from tests.fakes.certificates import make_authority

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.conftest import Platform

TENANT = written.CANARIES.new("a tenant's key in production")
ENGINE = written.CANARIES.new("the engines' key in production")
DISK = base64.b64encode(b"\x07" * 32).decode()
ROUTERS = f"{RELEASE}-router.{NAMESPACE}.svc"


def secret(name: str, **values: str) -> dict[str, Any]:
    metadata = {"name": name}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}


def tls_secret(name: str, folder: Path, certificate: str) -> dict[str, Any]:
    files = {
        "tls.crt": f"{certificate}.pem", "tls.key": f"{certificate}.key", "ca.crt": "ca.pem",
    }  # fmt: skip
    data = {key: (folder / file).read_text() for key, file in files.items()}
    return {**secret(name, **data), "type": "kubernetes.io/tls"}


@pytest.fixture
def authority(tmp_path: Path, space: Kubectl) -> Path:
    """For the routers' Service, and for all models of the namespace."""
    for name, alternative in (("router", ROUTERS), ("engine", f"*.{space.namespace}.svc")):
        make_authority(tmp_path / name, (name,), f"DNS:{alternative}")
    # What routers show to engines is of an authority of its own, which engines trust besides.
    make_authority(tmp_path / "client", ("client",), f"DNS:{ROUTERS}")
    return tmp_path


def test_the_platform_serves_with_the_values_of_production(
    platform: Platform, space: Kubectl, authority: Path
) -> None:
    system = Kubectl(platform.node, NAMESPACE)
    keys = yaml.safe_dump({"keys": [{"tenant": "t", "key": TENANT}]})
    system.apply(
        tls_secret("octavo-router-tls", authority / "router", "router"),
        tls_secret("octavo-router-client-tls", authority / "client", "client"),
        secret("engine-authority", **{"ca.crt": (authority / "engine" / "ca.pem").read_text()}),
        secret("octavo-api-keys", **{"keys.yaml": keys}),
        secret("octavo-state-token", token=written.CANARIES.new("the state token in production")),
        secret("octavo-admin-key", key=written.CANARIES.new("the admin key in production")),
        secret("octavo-engine-key", key=ENGINE),
        secret("octavo-test-key", key=TENANT),
    )
    engine_tls = tls_secret("octavo-engine-tls", authority / "engine", "engine")
    engine_tls["stringData"]["ca.crt"] += (authority / "client" / "ca.pem").read_text()
    space.apply(
        engine_tls,
        secret("octavo-engine-key", key=ENGINE),
        secret("disk-keys", secret=DISK),
    )
    values = yaml.safe_load((CHART / "values-production.yaml").read_text())
    settings = [
        *settings_of(values), "router.replicas=2",
        "router.engineTLS.existingSecret=engine-authority",
    ]  # fmt: skip
    platform.helm.upgrade(*settings)
    engine = {
        "encryption": {"secretRef": {"name": "disk-keys"}}, "kvTiers": {"disk": {"size": "1Gi"}},
    }  # fmt: skip
    model = Model(space, simulated("sealed", engine=engine))
    model.await_settled()

    url = platform.base_url.replace("http://", "https://")
    context = ssl.create_default_context(cafile=str(authority / "router" / "ca.pem"))
    context.check_hostname = False  # by address; pods of the cluster use the name
    body = {"model": "sealed", "prompt": written.PROMPT, "max_tokens": 4}
    with httpx.Client(verify=context, timeout=60) as client:
        for key, status in ((TENANT, 200), (ENGINE, 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (
                client.post(f"{url}/completions", json=body, headers=headers).status_code == status
            )
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(platform.base_url, timeout=10)  # no door without TLS
    (engine_pod, *_) = model.pods()
    address = f"https://{engine_pod['status']['podIP']}:8000"
    trusted = ssl.create_default_context(cafile=str(authority / "engine" / "ca.pem"))
    trusted.check_hostname = False
    shown = {"authorization": f"Bearer {ENGINE}"}
    with httpx.Client(verify=trusted, timeout=30) as client:  # a key alone opens nothing
        assert client.post(f"{address}/v1/completions", json=body, headers=shown).status_code == 403
        assert client.get(f"{address}/health").status_code == 200
    ours = authority / "client"
    trusted.load_cert_chain(ours / "client.pem", ours / "client.key")
    with httpx.Client(verify=trusted, timeout=30) as client:
        assert client.post(f"{address}/v1/completions", json=body).status_code == 401
        assert client.post(f"{address}/v1/completions", json=body, headers=shown).status_code == 200
    platform.helm("test", RELEASE)
    assert written.search(system) + written.search(space) == []


def settings_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    """As `--set` takes them."""
    found: list[str] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            found += settings_of(value, f"{path}.")
        else:
            found.append(f"{path}={str(value).lower() if isinstance(value, bool) else value}")
    return found
