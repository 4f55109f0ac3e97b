"""A login by a program, as kubeconfigs of managed clusters have it: it prints a token.

The protocol is client.authentication.k8s.io: `exec` of a kubeconfig's user, an ExecCredential on
standard output.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo_operator.errors import SettingsInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

VERSIONS = frozenset(f"client.authentication.k8s.io/{name}" for name in ("v1", "v1beta1"))
TIMEOUT_S = 60.0
EARLY_S = 60.0  # before a token expires
MAX_SAID = 500


@dataclass(slots=True)
class ExecLogin:
    """`token` blocks while the program runs. Safe to use from several threads."""

    command: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    api_version: str
    hint: str = ""  # what to do where the program is not there
    cluster: Mapping[str, Any] | None = None  # for programs that require it
    clock: Callable[[], float] = time.time
    _token: str = field(default="", repr=False)
    _expires_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def token(self, *, renew: bool = False) -> str:
        """The last one while it is good; `renew` where the API server has refused that. Raises
        SettingsInvalid."""
        with self._lock:
            if renew or self.clock() >= self._expires_at - EARLY_S:
                self._token, self._expires_at = self._ask()
            return self._token

    def _ask(self) -> tuple[str, float]:
        spec: dict[str, Any] = {"interactive": False}
        if self.cluster is not None:
            spec["cluster"] = dict(self.cluster)
        request = {"apiVersion": self.api_version, "kind": "ExecCredential", "spec": spec}
        environment = {**os.environ, **self.env, "KUBERNETES_EXEC_INFO": json.dumps(request)}
        try:
            done = subprocess.run(
                [self.command, *self.args], env=environment, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            hint = f": {self.hint}" if self.hint else ""
            raise SettingsInvalid(
                f"the kubeconfig logs in by {self.command}, which is not installed{hint}"
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SettingsInvalid(f"the kubeconfig's login {self.command}: {error}") from None
        if done.returncode:
            said = done.stderr.strip()[-MAX_SAID:]
            raise SettingsInvalid(
                f"the kubeconfig's login {self.command} ended with {done.returncode}: {said}"
            )
        return self._read(done.stdout)

    def _read(self, text: str) -> tuple[str, float]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        status = found.get("status") if isinstance(found, dict) else None
        status = status if isinstance(status, dict) else {}
        token = status.get("token")
        if not isinstance(token, str) or not token:
            raise SettingsInvalid(
                f"the kubeconfig's login {self.command} printed no ExecCredential with a token; "
                "certificates by a program are not supported"
            )
        expiration = status.get("expirationTimestamp")
        try:
            expires_at = datetime.datetime.fromisoformat(str(expiration)).timestamp()
        except ValueError:
            expires_at = float("inf")  # until it is refused
        return token, expires_at


def read_exec(user: Any, cluster: Mapping[str, Any], folder: Path) -> ExecLogin:
    """`user` is the `exec` of a kubeconfig's user, whatever it is. Raises SettingsInvalid."""
    spec = user if isinstance(user, dict) else {}
    command, version = spec.get("command"), spec.get("apiVersion", "")
    if not isinstance(command, str) or not command:
        raise SettingsInvalid("exec of the kubeconfig's user has no command")
    if version not in VERSIONS:
        known = ", ".join(sorted(VERSIONS))
        raise SettingsInvalid(
            f"exec of the kubeconfig's user has apiVersion {version!r}; known: {known}"
        )
    if os.sep in command:
        command = str(folder / command)
    names = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data")
    about = {name: cluster[name] for name in names if name in cluster}
    pairs = [each for each in spec.get("env") or [] if isinstance(each, dict)]
    return ExecLogin(
        command=command,
        args=tuple(str(each) for each in spec.get("args") or []),
        env={str(each.get("name")): str(each.get("value", "")) for each in pairs},
        api_version=version,
        hint=str(spec.get("installHint") or "").strip()[:MAX_SAID],
        cluster=about if spec.get("provideClusterInfo") else None,
    )
