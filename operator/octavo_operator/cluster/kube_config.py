"""Where the API server is and how to be known there: in a pod, or from a kubeconfig file."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from octavo_operator.cluster.exec_login import ExecLogin, read_exec
from octavo_operator.errors import SettingsInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class KubeConfig:
    server: str
    ca_pem: str = ""  # empty: the system's
    ca_file: Path | None = None  # read anew when a certificate is not by what was known
    token: str = field(default="", repr=False)
    login: ExecLogin | None = None  # a program that prints tokens
    token_file: Path | None = None  # read anew now and then: such tokens live an hour
    certificate_pem: str = ""
    key_pem: str = field(default="", repr=False)
    namespace: str = "default"
    is_insecure: bool = False

    @property
    def has_passing_token(self) -> bool:
        """One that is to be read anew now and then."""
        return self.token_file is not None or self.login is not None

    def read_token(self, *, renew: bool = False) -> str:
        """`renew` where the last one was refused. May block. Raises SettingsInvalid."""
        if self.login is not None:
            return self.login.token(renew=renew)
        if self.token_file is None:
            return self.token
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise SettingsInvalid(f"cannot read the token: {error}") from None

    def read_authorities(self) -> str:
        """In PEM; '' for the system's."""
        try:
            return self.ca_file.read_text() if self.ca_file is not None else self.ca_pem
        except OSError:
            return self.ca_pem

    def ssl_context(self) -> ssl.SSLContext | None:
        if not self.server.startswith("https:"):
            return None
        context = ssl.create_default_context(cadata=self.read_authorities() or None)
        if self.is_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate_pem:
            # Python loads key pairs from files only.
            with tempfile.NamedTemporaryFile("w") as pair:
                pair.write(f"{self.certificate_pem}\n{self.key_pem}")
                pair.flush()
                context.load_cert_chain(pair.name)
        return context


def load(environment: Mapping[str, str], path: str = "", context: str = "") -> KubeConfig:
    """A named kubeconfig; else the pod's own identity; else $KUBECONFIG or ~/.kube/config."""
    if not path and "KUBERNETES_SERVICE_HOST" in environment:
        return from_service_account(environment)
    path = path or environment.get("KUBECONFIG", "").split(os.pathsep)[0]
    file = Path(path).expanduser() if path else Path.home() / ".kube" / "config"
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsInvalid(
            f"cannot read the kubeconfig {file}: {error.strerror or error}; "
            "name another one in --kubeconfig or KUBECONFIG"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise SettingsInvalid(f"the kubeconfig {file} is not valid YAML: {problem}") from None
    return from_kubeconfig(content, context=context, folder=file.parent)


def from_service_account(
    environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT
) -> KubeConfig:
    host = environment["KUBERNETES_SERVICE_HOST"]
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    try:
        ca_pem = (folder / "ca.crt").read_text()
        namespace = (folder / "namespace").read_text().strip()
    except OSError as error:
        raise SettingsInvalid(
            f"the pod has no service account: {error}; set automountServiceAccountToken"
        ) from None
    return KubeConfig(
        server=f"https://{host}:{port}",
        ca_pem=ca_pem,
        ca_file=folder / "ca.crt",
        token_file=folder / "token",
        namespace=namespace,
    )


def from_kubeconfig(content: Any, *, context: str = "", folder: Path = Path()) -> KubeConfig:
    """`content` is whatever the file holds."""
    if not isinstance(content, dict):
        raise SettingsInvalid("the kubeconfig must be an object")
    name = context or str(content.get("current-context") or "")
    chosen = _named(content, "contexts", name, "context")
    cluster = _named(content, "clusters", str(chosen.get("cluster")), "cluster")
    user = _named(content, "users", str(chosen.get("user")), "user")
    if "auth-provider" in user:
        raise SettingsInvalid(
            f"user {chosen.get('user')} of the kubeconfig has an auth-provider, which Kubernetes "
            "has given up; use exec, a token or a client certificate (kubectl create token ...)"
        )
    server = cluster.get("server")
    if not isinstance(server, str) or not server:
        raise SettingsInvalid("the kubeconfig's cluster has no server")
    token_file = user.get("tokenFile")
    return KubeConfig(
        server=server.rstrip("/"),
        ca_pem=_pem(cluster, "certificate-authority", folder),
        token=str(user.get("token") or ""),
        login=read_exec(user["exec"], cluster, folder) if "exec" in user else None,
        token_file=folder / str(token_file) if token_file else None,
        certificate_pem=_pem(user, "client-certificate", folder),
        key_pem=_pem(user, "client-key", folder),
        namespace=str(chosen.get("namespace") or "default"),
        is_insecure=bool(cluster.get("insecure-skip-tls-verify")),
    )


def _named(content: dict[str, Any], place: str, name: str, inner: str) -> dict[str, Any]:
    for entry in content.get(place) or []:
        if isinstance(entry, dict) and entry.get("name") == name:
            found = entry.get(inner)
            return found if isinstance(found, dict) else {}
    raise SettingsInvalid(f"the kubeconfig has no {inner} named {name!r}")


def _pem(holder: dict[str, Any], name: str, folder: Path) -> str:
    data, path = holder.get(f"{name}-data"), holder.get(name)
    try:
        if data:
            return base64.b64decode(str(data), validate=True).decode()
        return (folder / str(path)).read_text() if path else ""
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"{name} of the kubeconfig cannot be read: {error}") from None
