"""How a pod reaches the API server: address, authorities, and a token renewed on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from octavo_router.errors import ConfigInvalid
from octavo_router.http.fetch import FetchTarget
from octavo_router.http.tls import ClientTls

if TYPE_CHECKING:
    from collections.abc import Mapping

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """Where the API is and who asks."""

    host: str
    port: int
    tls: ClientTls | None = None
    token_file: Path | None = None
    namespace: str = "default"

    @property
    def target(self) -> FetchTarget:
        """For the next connection: a cluster's authority is renewed on disk as well."""
        if self.tls is None:
            return FetchTarget(self.host, self.port)
        self.tls.look()
        return FetchTarget(self.host, self.port, self.tls.context)

    def headers(self) -> dict[str, str]:
        """Read for every request: the kubelet replaces the token before it expires."""
        headers = {"accept": "application/json", "user-agent": "octavo-router"}
        if self.token_file is not None:
            headers["authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        return headers


def in_cluster(env: Mapping[str, str], folder: Path = ACCOUNT_FOLDER) -> ServiceAccount:
    """The pod's own service account. Raises ConfigInvalid outside of a cluster."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit() or not (folder / "token").is_file():
        problem = "this is no pod with a service account; give discovery.kubernetes.api instead"
        raise ConfigInvalid("discovery.kubernetes", problem)
    tls = ClientTls(str(folder / "ca.crt"), field="discovery.kubernetes")
    _ = tls.context  # what is wrong with it is said at the start
    namespace = folder / "namespace"
    return ServiceAccount(
        host,
        int(port),
        tls,
        folder / "token",
        namespace.read_text().strip() if namespace.is_file() else "default",
    )


def at_url(
    url: str, *, token_file: str = "", ca_file: str = "", namespace: str = ""
) -> ServiceAccount:
    """An API server by its URL: `kubectl proxy`, or one with a token and a CA."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigInvalid("discovery.kubernetes.api", f"{url!r} is no http(s):// URL")
    tls = None
    if parts.scheme == "https":
        tls = ClientTls(ca_file, field="discovery.kubernetes.ca_file")
        _ = tls.context
    return ServiceAccount(
        parts.hostname,
        parts.port or (443 if tls else 80),
        tls,
        Path(token_file) if token_file else None,
        namespace or "default",
    )
