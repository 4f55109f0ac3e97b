"""Who may call engine pods, and over TLS: by Secrets of their own namespace that settings name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import ENGINE_ADMIN_PORT
from octavo_engine.protocol.kubernetes import TLS_NAME_ANNOTATION
from octavo_operator.objects import names

if TYPE_CHECKING:
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"  # as cert-manager writes them
_VOLUME = "tls"
_MOUNT = "/run/octavo/tls"
_KEY_VARIABLE = "OCTAVO_API_KEY"
_KEY_FILE_ARG = "api-key-file"


def tls_name(deployment: LLMDeployment) -> str:
    """In the certificate: pods have no names of their own, and share it with their Service."""
    return f"{names.service(deployment.name)}.{deployment.namespace}.svc"


def pod_annotations(deployment: LLMDeployment, settings: OperatorSettings) -> dict[str, str]:
    return {TLS_NAME_ANNOTATION: tls_name(deployment)} if settings.engine_tls_secret else {}


def arguments(settings: OperatorSettings) -> list[str]:
    if not settings.engine_tls_secret:
        return []
    found = [f"--ssl-certfile={_MOUNT}/{CERTIFICATE}", f"--ssl-keyfile={_MOUNT}/{KEY}"]
    if settings.engine_client_names:  # the kubelet's probes have none
        found += [
            f"--ssl-ca-certs={_MOUNT}/{AUTHORITY}", "--ssl-cert-reqs=protected",
            f"--ssl-client-names={json.dumps(settings.engine_client_names)}",
            # Not even routers drain an engine or end requests of others: only who is in the pod.
            "--admin-host=127.0.0.1", f"--admin-port={ENGINE_ADMIN_PORT}",
        ]  # fmt: skip
    return found


def volumes(settings: OperatorSettings) -> list[dict[str, Any]]:
    """The whole volume and no single file of it: so the kubelet renews it."""
    if not settings.engine_tls_secret:
        return []
    files = (CERTIFICATE, KEY, *((AUTHORITY,) if settings.engine_client_names else ()))
    source = {
        "secretName": settings.engine_tls_secret,
        "items": [{"key": key, "path": key} for key in files],
        "defaultMode": 0o440,
    }
    return [{"name": _VOLUME, "secret": source}]


def mounts(settings: OperatorSettings) -> list[dict[str, Any]]:
    if not settings.engine_tls_secret:
        return []
    return [{"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}]


def variables(deployment: LLMDeployment, settings: OperatorSettings) -> list[dict[str, Any]]:
    """The key that callers must send, unless the spec sets keys of its own."""
    has_own = _KEY_FILE_ARG in deployment.engine.args or any(
        variable.name == _KEY_VARIABLE for variable in deployment.engine.env
    )
    if not settings.engine_key_secret or has_own:
        return []
    reference = {"name": settings.engine_key_secret, "key": settings.engine_key_name}
    return [{"name": _KEY_VARIABLE, "valueFrom": {"secretKeyRef": reference}}]


def scrape(deployment: LLMDeployment, settings: OperatorSettings) -> dict[str, Any]:
    """What a monitor's endpoint needs."""
    if not settings.engine_tls_secret:
        return {}
    authority = {"secret": {"name": settings.engine_tls_secret, "key": AUTHORITY}}
    tls = {"ca": authority, "serverName": tls_name(deployment)}
    return {"scheme": "https", "tlsConfig": tls}
