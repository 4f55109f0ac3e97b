"""Keeps the packet filter as the NetworkPolicies say; runs beside kube-proxy in the same network.

The cluster is small and its life short: everything is listed again and again, nothing is watched.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from e2e.cluster.policy_rules import ENTRY, Body, Pod, World, rules

PERIOD_S = 0.25
# Listings from the API server's memory, not from etcd.
_LISTS = {
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
    "pods": "/api/v1/pods",
    "namespaces": "/api/v1/namespaces",
}


class Api:
    """Lists objects with the administrator's token."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        self._server = config["clusters"][0]["cluster"]["server"]
        self._token = config["users"][0]["user"]["token"]
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def list(self, path: str) -> list[Body]:
        request = urllib.request.Request(
            f"{self._server}{path}?resourceVersion=0",
            headers={"Authorization": f"Bearer {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=5, context=self._context) as answer:
            listed: dict[str, Any] = json.load(answer)
        return listed.get("items") or []


def wanted(api: Api) -> str:
    found = {name: api.list(path) for name, path in _LISTS.items()}
    pods = [pod for body in found["pods"] if (pod := Pod.parse(body))]
    namespaces = {
        body["metadata"]["name"]: body["metadata"].get("labels", {}) for body in found["namespaces"]
    }
    return rules(found["policies"], World(pods, namespaces))


def main() -> int:
    api = Api(Path(os.environ["KUBECONFIG"]))
    applied = ""
    _restore(f"*filter\n:{ENTRY} - [0:0]\nCOMMIT\n")
    while "KUBE-FORWARD" not in _forwards():
        time.sleep(0.1)
    for hook in ("FORWARD", "INPUT"):
        # Before kube-proxy's rules, which are there by now: they accept what they have translated.
        subprocess.run(["iptables", "-w", "-I", hook, "1", "-j", ENTRY], check=True)
    while True:
        try:
            text = wanted(api)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            print(f"The API did not answer: {error}", file=sys.stderr, flush=True)
        else:
            if text != applied:
                _restore(text)
                applied = text
        time.sleep(PERIOD_S)


def _forwards() -> str:
    command = ["iptables", "-w", "-S", "FORWARD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _restore(text: str) -> None:
    subprocess.run(["iptables-restore", "--noflush", "--wait"], input=text, text=True, check=True)


if __name__ == "__main__":
    sys.exit(main())
