"""Secrets of this run, and the search for them in all that pods and the cluster wrote.

Every namespace of a test is searched before it is deleted; `test_secrets.py` has the last word.
"""

from __future__ import annotations

import base64
import binascii
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.fakes.canary import Canaries

if TYPE_CHECKING:
    from e2e.kubectl import Kubectl

CANARIES = Canaries()
PROMPT = CANARIES.new("a prompt")  # of all traffic
FOUND: list[str] = []  # in namespaces that are gone
_PUBLIC = (".crt", ".dockerconfigjson")  # keys of Secrets whose values clients see, or that we have
_SHORTEST = 12  # a shorter value may be a word
_PODS = "octavo.dev/deployment"  # label that all pods of models have
_PLATFORM = "app.kubernetes.io/component"  # and all of the platform's own


def keep_secrets(objects: tuple[dict[str, Any], ...]) -> None:
    """From here on, what these Secrets hold is searched for."""
    for body in objects:
        if body["kind"] == "Secret":
            name = body["metadata"]["name"]
            for key, value in {**_decoded(body.get("data")), **body.get("stringData", {})}.items():
                if len(value) >= _SHORTEST and not key.endswith(_PUBLIC):
                    CANARIES.by_place[f"{key} of Secret {name}"] = value


def search(kubectl: Kubectl, canaries: Canaries = CANARIES) -> list[str]:
    """Which of them are in logs, events, and objects other than Secrets of its namespace, now."""
    written = {}
    for label in (_PODS, _PLATFORM):
        words = ("logs", f"--selector={label}", "--all-containers", "--prefix", "--tail=-1",
                 "--max-log-requests=64", "--ignore-errors")  # fmt: skip
        written[f"logs of {label}"] = kubectl.attempt(*words).stdout
        written[f"earlier logs of {label}"] = kubectl.attempt(*words, "--previous").stdout
    written["objects"] = kubectl.attempt("get", _kinds(kubectl), "--output=yaml").stdout
    return [f"{kubectl.namespace}: {each}" for each in canaries.find(written)]


@cache
def _kinds(kubectl: Kubectl) -> str:
    """Events among them."""
    words = ("api-resources", "--namespaced", "--verbs=list", "--output=name")
    return ",".join(kind for kind in kubectl(*words).split() if kind != "secrets")


def _decoded(data: dict[str, str] | None) -> dict[str, str]:
    found = {}
    for key, value in (data or {}).items():
        try:
            found[key] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):  # nothing that could be in a text
            continue
    return found
