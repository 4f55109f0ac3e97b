"""Certificates that the chart makes: real servers take them, and upgrades keep them."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from octavo_engine.server.settings import ServerSettings
from tests.charts.combinations import GENERATED, PRODUCTION
from tests.fakes.chart import CHART, REGISTRY, laid_over, one
from tests.fakes.server import running

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.apiserver import ApiServer
    from tests.fakes.chart import Chart

VALUES: dict[str, Any] = laid_over(PRODUCTION, GENERATED)
ROUTER = "octavo-router.octavo-system.svc"
SECRETS = {"octavo-ca", "octavo-router-tls", "octavo-router-client-tls", "octavo-engine-tls"}


def write(folder: Path, secret: dict[str, Any]) -> Path:
    """As a pod has it mounted."""
    mounted: Path = folder / secret["metadata"]["name"]
    mounted.mkdir()
    for name, value in secret["data"].items():
        (mounted / name).write_bytes(base64.b64decode(value))
    return mounted


def test_routers_open_engines_by_them_and_engines_open_none(chart: Chart, tmp_path: Path):
    objects = chart.objects(VALUES)
    mounted = {
        name: write(tmp_path, one(objects, "Secret", name)) for name in SECRETS - {"octavo-ca"}
    }
    engine = mounted["octavo-engine-tls"]
    settings = ServerSettings(
        ssl_certfile=str(engine / "tls.crt"), ssl_keyfile=str(engine / "tls.key"),
        ssl_ca_certs=str(engine / "ca.crt"), ssl_cert_reqs="protected", ssl_client_names=(ROUTER,),
    )  # fmt: skip
    with running(settings=settings) as server:
        for shown, status in (
            ("octavo-router-client-tls", 200), ("octavo-engine-tls", 403), ("", 403),
        ):  # fmt: skip
            context = ssl.create_default_context(
                cafile=str(mounted["octavo-router-tls"] / "ca.crt")
            )
            if shown:
                context.load_cert_chain(mounted[shown] / "tls.crt", mounted[shown] / "tls.key")
            url = f"https://127.0.0.1:{server.port}/v1/models"
            extensions = {"sni_hostname": "smollm2.team-a.svc"}
            with httpx.Client(verify=context) as client:
                answer = client.get(url, extensions=extensions)
                assert answer.status_code == status, shown
    (folder := tmp_path / "ca").mkdir()
    write(folder, one(objects, "Secret", "octavo-ca"))
    assert "ca.crt" not in one(objects, "Secret", "octavo-ca")["data"]


@pytest.mark.cluster
def test_they_stay_over_upgrades_until_two_thirds_of_their_time(
    apiserver: ApiServer, helm: str, tmp_path: Path
):
    values = tmp_path / "values.yaml"

    def upgraded(more: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        """The Secrets of one more upgrade, with the cluster looked at, as the cluster has them."""
        values.write_text(json.dumps(laid_over(laid_over(REGISTRY, VALUES), more or {})))
        done = subprocess.run(
            [helm, "template", "octavo", str(CHART), "--namespace", "octavo-system", "--values",
             str(values), "--dry-run=server", "--kubeconfig", str(apiserver.kubeconfig),
             "--show-only", "templates/certificates.yaml"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = [body for body in yaml.safe_load_all(done.stdout) if body]
        for body in found:
            apiserver.apply(body, manager="helm")
        return {body["metadata"]["name"]: body for body in found}

    def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
        return {name for name in after if before[name]["data"] != after[name]["data"]}

    first = upgraded()
    try:
        assert first.keys() == SECRETS
        until = int(first["octavo-engine-tls"]["metadata"]["annotations"]["octavo.dev/renew-after"])
        assert until == pytest.approx(time.time() + 365 * 86400 * 2 / 3, abs=3600)
        again = upgraded()
        assert changed(first, again) == set()
        old = again["octavo-router-client-tls"]
        old["metadata"]["annotations"]["octavo.dev/renew-after"] = str(int(time.time()) - 1)
        apiserver.apply(old, manager="helm")
        renewed = upgraded()
        assert changed(again, renewed) == {"octavo-router-client-tls"}
        authority = [found[name]["data"]["ca.crt"] for found in (again, renewed)
                     for name in SECRETS - {"octavo-ca"}]  # fmt: skip
        assert len(set(authority)) == 1, "all of one authority, which stays"
        named = upgraded({"certManager": {"routerNames": ["llm.example.com"]}})
        assert changed(renewed, named) == {"octavo-router-tls"}
    finally:
        for body in first.values():
            apiserver.delete(body)
